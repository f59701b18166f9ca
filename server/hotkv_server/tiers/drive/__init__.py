"""Moves blocks between host memory and tiers, on the event loop."""
