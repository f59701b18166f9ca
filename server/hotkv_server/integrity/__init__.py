"""Integrity: whether a slot still holds the bytes that were stored, and what follows if not.

`check_values` says what a check value is and lies below the core, which keeps them; `evidence`
names what is to be compared and condemns blocks; `sums` reads bytes; `verifier` decides when.
"""
