"""Sparse decode's capabilities of the server, which registers them if this package is installed."""
