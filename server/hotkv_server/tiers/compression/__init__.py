"""Exact compression of bfloat16 keys and values, 12 bits a value, for what goes below host
memory."""
