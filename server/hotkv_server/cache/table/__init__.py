"""The index: entries by key, the block table that it shares with clients, and the server's own data
about each block. Pure: no clock, no I/O, no threads."""
