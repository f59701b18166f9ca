"""Identifies everything that decides the bytes of a block in this engine (weights, adapters,
exactness of KV), notices changes, and lets the ranks agree on one key space."""
