"""The connector's code that uses more of vLLM than its public base classes, and may have to change
with it.

Outside, only `worker.layout`, `identity.weights_watch` and `identity.adapter_watch` do, and some
modules of `hotkv_sparse.vllm`. `uses.json` lists what is used;
`tools/check_vllm_api.py` compares it with the sources of every supported version.
"""

NULL_BLOCK = 0
"""Marks an empty entry of vLLM's block tables."""


class Unsupported(Exception):
    """hotkv can't work with this engine, which then runs without. The text is the reason, for
    the log."""
