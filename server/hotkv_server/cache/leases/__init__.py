"""Leases, retention pins, loads and stores: which of them pins or reserves which blocks, and until
when. Pure: no clock, no I/O, no threads."""
