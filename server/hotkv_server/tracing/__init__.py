"""Spans of what the server does, if traces are asked for."""
