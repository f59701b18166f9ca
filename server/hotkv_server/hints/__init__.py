"""Hints of routers: the actions they request, and the outcomes."""
