"""Replaces code for GPUs, so that tests and benchmarks can run without a GPU. Not for
production."""
