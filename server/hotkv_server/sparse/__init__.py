"""Sparse decode in the server: sequences, selections on behalf of clients, figures per layer."""
