"""Decides whether the engine loads a hit from the server or computes its tokens, whichever is
faster. Learns both times from measurements."""
