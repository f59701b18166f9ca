"""The core of the cache: all its state and decisions. Pure: no clock, I/O, threads, torch or
protobuf; callers pass the time as `now_s`."""
