"""Tells people (channels) and other systems (run events) about a run. Imports `money`, `context` and below."""
