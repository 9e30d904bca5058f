"""The training image for TPUs: MaxText."""
