"""The node: a cache server without its gRPC services. It owns the core, the sessions, the
transfers and the timers, and executes the core's decisions on an event loop."""
