"""Decides what moves between host memory and tiers below. Pure."""
