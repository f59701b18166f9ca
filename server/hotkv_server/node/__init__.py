"""The node: an event loop that executes the core's decisions. It owns the core, the sessions, the
transfers and the timers."""
