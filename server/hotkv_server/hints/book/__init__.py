"""Routers' sessions, outcomes of hints, and actions on blocks. Pure: no clock, no I/O, no
threads."""
