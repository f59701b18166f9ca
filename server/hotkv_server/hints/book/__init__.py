"""Records sessions and outcomes of hints, and performs actions on blocks in parts. Pure: no clock,
no I/O, no threads."""
