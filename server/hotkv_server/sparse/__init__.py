"""Sparse decode in the server: sequences, selections for clients, figures per layer."""
