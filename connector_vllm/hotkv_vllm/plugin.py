"""hotkv's plugin for vLLM (entry point `vllm.general_plugins`). vLLM calls `register` in every
process, before it builds a model.

It registers hotkv's connectors, which MultiConnector looks up, makes vLLM's loaders read the
weights for their identity too, and lets a companion prepare vLLM.

A user may exclude it by VLLM_PLUGINS, so each connector's module registers its own name too. It
never raises: vLLM would not start.
"""

import logging

CONNECTORS = (
    ("HotKVConnector", "hotkv_vllm.connector"),
    ("HotKVOffloadingConnector", "hotkv_vllm.offloading.connector"),
)


def register() -> None:
    try:
        from hotkv_vllm import companion
        from hotkv_vllm.compat import checks, model_weights

        for name, module in CONNECTORS:
            checks.name_connector(name, module)
        companion.register()
        model_weights.read_beside_loading()
    except Exception:
        logging.getLogger("vllm.hotkv").exception(
            "hotkv's plugin broke; vLLM goes on with what it has"
        )
