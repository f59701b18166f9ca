"""Finds hits."""
