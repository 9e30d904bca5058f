"""The `dropforge` command."""

INTERRUPTED = 130  # the exit code after Ctrl-C
