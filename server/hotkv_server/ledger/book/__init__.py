"""Sums up the cache's savings and forecasts the savings of a larger cache. Pure: no clock, no I/O,
no threads."""
