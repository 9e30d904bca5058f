"""tell."""
