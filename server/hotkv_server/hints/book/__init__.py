"""Records the sessions that routers name and the outcomes of hints, and performs actions on blocks
in parts. Pure: no clock, no I/O, no threads."""
