"""Sequences, and selections over their representations. Pure."""
