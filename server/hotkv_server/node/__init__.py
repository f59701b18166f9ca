"""Turns the core's decisions into I/O. Owns the core and the timers."""
