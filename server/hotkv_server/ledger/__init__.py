"""Counts the savings of the cache for each engine, and forecasts the savings of a larger cache.
`book/` is pure: no clock, no I/O, no threads."""
