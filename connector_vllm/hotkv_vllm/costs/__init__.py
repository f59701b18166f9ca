"""Decides when a hit is worth its time."""
