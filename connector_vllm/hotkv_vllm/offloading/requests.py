"""Limits how much of a prompt may be promoted (copied from the server into vLLM's primary tier, its
CPU memory). Pure: no clock, no threads.

vLLM admits a request only when the answers to all its lookups are final. A promotion that has begun
makes an answer wait. Rows of the primary tier are not pinned between a lookup and the load to the
device. So a promotion may evict rows that the same request needs, which are then looked up and
promoted again. Without a limit such a request would wait for ever, and so would a prompt that is
larger than the primary tier.

Always true:
- A request gets at most `MAX_WAVES` promotions. After the first one, only blocks within its reach
  are promoted again.
- A key whose load has failed is not promoted again for the same request.
- Promotions of all requests together take at most a share of the rows, which leaves rows that vLLM
  can evict.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

MAX_WAVES = 3
SHARE_ALONE = 0.9
"""Largest share of the primary tier's rows that promotions may use while a single request
promotes."""
SHARE_TOGETHER = 0.5
"""Largest share of the primary tier's rows that promotions may use while several requests promote,
so that the next request need not wait for all of them."""

Key = bytes
"""vLLM's `OffloadKey`: the hash of a chunk's last block, and four bytes that number the group."""


def group_of(key: Key) -> bytes:
    """Returns the part of a key that names the KV cache group."""
    return key[-4:]


@dataclass(slots=True)
class Promotions:
    """The promotions (copies from the server into vLLM's primary tier) of one request.

    promoted: by key that was submitted, the end of its chunk in the prompt, in tokens.
    failed: keys whose load failed.
    waves: number of submissions.
    reach: by group, the end of the furthest chunk that was submitted, in tokens.
    """

    promoted: dict[Key, int] = field(default_factory=dict)
    failed: set[Key] = field(default_factory=set)
    waves: int = 0
    reach: dict[bytes, int] = field(default_factory=dict)

    def may_promote(self, key: Key, end_tokens: int) -> bool:
        """Returns True if vLLM may learn that the server has this chunk (one or several blocks),
        and so may promote the chunk.
        `end_tokens`: the end of the chunk in the prompt."""
        if key in self.failed:
            return False
        if self.waves == 0:
            return True
        return self.waves < MAX_WAVES and end_tokens <= self.reach.get(group_of(key), 0)

    def submitted(self, ends_tokens: Mapping[Key, int]) -> None:
        """Records a promotion. `ends_tokens`: for each of its keys, the end of the chunk in the
        prompt."""
        self.waves += 1
        self.promoted.update(ends_tokens)
        for key, end_tokens in ends_tokens.items():
            group = group_of(key)
            self.reach[group] = max(end_tokens, self.reach.get(group, 0))

    def ended(self, keys: Iterable[Key], loaded: Collection[Key]) -> None:
        """Records the end of a promotion: the keys that are not in `loaded` have failed."""
        self.failed.update(set(keys).difference(loaded))


class Room:
    """Counts the rows of the primary tier that promotions use: rows offered in this step, and rows
    of promotions under way."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._offered: dict[str, int] = {}
        self._under_way: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"Room({self.num_taken} of {self.num_rows} rows, {len(self._requests)} requests)"

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
        """Counts a row for a chunk that vLLM is about to promote. Returns False, and counts
        nothing, if there is no room."""
        is_alone = self._requests <= {request_id}
        share = SHARE_ALONE if is_alone else SHARE_TOGETHER
        if self.num_taken >= max(1, int(share * self.num_rows)):
            return False
        self._offered[request_id] = self._offered.get(request_id, 0) + 1
        return True

    def begin(self, request_id: str, num_rows: int) -> None:
        """Records that a promotion of `num_rows` rows begins. vLLM submits all offers of a step at
        the step's end."""
        self._under_way[request_id] = self._under_way.get(request_id, 0) + num_rows

    def end(self, request_id: str, num_rows: int) -> None:
        """Records the end of a promotion."""
        left = self._under_way.pop(request_id, 0) - num_rows
        if left > 0:
            self._under_way[request_id] = left

    def end_step(self) -> None:
        """Forgets the offers of the step. vLLM has submitted them, or had no row for them."""
        self._offered.clear()

    def check_invariants(self) -> None:
        """Raises AssertionError if the books are wrong."""
        assert all(rows > 0 for rows in self._under_way.values())
        assert all(rows > 0 for rows in self._offered.values())
