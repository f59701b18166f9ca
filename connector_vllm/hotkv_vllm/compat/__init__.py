"""Contains the connector's code that uses more of vLLM than its public base classes. This code may
have to change when vLLM changes.

Only five modules outside this package use more of vLLM than its public base classes:
`worker.layout`, `identity.weights_watch`, `identity.adapter_watch`, `sparse.backend` and
`residency.cuda_backend`. The docstring of each module lists the attributes of vLLM that the module
reads. `tools/check_vllm_api.py` compares the attributes with the sources of every supported
version.
"""

NULL_BLOCK = 0
"""Id of vLLM's null block, which marks an empty entry of a block table."""


class Unsupported(Exception):
    """Raised if hotkv can't work with this engine. The engine then runs without hotkv. The
    exception's text is the reason, for the log."""
