"""Decides which blocks move between host memory and the tiers below it, and records the moves under
way. Pure: no clock, no I/O, no threads."""
