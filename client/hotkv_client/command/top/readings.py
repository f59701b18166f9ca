"""What `hotkv top` asks a server each time."""

import time
from dataclasses import dataclass
from typing import Any

from hotkv_client.admin import AdminClient

RECENT_S = 600.0
"""What `the last minutes` are."""
Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reading:
    """Answers of one moment. `at_s`: monotonic time, when `info` had come. `ledger` counts from the
    ledger's beginning, `recent` the requests of the last RECENT_S seconds."""

    at_s: float
    info: Answer
    tiers: list[Answer]
    sessions: list[Answer]
    layers: list[Answer]
    ledger: Answer
    recent: Answer


def read(client: AdminClient) -> Reading:
    """Asks the server. Raises HotKVError."""
    info = client.info()
    return Reading(
        at_s=time.monotonic(),
        info=info,
        tiers=client.tiers(),
        sessions=client.sessions(),
        layers=client.sparse_layers(),
        ledger=client.savings(),
        recent=client.savings(RECENT_S),
    )
