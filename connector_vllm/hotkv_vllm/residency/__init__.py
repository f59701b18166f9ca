"""Residency: long contexts whose old blocks are only in the server's memory. Has parts for the
scheduler side and for the worker side."""
