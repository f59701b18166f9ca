"""Replays traces of requests through the cache core; the trace's times are the clock."""
