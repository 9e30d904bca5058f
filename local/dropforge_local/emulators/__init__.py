"""Emulated Google APIs, one module or package each; `..server` puts them on one HTTP and one gRPC port."""
