"""Clients' hints: how the server should retain a request's blocks, and its client session."""
