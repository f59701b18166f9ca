"""hotkv's plugin for vLLM (entry point `vllm.general_plugins`). vLLM calls `register` in every
process, before it builds a model.

It registers hotkv's connectors, which MultiConnector looks up, and hotkv's attention backends,
which without `hotkv.sparse` behave as vLLM's own. It makes vLLM's loaders read the weights for
their identity too.

A user may exclude it by VLLM_PLUGINS, so each connector's module registers its own name too. It
never raises: vLLM would not start.
"""

import logging

CONNECTORS = (
    ("HotKVConnector", "hotkv_vllm.connector"),
    ("HotKVOffloadingConnector", "hotkv_vllm.offloading.connector"),
)
BACKEND = "hotkv_sparse.vllm.cpu.backend.HotAttentionBackend"
CUDA_BACKEND = "hotkv_sparse.vllm.cuda.backend.HotFlashBackend"


def register() -> None:
    """Leaves an attention backend that another plugin has replaced."""
    try:
        from hotkv_sparse.vllm import attention_layers
        from hotkv_vllm.compat import checks, model_weights

        for name, module in CONNECTORS:
            checks.name_connector(name, module)
        attention_layers.override_cpu_attention(BACKEND)
        attention_layers.override_cuda_attention(CUDA_BACKEND)
        model_weights.read_beside_loading()
    except Exception:
        logging.getLogger("vllm.hotkv").exception(
            "hotkv: sparse attention is not available; vLLM goes on with its own"
        )
