"""Tiers below host memory: each moves bytes between slots of the arena and a store of its own.

The book decides which block lies where (`tiers.book.lower`); the drive calls a tier and tells the
book what has come of it.
"""
