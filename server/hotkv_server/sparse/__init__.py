"""Sparse decode in the server: records sequences (contexts that are decoded sparsely), selects
blocks for clients, and counts figures per layer."""
