"""Decides which blocks residencies may pin, and pins them. Pure: no clock, no I/O, no threads."""
