"""How long a test waits for an event that comes unless the code is wrong. A slow machine must not decide a test."""

PATIENCE_SECONDS = 200.0
TRAIN_SECONDS = 1000.0  # for a training, which the suite runs at a low priority
