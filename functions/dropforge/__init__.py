"""dropforge's control plane: what the deployed functions, the containers and the command line share."""

__version__ = "0.1.0"
