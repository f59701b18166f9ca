"""Decides which blocks move between host memory and the tiers. Pure: no clock, no I/O, no
threads."""
