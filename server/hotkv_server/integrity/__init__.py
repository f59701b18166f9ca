"""Integrity: checks whether slots of the arena still have the bytes that were stored, and drops
damaged blocks.

`checksums` defines the checksums, which are stored in the blocks' records in the
block table. `sums` reads the bytes of slots. `evidence` describes the blocks to compare with their
checksums, and drops damaged blocks. `verifier` decides when blocks are compared.
"""
