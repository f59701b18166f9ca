"""Remembers what the latest requests loaded, and where these blocks came from."""
