"""Loads hits."""
