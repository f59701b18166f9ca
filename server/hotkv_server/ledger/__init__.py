"""Records the cache's savings by engine, and forecasts the savings of a larger cache.
`book/` is pure: no clock, no I/O, no threads."""
