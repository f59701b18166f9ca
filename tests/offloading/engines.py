"""Real vLLM engines whose KV offloading uses hotkv's `HotKVOffloadingConnector`."""

from typing import Any

from tests.vllm.tiny import transfer_config

HOST_COPIES = {
    "spec_name": "HostTieringSpec",
    "spec_module_path": "hotkv_vllm.testing.host_copies",
}
"""vLLM refuses to offload in CPU engines. These settings name a module of hotkv with which it can;
the module replaces only the copies between device and host."""


def door_config(target: str, primary_mib: int = 16, **extra: Any) -> dict[str, Any]:
    """Returns the `kv_transfer_config` of an engine with HotKVOffloadingConnector and chunks of one
    block. It has no module path, so vLLM must find the connector by its name.

    target: the server's address.
    primary_mib: size of vLLM's CPU tier in MiB.
    extra: further keys of `kv_connector_extra_config`.
    """
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
    """Returns the `kv_transfer_config` of a MultiConnector that combines these connectors."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": connectors},
    }
