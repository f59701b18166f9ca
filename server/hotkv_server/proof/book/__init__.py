"""Origins of blocks, and the latest requests. Pure: no clock, no I/O, no threads."""
