"""Decides what residencies may hold, and pins it. Pure."""
