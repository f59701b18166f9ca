"""Turns the core's decisions into I/O; owns the core; timers."""
