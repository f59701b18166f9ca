"""Residency: serves long contexts whose old blocks are only in the server's memory. Of such a
context the device holds the first blocks, the latest blocks, and copies of a few old blocks that
sparse attention has selected. README.md lists the modules of the scheduler side and of the worker
side."""
