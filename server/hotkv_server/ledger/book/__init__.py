"""Sums up what the cache has brought, and forecasts what a larger one would. Pure."""
