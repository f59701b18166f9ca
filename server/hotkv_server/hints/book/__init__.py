"""Keeps what hints have come to, and acts on blocks in parts. Pure."""
