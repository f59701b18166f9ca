"""Entry point `vllm.general_plugins`: vLLM calls `register` in every process, before it builds a model.

Changes nothing for engines without `hotkv.sparse` (see `hotkv_vllm.sparse.backend`). Never raises: an exception here would keep vLLM
from starting.
"""

import logging

BACKEND = "hotkv_vllm.sparse.backend.HotAttentionBackend"


def register() -> None:
    """Puts hotkv's attention backend in place of vLLM's `CPU_ATTN`; leaves an override by others alone."""
    try:
        from hotkv_vllm import compat

        compat.override_cpu_attention(BACKEND)
    except Exception:
        logging.getLogger("vllm.hotkv").exception("hotkv: sparse attention is not available; vLLM goes on with its own")
