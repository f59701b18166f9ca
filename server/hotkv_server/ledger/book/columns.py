"""What the ledger counts of requests: the names of its columns, and a request as values for them.

Always true: of each request, tokens that hit on the device, in each tier, and tokens that missed
for each reason add up to the tokens of its prompt.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from hotkv_proto.reports import Miss
from hotkv_server.cache.values import HOST_TIER
from hotkv_server.ledger.book.buckets import Values

# In the order of the fields of Usage.
FIXED = (
    "requests",
    "prompt_tokens",
    "device_hit_tokens",
    "saved_s",
    "waited_s",
    "failed_loads",
    "loaded_bytes",
    "stored_bytes",
)
HIT, MISSED = "hit_tokens/", "missed_tokens/"
REASONS = tuple(reason for reason in Miss if reason is not Miss.ABSENT)
"""Reasons that tokens are counted under: ABSENT is refined before."""
MAX_TIERS = 16


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request, or what became of one later, adds to an account. `hit_tokens`: by tier of
    hotkv; `missed_tokens`: by reason. Values may be negative to take something back."""

    requests: int = 0
    prompt_tokens: int = 0
    device_hit_tokens: int = 0
    saved_s: float = 0.0
    waited_s: float = 0.0
    failed_loads: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    hit_tokens: Mapping[str, int] = field(default_factory=dict)
    missed_tokens: Mapping[Miss, int] = field(default_factory=dict)


class Columns:
    """The columns of one ledger. `tiers`: their names, host memory first."""

    def __init__(self, tiers: Iterable[str]) -> None:
        self.tiers = tuple(dict.fromkeys((HOST_TIER, *tiers)))[:MAX_TIERS]
        self.names = (
            *FIXED,
            *(HIT + tier for tier in self.tiers),
            *(MISSED + reason.name.lower() for reason in REASONS),
        )
        self._at = {name: at for at, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"Columns({len(self)}, tiers={self.tiers})"

    def at(self, name: str) -> int:
        """The place of a column."""
        return self._at[name]

    def values(self, usage: Usage) -> Values:
        """A usage as values [columns]. A tier that is not known counts as host memory."""
        values = np.zeros(len(self))
        values[: len(FIXED)] = (
            usage.requests,
            usage.prompt_tokens,
            usage.device_hit_tokens,
            usage.saved_s,
            usage.waited_s,
            usage.failed_loads,
            usage.loaded_bytes,
            usage.stored_bytes,
        )
        host = self._at[HIT + HOST_TIER]
        for tier, tokens in usage.hit_tokens.items():
            values[self._at.get(HIT + tier, host)] += tokens
        for reason, tokens in usage.missed_tokens.items():
            values[self._at[MISSED + reason.name.lower()]] += tokens
        return values

    def usage(self, values: Values) -> Usage:
        """The inverse of `values`, for sums: tokens and bytes are rounded to whole numbers."""
        numbers = values.tolist()
        whole = [int(number) for number in numbers]
        first_reason = len(FIXED) + len(self.tiers)
        requests, prompt_tokens, device_hit_tokens, _, _, failed_loads, loaded, stored = whole[
            : len(FIXED)
        ]
        _, _, _, saved_s, waited_s, *_ = numbers
        return Usage(
            requests,
            prompt_tokens,
            device_hit_tokens,
            saved_s,
            waited_s,
            failed_loads,
            loaded,
            stored,
            dict(zip(self.tiers, whole[len(FIXED) : first_reason], strict=True)),
            dict(zip(REASONS, whole[first_reason:], strict=True)),
        )
