"""The laptop cloud: emulated Google APIs that start the real training and serving code as local processes."""
