"""Real vLLM engines with `HotKVOffloadingConnector`."""

from typing import Any

from tests.vllm.tiny import transfer_config

HOST_COPIES = {
    "spec_name": "HostTieringSpec",
    "spec_module_path": "tests.doubles.host_copies",
}
"""vLLM does not offload in CPU engines; this module replaces the copies."""


def door_config(target: str, primary_mib: int = 16, **extra: Any) -> dict[str, Any]:
    """Chunks of one block. No module path: vLLM must find the connector by its name."""
    own = transfer_config(target=target)["kv_connector_extra_config"]
    del own["hotkv.load"]
    return {
        "kv_connector": "HotKVOffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": primary_mib << 20,
            "blocks_per_chunk": 1,
            "hotkv.lookup_timeout_s": 30.0,
            **HOST_COPIES,
            **own,
            **extra,
        },
    }


def multi(connectors: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": connectors},
    }
