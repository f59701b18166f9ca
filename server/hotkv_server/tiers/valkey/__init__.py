"""The tier in a Valkey or Redis server, which many nodes can share.

`resp_client` turns calls into commands; `connection` carries these to one server, `cluster` to
many; `resp` and `stream` speak the protocol; `values` lays a block out as a value; `epochs` makes a
flush count on all nodes.
"""
