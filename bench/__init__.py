"""Benchmarks: the main() of each module prints medians; `make bench` runs all modules."""
