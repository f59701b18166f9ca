"""Entry point `vllm.general_plugins`: vLLM calls `register` in every process, before it builds a
model.

Engines without `hotkv.sparse` run as before (see `hotkv_vllm.sparse.backend` and
`cuda_backend`), except that vLLM knows the connector by its name, which its MultiConnector
asks for (the connector's module registers the name too, as VLLM_PLUGINS may leave this plugin out).
Never raises: an exception here would keep vLLM from starting.
"""

import logging

CONNECTORS = (
    ("HotKVConnector", "hotkv_vllm.connector"),
    ("HotKVOffloadingConnector", "hotkv_vllm.offloading.connector"),
)
BACKEND = "hotkv_vllm.sparse.backend.HotAttentionBackend"
CUDA_BACKEND = "hotkv_vllm.residency.cuda_backend.HotFlashBackend"


def register() -> None:
    """Puts hotkv's attention backends in place of vLLM's `CPU_ATTN` and `FLASH_ATTN`, and registers
    the connector's name. Backends replaced by another plugin stay as they are."""
    try:
        from hotkv_vllm.compat import checks, sparse_layers

        for name, module in CONNECTORS:
            checks.name_connector(name, module)
        sparse_layers.override_cpu_attention(BACKEND)
        sparse_layers.override_cuda_attention(CUDA_BACKEND)
    except Exception:
        logging.getLogger("vllm.hotkv").exception(
            "hotkv: sparse attention is not available; vLLM goes on with its own"
        )
