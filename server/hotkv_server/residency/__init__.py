"""Residencies: each pins the blocks of a running request in host memory. See README.md."""
