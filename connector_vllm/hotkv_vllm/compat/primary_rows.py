"""Keeps rows of the primary tier out of use while a server that does not answer may write into
them.

vLLM allocates no held row, also after a reset: `CPUOffloadingManager` (vLLM 0.32, 0.33) numbers
its rows, and has the free ones in `_free_list` and from `_num_allocated_chunks` on.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    _SecondaryTierFacingParent,
)


class PrimaryRows:
    """Scheduler thread only, except `over`. No row can be held before `bind`."""

    def __init__(self) -> None:
        self._primary: CPUPrimaryTierOffloadingManager | None = None
        self._free: Any = None
        self._reset: Any = None
        # By row, the number of its holds.
        self._held: dict[int, int] = {}
        # Held rows that vLLM has freed.
        self._freed: set[int] = set()
        self._over: deque[list[int]] = deque()

    def __repr__(self) -> str:
        return f"PrimaryRows({len(self._held)} held)"

    @property
    def is_bound(self) -> bool:
        return self._primary is not None

    @property
    def num_held(self) -> int:
        return len(self._held)

    def bind(self, parent: _SecondaryTierFacingParent) -> None:
        """Intercepts how vLLM frees rows. Idempotent."""
        if self._primary is not None:
            return
        primary = self._primary = parent._m.primary_tier
        self._free, self._reset = primary._free_chunk, primary.reset_cache
        primary._free_chunk = self._free_chunk
        primary.reset_cache = self._reset_cache

    def _free_chunk(self, chunk: ChunkStatus) -> None:
        if chunk.chunk_id in self._held:
            self._freed.add(chunk.chunk_id)
        else:
            self._free(chunk)

    def _reset_cache(self) -> None:
        self._reset()
        if self._held and self._primary is not None:
            _take_all(self._primary)
            rows = reversed(range(self._primary._num_chunks))
            _give(self._primary, [row for row in rows if row not in self._held])
            self._freed = set(self._held)

    def hold(self, rows: Iterable[int]) -> None:
        """From when vLLM frees them."""
        for row in rows:
            self._held[row] = self._held.get(row, 0) + 1

    def over(self, rows: list[int]) -> None:
        """The server can't write into these rows any more. Any thread."""
        self._over.append(rows)

    def collect(self) -> None:
        """Gives vLLM the rows whose holds are over. Under its lock of the manager, if it has
        one."""
        while self._over:
            self.release(self._over.popleft())

    def release(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._held[row] -= 1
            if self._held[row]:
                continue
            del self._held[row]
            if row in self._freed and self._primary is not None:
                self._freed.discard(row)
                _give(self._primary, [row])


def _take_all(primary: CPUPrimaryTierOffloadingManager) -> None:
    """Of an empty primary tier."""
    primary._num_allocated_chunks = primary._num_chunks


def _give(primary: CPUPrimaryTierOffloadingManager, rows: list[int]) -> None:
    primary._free_list.extend(rows)
