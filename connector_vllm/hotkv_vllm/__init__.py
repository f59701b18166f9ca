"""hotkv for vLLM: a KV connector that keeps the prefix cache of all engines of a node in
hotkv-server.

Use it with `kv_connector="HotKVConnector"`, `kv_connector_module_path="hotkv_vllm.connector"`,
`kv_role="kv_both"`. Importing this package imports neither vLLM nor numba.
"""
