"""stages/sweep."""
