"""Code that the tiers in remote stores (Mooncake, Valkey, S3) share.

`tier` splits each call into parts and queues them (`calls`). The threads of `workers` execute the
parts, each over its connection, a `client`. `encoding` wraps a connection so that blocks are stored
compressed. `values` defines how a block is laid out as a value of a key-value store.
"""
