"""Estimates the memory of sparse decode, device and host, and how many requests fit: `python -m
tools.estimate`. Runs no model, estimates no times; each figure has its formula."""
