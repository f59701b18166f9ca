"""Parts that tiers in remote servers share, whatever protocol the server speaks.

`tier` queues calls, and `workers` run their parts on a few threads. `client` is the protocol
between a thread and its server. `values` lays out a block as a value.
"""
