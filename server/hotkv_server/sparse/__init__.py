"""Sparse decode in the server: sequences, selections on behalf of clients, remembered hot sets,
figures per layer."""
