"""Residency: pins the blocks of running requests. See README.md."""
