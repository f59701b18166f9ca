"""The tier in a Valkey or Redis server, which many nodes can share.

`resp_client` says what a call is on the wire; `resp` and `stream` speak the protocol; `values` lays
a block out as a value; `epochs` makes a flush count on all nodes.
"""
