"""Containers without Docker: images read from Dockerfiles, processes that outlive the stack, and their logs."""
