"""What the connector holds in place of a side that is not there: that of the other role, or both
with hotkv off.

So no hook asks whether there is a side. What is always true: the answers leave vLLM as it would be
without hotkv.
"""

from collections.abc import Callable
from typing import Any

from hotkv_vllm.metadata import HotKVMetadata

PARTS = frozenset({"requests", "residents", "sparse", "steps"})
"""Parts of a side that the connector calls."""
ANSWERS: dict[str, Callable[..., Any]] = {
    "is_freeing": lambda *_: False,
    "match": lambda *_: (0, False),
    "plan": lambda *_: HotKVMetadata(),
    "plan_broke": lambda *_: HotKVMetadata(),
    "reset_broke": lambda *_: False,
    "take_results": lambda *_: (set(), set()),
    "take_stats": lambda *_: None,
    "take_failed_results": lambda *_: set(),
    "take_lost": lambda *_: set(),
    "lost_broke": lambda *_: set(),
}
"""By method of `scheduler.side.HotKVScheduler`, of its parts or of `worker.side.HotKVWorker`. All
others answer None."""


class NoSide:
    """Takes every call of a side, and does nothing."""

    def __init__(self) -> None:
        vars(self).update(ANSWERS | dict.fromkeys(PARTS, self))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: None
