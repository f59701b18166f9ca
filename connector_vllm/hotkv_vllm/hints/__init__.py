"""Hints of requests to the cache."""
