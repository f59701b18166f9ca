"""Decides which blocks move between host memory and the tiers below it. Pure."""
