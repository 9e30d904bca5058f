"""Runs pods on this machine: containers as process groups, with environment, volumes and probes."""
