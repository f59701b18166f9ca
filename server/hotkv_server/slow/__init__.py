"""Remembers the slowest requests and transfers, with their stages."""
