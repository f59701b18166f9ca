"""Integrity: checks whether a slot still holds the bytes that were stored, and drops damaged
blocks.

`check_values` defines check values; it lies below the core, which keeps them. `evidence` describes
the blocks to compare and condemns blocks. `sums` reads bytes. `verifier` decides when to compare.
"""
