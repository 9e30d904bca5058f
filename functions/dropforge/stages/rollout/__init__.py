"""Stage `rollout`: puts a model behind a named endpoint, goes back to the one before, or retires the endpoint."""
