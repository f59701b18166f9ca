"""Stores what steps compute."""
