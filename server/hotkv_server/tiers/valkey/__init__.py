"""A shared tier in Valkey or Redis. `resp_client` does the tier's calls with commands,
`connection` and `cluster` send them, `resp` and `stream` are the servers' protocol.
`generation_keys` stores generations."""
