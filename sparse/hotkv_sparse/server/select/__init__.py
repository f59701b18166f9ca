"""Sparse decode in the server: sequences, selections, and engines' counters per layer."""
