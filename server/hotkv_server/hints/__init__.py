"""Hints of routers: what they ask for, and what comes of it."""
