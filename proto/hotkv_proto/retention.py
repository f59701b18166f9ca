"""Retention: what a request may ask of eviction for the blocks it uses.

A hint, never a promise about correctness: a cache that can't honour it serves as before. Requests
give it in `kv_transfer_params` (keys `hotkv.priority`, `hotkv.ttl_s`, `hotkv.pin`); on the wire it
is `hotkv.v1.Retention`.
"""

from dataclasses import dataclass

MAX_PRIORITY = 8
MAX_TTL_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Retention:
    """`priority`: a use counts as 2^priority uses, -8 to 8. `ttl_s`: the blocks count as in use for
    that long after the use, at most a day.

    `pin`: they are not evicted at all within `ttl_s`, as far as the server's share for pinned
    blocks goes. Raises ValueError.
    """

    priority: int = 0
    ttl_s: float = 0.0
    pin: bool = False

    def __post_init__(self) -> None:
        if not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise ValueError(
                f"retention.priority is {self.priority}; allowed are {-MAX_PRIORITY} to "
                f"{MAX_PRIORITY}"
            )
        if not 0.0 <= self.ttl_s <= MAX_TTL_S:
            raise ValueError(f"retention.ttl_s is {self.ttl_s}; allowed are 0 to {MAX_TTL_S:.0f}")
        if self.pin and not self.ttl_s:
            raise ValueError("retention.pin needs retention.ttl_s: how long to keep the blocks")


NO_RETENTION = Retention()
