"""The disk tier: blocks in one preallocated file of the local disk."""
