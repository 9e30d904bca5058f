"""What runs pods on this machine: containers as process groups, their environment, volumes and probes."""
