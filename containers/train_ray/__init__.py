"""The training image for slices of several TPU hosts: MaxText on a Ray cluster."""
