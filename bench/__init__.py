"""Benchmarks: each module has a main() that prints medians; `make bench` runs them."""
