"""Performs what routers ask for by hints (retain, pin, demote, release, prefetch blocks), and
records the outcomes."""
