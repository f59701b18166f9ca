"""The tier in a Valkey or Redis server, which many nodes can share.

`resp_client` translates the tier's calls into commands. `connection` sends the commands to a single
server, `cluster` to the servers of a cluster. `resp` and `stream` implement RESP, the servers'
protocol. `epochs` stores a counter for each key space, so that a flush holds on all nodes.
"""
