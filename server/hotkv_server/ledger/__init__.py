"""The ledger: what the cache has brought, to whom, and what a larger one would bring. Pure: no
clock, no I/O, no threads."""
