"""Attention of CPU engines."""
