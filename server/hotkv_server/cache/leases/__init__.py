"""Leases, retention pins, loads and stores: which owner pins or reserves which entries, and until
when. Pure: no clock, no I/O, no threads."""
