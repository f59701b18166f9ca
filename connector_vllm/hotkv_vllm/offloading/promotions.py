"""Limits how much of a prompt may be promoted (copied from the server into vLLM's primary tier, the
CPU memory of its offloading). Pure: no clock, no threads.

A chunk is one or several consecutive blocks, and a row of the primary tier holds one chunk. Without
limits a request could wait for ever:
1. vLLM admits a request only after a final answer (hit or miss) for each of its chunks. For a chunk
   that is being promoted the answer is "ask again".
2. vLLM does not pin rows between this answer and the load to the device. So a promotion may evict
   rows that the same request needs.
3. vLLM then asks for the evicted chunks again. They are promoted again and evict other rows, and so
   on. With a prompt that is larger than the primary tier this would always happen.

Always true:
- A request gets at most `MAX_WAVES` promotions. Later promotions reach no further in the prompt
  than the first. This limit holds for each KV cache group. A group without a promotion may reach as
  far as the other groups, because the first promotion may have had rows for only some groups of a
  hybrid model.
- A chunk whose load has failed is not promoted again for the same request.
- The promotions of all requests together use at most a share of the rows (SHARE_ALONE,
  SHARE_TOGETHER), so that vLLM can use the other rows.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

MAX_WAVES = 3
SHARE_ALONE = 0.9
"""Largest share of the rows of the primary tier (vLLM's CPU memory) that promotions (copies from
the server into these rows) may use while only one request has promotions."""
SHARE_TOGETHER = 0.5
"""Largest share of the rows of the primary tier (vLLM's CPU memory) that promotions (copies from
the server into these rows) may use while several requests have promotions. It is smaller than
SHARE_ALONE, so that a further request finds free rows sooner."""

Key = bytes
"""vLLM's `OffloadKey`, which identifies a chunk: the hash of the chunk's last block, and four bytes
with the number of the KV cache group."""


def group_of(key: Key) -> bytes:
    """Returns the number of the KV cache group, as bytes: the last four bytes of a chunk's key
    (vLLM's `OffloadKey`)."""
    return key[-4:]


@dataclass(slots=True)
class Promotions:
    """Records and limits the promotions of one request. A promotion is a job of vLLM that copies
    one or several chunks (of one or several blocks each) from the server into vLLM's primary tier
    (CPU memory).

    promoted: the chunks of all submitted promotions: by key, the chunk's end in the prompt, in
        tokens.
    failed: keys of the chunks whose promotion has failed.
    waves: number of promotions that vLLM has submitted for the request.
    reach: by KV cache group, the end of the last promoted chunk in the prompt, in tokens. Later
        promotions may not go beyond it.
    """

    promoted: dict[Key, int] = field(default_factory=dict)
    failed: set[Key] = field(default_factory=set)
    waves: int = 0
    reach: dict[bytes, int] = field(default_factory=dict)

    def may_promote(self, key: Key, end_tokens: int) -> bool:
        """Returns True if the chunk (one or several blocks) with this key may be promoted (copied
        from the server into vLLM's CPU memory) for this request. If it returns False, vLLM must be
        answered "miss" for the chunk, even if the server has it.

        end_tokens: end of the chunk in the prompt.
        """
        if key in self.failed:
            return False
        if self.waves == 0:
            return True
        reach = self.reach.get(group_of(key)) or max(self.reach.values(), default=0)
        return self.waves < MAX_WAVES and end_tokens <= reach

    def submitted(self, ends_tokens: Mapping[Key, int]) -> None:
        """Records that vLLM has submitted a promotion (a copy of chunks of the request from the
        server into vLLM's CPU memory).

        ends_tokens: the promotion's chunks: by key, the chunk's end in the prompt.
        """
        self.waves += 1
        self.promoted.update(ends_tokens)
        for key, end_tokens in ends_tokens.items():
            group = group_of(key)
            self.reach[group] = max(end_tokens, self.reach.get(group, 0))

    def ended(self, keys: Iterable[Key], loaded: Collection[Key]) -> None:
        """Records the end of a promotion (a copy of chunks of the request from the server into
        vLLM's CPU memory).

        keys: the keys of the promotion's chunks.
        loaded: the keys of the chunks that were copied. The other chunks of `keys` have failed, and
            are not promoted again for this request.
        """
        self.failed.update(set(keys).difference(loaded))


class PromotionRoom:
    """Counts the rows of vLLM's primary tier (its CPU memory) that promotions (copies from the
    server into rows) use, so that they leave rows to vLLM. Counts the rows of the promotions in
    progress, and one row for each *offer* of this step. An offer is a chunk for which vLLM was
    answered "hit", so that vLLM is about to promote it.

    num_rows: number of rows of the primary tier.
    """

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
        """Returns True if one more chunk (unit of blocks) of the request may be promoted (copied
        from the server into vLLM's CPU memory), and counts a row of this memory for it. Returns
        False if promotions already use all rows that they may use."""
        is_alone = self._requests <= {request_id}
        share = SHARE_ALONE if is_alone else SHARE_TOGETHER
        if self.num_taken >= max(1, int(share * self.num_rows)):
            return False
        self._offered[request_id] = self._offered.get(request_id, 0) + 1
        return True

    def begin(self, request_id: str, num_rows: int) -> None:
        """Records that a promotion (copy from the server) into `num_rows` rows of vLLM's CPU memory
        begins."""
        self._under_way[request_id] = self._under_way.get(request_id, 0) + num_rows

    def end(self, request_id: str, num_rows: int) -> None:
        """Records that a promotion (copy from the server) into `num_rows` rows of vLLM's CPU memory
        has ended."""
        left = self._under_way.pop(request_id, 0) - num_rows
        if left > 0:
            self._under_way[request_id] = left

    def end_step(self) -> None:
        """Forgets the offers of the step: the rows of CPU memory that `offer` has counted for
        chunks that vLLM was about to copy from the server. By now vLLM has submitted their
        promotions, or had no free rows for them."""
        self._offered.clear()

    def check_invariants(self) -> None:
        """Raises AssertionError if a count of used rows is wrong."""
        assert all(rows > 0 for rows in self._under_way.values())
        assert all(rows > 0 for rows in self._offered.values())
