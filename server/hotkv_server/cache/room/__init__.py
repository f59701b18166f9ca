"""Slots: the pool, its tenants and policies, and how room is made. Pure."""
