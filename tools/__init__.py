"""Developers' scripts; not installed."""
