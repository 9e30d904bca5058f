"""The stack itself: its configuration, its processes, and the commands that start and stop it."""
