"""Decides whether a hit is loaded or computed, by which of the two is faster."""
