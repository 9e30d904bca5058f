"""The language: from source text to a compiled `Program`."""
