"""Code that the tiers in remote stores share.

`tier` splits each call into parts and queues the parts (`calls`). The threads of `workers` take
parts from the queue; each thread executes them over its own connection, a `Client` (`client`).
`encoding` wraps a connection so that blocks are stored compressed. `values` defines how a block is
laid out as a value of a key-value store.
"""
