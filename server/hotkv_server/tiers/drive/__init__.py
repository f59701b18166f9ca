"""Executes the decisions of `tiers.book` on the event loop: moves blocks between host memory and
tiers, and carries out flushes (deletions of all blocks of a key space)."""
