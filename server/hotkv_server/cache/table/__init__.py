"""The index: it finds entries by key in the block table, which the server shares with clients, and
stores the server's own data about each entry. Pure: no clock, no I/O, no threads."""
