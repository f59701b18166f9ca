"""Residency: serves contexts that are larger than the device's memory. Of such a context the device
holds the first blocks, the latest blocks, and copies of a few old blocks that sparse attention has
selected; all other blocks are only in the server's memory. README.md in this directory lists the
modules of the scheduler side and of the worker side."""
