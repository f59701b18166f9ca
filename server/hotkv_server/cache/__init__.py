"""The core of the cache: it decides which blocks are stored, evicted, pinned and found, and holds
all state that these decisions need. Pure: no clock, no I/O, no threads, no torch, no protobuf.
Callers pass the current time as `now_s`."""
