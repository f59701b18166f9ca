"""Doubles for tests and benchmarks without a GPU. No engine that serves uses them."""
