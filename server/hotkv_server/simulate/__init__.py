"""The simulator: traces of requests, replayed through the core with trace time."""
