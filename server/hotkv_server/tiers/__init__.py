"""Tiers below host memory: each moves bytes between slots of the arena and a store of its own.

The core decides which block lies where (`core.lower`); the runtime calls a tier and tells the core
what has come of it.
"""
