"""All that the connector reads of vLLM beyond vLLM's public base classes.

Everything that may change with vLLM's version is in this package, in `worker.layout`,
`identity.weights_watch`, `identity.adapter_watch`, `sparse.backend` and `residency.cuda_backend`.
Each module lists the attributes of vLLM that it reads. `tools/check_vllm_api.py` compares them with
the sources of every supported version.
"""

NULL_BLOCK = 0
"""Id of vLLM's null block: it marks an empty entry of a block table."""


class Unsupported(Exception):
    """hotkv can't work with this engine, which then runs without the cache. The text gives the
    reason."""
