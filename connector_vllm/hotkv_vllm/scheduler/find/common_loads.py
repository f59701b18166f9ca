"""Loads of the same blocks for several requests."""

from collections.abc import Callable
from dataclasses import dataclass

REPORTED_S = 5.0
"""Workers report a load's end within this time after its limit, even if the server hangs."""


@dataclass(frozen=True, slots=True)
class _Brings:
    """end_tokens: length of the hit that is loaded.
    name: hash of its last block in the first group, over all its tokens.
    """

    end_tokens: int
    name: bytes
    until_s: float


class CommonLoads:
    """Finds the load for which a request should wait: the loaded hit is a part of its own, and at
    least half of what it would load.

    vLLM puts loaded blocks into its prefix cache only at the load's end, so requests that arrive
    together would each load and hold a copy.
    """

    def __init__(self) -> None:
        self.loads: dict[str, _Brings] = {}

    def __repr__(self) -> str:
        return f"CommonLoads({len(self.loads)})"

    def begin(self, request_id: str, end_tokens: int, name: bytes, until_s: float) -> None:
        self.loads[request_id] = _Brings(end_tokens, name, until_s)

    def ended(self, request_id: str) -> None:
        self.loads.pop(request_id, None)

    def awaited(
        self,
        computed_tokens: int,
        hit_tokens: int,
        name_at: Callable[[int], bytes],
        now_s: float,
    ) -> str:
        """Empty if the asking request should not wait.

        computed_tokens: its hit in vLLM's own prefix cache.
        hit_tokens: its whole hit.
        name_at: hash of its block in the first group that ends at a number of tokens.
        """
        least = (computed_tokens + hit_tokens) / 2
        return next(
            (
                request_id
                for request_id, one in self.loads.items()
                if least <= one.end_tokens <= hit_tokens
                and now_s < one.until_s
                and name_at(one.end_tokens) == one.name
            ),
            "",
        )
