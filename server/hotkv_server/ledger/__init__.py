"""Counts what the cache saves each engine, and forecasts what a larger one would."""
