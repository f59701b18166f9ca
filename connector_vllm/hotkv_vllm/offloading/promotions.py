"""Limits what may be promoted. Pure: no clock, no threads.

Without limits a request could wait for ever, always with a prompt larger than the primary tier:
1. vLLM admits it only after a final answer for each chunk; for one being promoted it is "ask
   again".
2. vLLM does not pin rows between this answer and the load, so a promotion may evict rows of the
   same request.
3. vLLM asks for the evicted chunks again.

- A request gets at most MAX_WAVES promotions. In each group later ones reach no further in the
  prompt than the first; a group without any reaches as far as the others, because the first may
  have had rows for only some groups.
- A chunk whose load has failed is not promoted again for the request.
- All promotions together use at most a share of the rows.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

MAX_WAVES = 3
SHARE_ALONE = 0.9
"""While only one request has promotions."""
SHARE_TOGETHER = 0.5
"""Smaller, so that a further request finds free rows sooner."""

Key = bytes
"""vLLM's `OffloadKey`: hash of the chunk's last block, and four bytes with the group."""


def group_of(key: Key) -> bytes:
    return key[-4:]


@dataclass(slots=True)
class Promotions:
    """Of one request; a promotion is one job with one or several chunks.

    promoted: by key, the chunk's end in tokens.
    waves: promotions submitted.
    reach: by group, the end in tokens that later promotions may not pass.
    """

    promoted: dict[Key, int] = field(default_factory=dict)
    failed: set[Key] = field(default_factory=set)
    waves: int = 0
    reach: dict[bytes, int] = field(default_factory=dict)

    def may_promote(self, key: Key, end_tokens: int) -> bool:
        """If False, vLLM must be answered "miss" although the server may have the chunk."""
        if key in self.failed:
            return False
        if self.waves == 0:
            return True
        reach = self.reach.get(group_of(key)) or max(self.reach.values(), default=0)
        return self.waves < MAX_WAVES and end_tokens <= reach

    def submitted(self, ends_tokens: Mapping[Key, int]) -> None:
        """ends_tokens: by key, the chunk's end in the prompt."""
        self.waves += 1
        self.promoted.update(ends_tokens)
        for key, end_tokens in ends_tokens.items():
            group = group_of(key)
            self.reach[group] = max(end_tokens, self.reach.get(group, 0))

    def ended(self, keys: Iterable[Key], loaded: Collection[Key]) -> None:
        """loaded: keys that were copied; the others of `keys` have failed."""
        self.failed.update(set(keys).difference(loaded))


class PromotionRoom:
    """Rows that promotions use: of those in progress, and one for each *offer* of this step, a
    chunk that vLLM was told is a hit and is about to promote."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._offered: dict[str, int] = {}
        self._under_way: dict[str, int] = {}

    def __repr__(self) -> str:
        return (
            f"PromotionRoom({self.num_taken} of {self.num_rows} rows, "
            f"{len(self._requests)} requests)"
        )

    @property
    def _requests(self) -> set[str]:
        return self._offered.keys() | self._under_way.keys()

    @property
    def num_taken(self) -> int:
        return sum(self._offered.values()) + sum(self._under_way.values())

    @property
    def has_offers(self) -> bool:
        return bool(self._offered)

    def offer(self, request_id: str) -> bool:
        """Counts a row for one more chunk; False if all rows for promotions are used."""
        is_alone = self._requests <= {request_id}
        share = SHARE_ALONE if is_alone else SHARE_TOGETHER
        if self.num_taken >= max(1, int(share * self.num_rows)):
            return False
        self._offered[request_id] = self._offered.get(request_id, 0) + 1
        return True

    def begin(self, request_id: str, num_rows: int) -> None:
        self._under_way[request_id] = self._under_way.get(request_id, 0) + num_rows

    def end(self, request_id: str, num_rows: int) -> None:
        left = self._under_way.pop(request_id, 0) - num_rows
        if left > 0:
            self._under_way[request_id] = left

    def end_step(self) -> None:
        """Forgets the offers: by now vLLM has submitted them, or had no free rows."""
        self._offered.clear()

    def check_invariants(self) -> None:
        assert all(rows > 0 for rows in self._under_way.values())
        assert all(rows > 0 for rows in self._offered.values())
