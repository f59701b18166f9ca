"""Performs the actions that the hints of routers request, and records the actions' outcomes."""
