"""The code of the container images. An image holds `common` and its own folder below /app/containers."""
