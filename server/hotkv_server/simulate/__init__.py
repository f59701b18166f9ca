"""Simulates the cache: replays traces of requests through the cache core. The times in the trace
serve as the clock."""
