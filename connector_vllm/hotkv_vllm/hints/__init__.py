"""Reads the hints that requests give to the cache: how to retain their blocks, and to which session
they belong."""
