"""hotkv as one of several connectors in vLLM's MultiConnector.

MultiConnector gives each child a copy of the engine's configuration that holds the child's own
`kv_transfer_config`. The copy has no reference to the original, and vLLM does not see what a child
changes in it. MultiConnector also forwards the handshake of one child only, to all children, and
raises when two children ask for different KV cache layouts. So a child has to know that it is one:
this module looks for the MultiConnector that is constructing or asking it on the call stack. It
reads frames, changes nothing of vLLM and keeps nothing.
"""

import sys
from types import FrameType
from typing import Any

MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"


def outer_configs() -> tuple[Any, ...]:
    """The engine's configuration, once for each MultiConnector that calls us, innermost first;
    empty if none does.

    None stands for a configuration that was not found in the frame of its MultiConnector.
    """
    multi: type | None = getattr(sys.modules.get(MODULE), "MultiConnector", None)
    found: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and multi is not None:
        names = frame.f_locals
        owner = names.get("self", names.get("cls"))
        if owner is not None and issubclass(
            owner if isinstance(owner, type) else type(owner), multi
        ):
            found.append(next((value for value in names.values() if _has_children(value)), None))
        frame = frame.f_back
    return tuple(found)


def _has_children(config: Any) -> bool:
    transfer = getattr(config, "kv_transfer_config", None)
    return transfer is not None and "connectors" in transfer.kv_connector_extra_config


def others_state_a_layout(connector: type, outer: tuple[Any, ...]) -> bool:
    """Returns True if another child asks for a KV cache layout, or if that can't be found out."""
    if len(outer) != 1 or outer[0] is None:
        # Of MultiConnectors within each other the outer one would ask us again.
        return True
    children = getattr(
        sys.modules[MODULE].MultiConnector, "_get_connector_classes_and_configs", None
    )
    if children is None:
        return True
    return any(
        child.get_required_kvcache_layout(config) is not None
        for child, config in children(outer[0])
        if child is not connector
    )
