"""Performs the hints of routers, and records the outcomes of their actions."""
