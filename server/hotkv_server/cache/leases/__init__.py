"""Records which leases, loads, stores and retention pins (pins that a request asked for) protect or
reserve which blocks, and until when. Uses no clock, no I/O and no threads."""
