"""stages/await_."""
