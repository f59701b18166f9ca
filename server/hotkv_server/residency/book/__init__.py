"""Decides what residencies may pin, and pins it. Pure."""
