"""What the connector reads out of vLLM beyond its public base classes.

Everything that may change with vLLM's version is in this package, in `worker.layout`,
`identity.weights_watch`, `identity.adapter_watch`, `sparse.backend` and `residency.cuda_backend`.
Each module says which of vLLM's attributes it reads. `tools/check_vllm_api.py` compares them with
the sources of every supported version.
"""

NULL_BLOCK = 0
"""Id of the block that stands for 'nothing here' in block tables."""


class Unsupported(Exception):
    """hotkv can't work with this engine: it runs without the cache, and the text says why."""
