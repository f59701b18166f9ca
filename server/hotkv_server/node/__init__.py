"""The node: a cache server without its gRPC services. It runs on an event loop, and executes the
decisions of the core, which records the blocks and decides what to evict. It owns the core, the
sessions, the transfers (loads and stores) and the timers."""
