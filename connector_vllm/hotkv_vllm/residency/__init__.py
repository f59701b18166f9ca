"""Residency: serves long contexts whose old blocks are only in the server's memory. The device
holds the first and the latest blocks, and copies of a few selected blocks. This package has modules
for the scheduler side and for the worker side."""
