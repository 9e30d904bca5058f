"""How long a test waits for an event that comes unless the code is wrong. A slow machine must not decide a test."""

PATIENCE_SECONDS = 200.0
