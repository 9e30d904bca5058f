"""The `dropforge` command."""
