"""Sparse decode in the server: records sequences (contexts that are decoded), selects blocks for
clients, and counts figures per layer."""
