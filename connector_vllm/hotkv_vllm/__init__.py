"""hotkv for vLLM: a KV connector that keeps the prefix cache of all engines of a node in
hotkv-server.

Use it with `kv_connector="HotKVConnector"` and `kv_role="kv_both"`. Importing this package imports
neither vLLM nor numba.
"""
