"""Sums up the cache's savings and forecasts the savings of a larger cache. Pure."""
