"""Decides which blocks residencies may pin, and pins these blocks. A residency pins the blocks of a
running request in host memory. Pure: no clock, no I/O, no threads."""
