"""Spans of an engine's requests, if traces are asked for."""
