"""Runs tests and benchmarks without a GPU. Not for production."""
