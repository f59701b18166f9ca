"""The core of the cache: decisions and the books behind them. No clock, no I/O, no threads, no
torch, no protobuf; callers pass the time in as `now_s`."""
