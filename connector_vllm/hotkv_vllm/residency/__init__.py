"""Residency: long contexts whose old blocks (all but the first and the latest) are only in the
server's memory, not on the device. Has parts for the scheduler side and for the worker side."""
