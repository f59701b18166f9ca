"""Reads the hints about retention and sessions that requests give to the cache."""
