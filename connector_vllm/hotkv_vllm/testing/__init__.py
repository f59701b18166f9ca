"""Replaces code that needs a GPU, so that tests and benchmarks run without a GPU. Not for
production."""
