"""The disk tier: blocks in a preallocated file on the local disk."""
