"""Slots: the pool, its tenants and policies, and making room. Pure."""
