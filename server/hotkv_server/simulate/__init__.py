"""The simulator: replays traces of requests through the core, with the trace's time."""
