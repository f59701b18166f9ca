"""hotkv for vLLM: KV connectors that store the KV cache of a node's engines in hotkv-server.

Use it with `kv_connector="HotKVConnector"` and `kv_role="kv_both"`. Importing this package imports
neither vLLM nor numba.
"""
