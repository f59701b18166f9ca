"""The disk tier: keeps blocks in a preallocated file on the local disk, the slab file."""
