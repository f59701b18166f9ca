"""The tier in a Valkey or Redis server, which many nodes can share.

`resp_client` translates the tier's calls into commands. `connection` sends the commands to a single
server, `cluster` to the servers of a cluster. `resp` and `stream` implement RESP, the servers'
protocol. `generations` stores the generation of each key space in the server: a number that a flush
raises, so that all nodes honour the flush.
"""
