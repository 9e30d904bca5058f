"""Performs the calls that executions wait for: HTTP, connectors, mocks, sub-executions, logs."""
