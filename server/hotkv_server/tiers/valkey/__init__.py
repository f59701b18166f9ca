"""The tier in a Valkey or Redis server, which many nodes can share.

`resp_client` turns calls into commands. `connection` carries these to one server, `cluster` to
many. `resp` and `stream` implement the protocol. `epochs` makes a flush hold on all nodes.
"""
