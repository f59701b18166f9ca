"""Simulates the cache: replays traces of requests through the cache core, with the trace's times
as the clock."""
