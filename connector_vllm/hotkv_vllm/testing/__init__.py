"""Replacements for device code, for tests and benchmarks without a GPU. Not for production."""
