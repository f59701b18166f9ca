"""The plugin of hotkv for vLLM (entry point `vllm.general_plugins`). vLLM calls `register` in every
process, before it builds a model.

The plugin registers the names of hotkv's connectors, so that MultiConnector finds their classes,
and hotkv's attention backends. In an engine without `hotkv.sparse` these backends behave as vLLM's
own (`sparse.backend`, `residency.cuda_backend`). It also makes vLLM's loaders begin to read the
weights for their identity (`model_weights.read_beside_loading`).

A user may exclude the plugin by vLLM's variable VLLM_PLUGINS, so each connector's module also
registers its own name. The plugin never raises an exception, because vLLM would not start after it.
"""

import logging

CONNECTORS = (
    ("HotKVConnector", "hotkv_vllm.connector"),
    ("HotKVOffloadingConnector", "hotkv_vllm.offloading.connector"),
)
BACKEND = "hotkv_vllm.sparse.backend.HotAttentionBackend"
CUDA_BACKEND = "hotkv_vllm.residency.cuda_backend.HotFlashBackend"


def register() -> None:
    """Registers the connectors' names, and replaces vLLM's attention backends `CPU_ATTN` and
    `FLASH_ATTN` by hotkv's. Does not replace a backend that another plugin has replaced already."""
    try:
        from hotkv_vllm.compat import checks, model_weights, sparse_layers

        for name, module in CONNECTORS:
            checks.name_connector(name, module)
        sparse_layers.override_cpu_attention(BACKEND)
        sparse_layers.override_cuda_attention(CUDA_BACKEND)
        model_weights.read_beside_loading()
    except Exception:
        logging.getLogger("vllm.hotkv").exception(
            "hotkv: sparse attention is not available; vLLM goes on with its own"
        )
