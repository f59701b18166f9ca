"""A CPU worker's book of resident requests (`ResidentSequences`), and their sketches (`KeptRows`).

Always true:
- A row of `KeptRows` belongs to at most one request.
- A hot slot contains the page that `ResidentSequence.content` names.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from hotkv_client.arena import Arena
from hotkv_sparse.selection import Source
from hotkv_sparse.vllm.cpu.pool import BlockReprManager
from hotkv_sparse.vllm.step import FileId, KeptBlocks, ResidentRow
from hotkv_sparse.vllm.worker.resident_book import STEPS_IN_FLIGHT, ResidentBook, ResidentRecord

I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
FIRST_ROWS = 1024
MORE_ROWS = 64
"""That a request gets at most ahead of its blocks."""
NOT_KEPT = -1
_FIRST_BLOCKS = 64


# -------------------------------------------------------------------------- rows of sketches


def num_rows_for(num_taken: int) -> int:
    """FIRST_ROWS, doubled until it is enough."""
    num_rows = FIRST_ROWS
    while num_rows < num_taken:
        num_rows *= 2
    return num_rows


class KeptRows:
    """Sketches of resident contexts, also of blocks that are not on the device: one row per block,
    for all layers. Used by one thread. Grows to about 7 % of the KV of contexts that run at the
    same time.

    pool: the rows share its formats, centres and axes.
    """

    def __init__(self, pool: BlockReprManager) -> None:
        self._pool = pool
        self._num_rows = 0
        self._free: list[int] = []
        self._rows: dict[tuple[int, str], U8] = {}
        self._sources: dict[int, dict[str, tuple[Source, int, Source]]] = {}

    def __repr__(self) -> str:
        return f"KeptRows({self.num_taken} of {self._num_rows} rows)"

    @property
    def num_taken(self) -> int:
        return self._num_rows - len(self._free)

    def sources(self, layer_idx: int) -> Mapping[str, Source]:
        """Valid until the next `take`, which may replace the arrays."""
        of_pool = self._pool.sources(layer_idx)
        known = self._sources.setdefault(layer_idx, {})
        for name, source in of_pool.items():
            # Called in every layer of a step.
            one = known.get(name)
            if one is None or one[0] is not source or one[1] != self._num_rows:
                mine = replace(source, pool=self._of(layer_idx, name, source))
                known[name] = source, self._num_rows, mine
        return {name: one[2] for name, one in known.items()}

    def take(self, count: int) -> I32:
        """int32 [count]."""
        if count > len(self._free):
            num_rows = num_rows_for(self.num_taken + count)
            self._free = [*range(num_rows - 1, self._num_rows - 1, -1), *self._free]
            self._num_rows = num_rows
        return np.array([self._free.pop() for _ in range(count)], np.int32)

    def give_back(self, rows: I32) -> None:
        self._free.extend(sorted(rows.tolist(), reverse=True))

    def copy(self, layer_idx: int, rows: I32, blocks: I32) -> None:
        """Copies a layer's sketches of device blocks into rows."""
        for name, source in self._pool.sources(layer_idx).items():
            self._of(layer_idx, name, source)[rows] = source.pool[blocks]

    def _of(self, layer_idx: int, name: str, source: Source) -> U8:
        """uint8 [rows, KV heads, bytes], enlarged if rows were added."""
        rows = self._rows.get((layer_idx, name))
        if rows is None or len(rows) < self._num_rows:
            grown = np.zeros((self._num_rows, *source.pool.shape[1:]), np.uint8)
            if rows is not None:
                grown[: len(rows)] = rows
            rows = self._rows[layer_idx, name] = grown
        return rows


# ---------------------------------------------------------------------------------------- a request


@dataclass(slots=True, eq=False)
class ResidentSequence(ResidentRecord):
    """may_outgrow: as in `ResidentRow`.
    hot_blocks: of the hot slots, int32.
    addresses, sketches: of slots and sketches' slots in this process, by position, int64; -1 if
        unknown.
    rows: of `KeptRows`, by position, int32.
    num_kept: leading blocks whose sketches are in `rows`, by layer index.
    content: position in each hot slot, by layer index, int32; -1 if empty.
    has_read: from an arena in this step.
    """

    may_outgrow: bool = False
    hot_blocks: I32 = field(default_factory=lambda: np.empty(0, np.int32))
    addresses: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    sketches: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    rows: I32 = field(default_factory=lambda: np.empty(0, np.int32))
    num_kept: dict[int, int] = field(default_factory=dict)
    content: dict[int, I32] = field(default_factory=dict)
    has_read: bool = False

    def kept(self, first: int, slots: I64, sketches: I64) -> None:
        """Consecutive blocks; -1 for a missing sketch."""
        stop = first + len(slots)
        if stop > len(self.addresses):
            more = max(stop, 2 * len(self.addresses), _FIRST_BLOCKS) - len(self.addresses)
            nothing = np.full(more, NOT_KEPT, np.int64)
            self.addresses = np.concatenate([self.addresses, nothing])
            self.sketches = np.concatenate([self.sketches, nothing])
        self.addresses[first:stop] = slots
        self.sketches[first:stop] = sketches

    def more_hot(self, blocks: I32) -> None:
        """Adds hot slots; the others keep their content."""
        self.hot_blocks = np.concatenate([self.hot_blocks, blocks])
        empty = np.full(len(blocks), -1, np.int32)
        for layer_idx, content in self.content.items():
            self.content[layer_idx] = np.concatenate([content, empty])

    def forget_kept(self) -> None:
        self.addresses[:] = self.sketches[:] = NOT_KEPT
        self.arenas, self.unmapped = [], []

    def hot_content(self, layer_idx: int) -> I32:
        """Position in each hot slot, int32; -1 if empty. Who copies a page must write its
        position here."""
        content = self.content.get(layer_idx)
        if content is None or len(content) != len(self.hot_blocks):
            content = self.content[layer_idx] = np.full(len(self.hot_blocks), -1, np.int32)
        return content


# ------------------------------------------------------------------------------------- all requests


class ResidentSequences(ResidentBook[ResidentSequence]):
    """arena_of: the arena that this process maps.
    of_step: by the last device block that the step writes.
    """

    def __init__(self, kept: KeptRows) -> None:
        super().__init__()
        self._kept = kept
        self._arenas: dict[FileId, Arena] = {}
        # The last arena that this process could map, as long as requests run: a server that dies
        # may just have pinned their first blocks.
        self._newest: Arena | None = None
        self.of_step: dict[int, ResidentSequence] = {}
        self.arena_of: Callable[[], Arena | None] = lambda: None

    def begin_step(self, rows: Iterable[ResidentRow]) -> None:
        self.age_reports()
        rows = tuple(rows)
        if rows and (arena := self.arena_of()) is not None:
            self._newest = arena
        self.of_step = {row.written_block: self._follow(row) for row in rows}

    def _begin(self, request_id: str) -> ResidentSequence:
        return ResidentSequence(request_id)

    def end(self, request_id: str) -> None:
        sequence = self._records.pop(request_id, None)
        if sequence is not None:
            self._kept.give_back(sequence.rows)
            self._unmap_unused()

    def _unmap_unused(self) -> None:
        """Unmaps arenas of earlier servers."""
        used = {one.file_id for other in self for one in other.arenas}
        self._arenas = {file_id: one for file_id, one in self._arenas.items() if file_id in used}
        if not self._records:
            self._newest = None

    def _follow(self, row: ResidentRow) -> ResidentSequence:
        sequence = self._named(row)
        sequence.first_block = row.first_block
        sequence.may_outgrow, sequence.num_freed = row.may_outgrow, row.num_freed
        if row.hot_blocks:
            sequence.hot_blocks = np.array(row.hot_blocks, np.int32)
            sequence.content.clear()
        self._take_news(sequence, row)
        return sequence

    def _forget_kept(self, record: ResidentSequence) -> None:
        record.forget_kept()
        self._unmap_unused()

    def _take_in(self, record: ResidentSequence, kept: KeptBlocks) -> bool:
        arena = self._arenas.get(kept.file_id, self._newest)
        if arena is None or arena.file_id != kept.file_id:
            return False
        self._arenas[kept.file_id] = arena
        if arena not in record.arenas:
            record.arenas.append(arena)
        base = arena.memory.ctypes.data
        slots, sketches = (
            np.where(offsets >= 0, offsets + base, NOT_KEPT)
            for offsets in (kept.offsets, kept.sketches)
        )
        record.kept(kept.first, slots, sketches)
        return True

    # ----------------------------------------------------------------------------------------- loss

    def lose_unnamed(self, first_block: int, has_gaps: bool) -> None:
        """A row that the message does not list is lost if blocks of it are only in host memory.

        has_gaps: its block table has null blocks: reported even if the request is unknown.
        """
        for sequence in self:
            if sequence.num_freed and sequence.first_block == first_block:
                self.lose(sequence, "the step's plan does not name it")
        if has_gaps:
            self._lost.add(first_block)
            self._reported[first_block] = STEPS_IN_FLIGHT

    def find_lost(self) -> None:
        """Tests the pins of what this step has read, after its last layer."""
        for sequence in self:
            if sequence.has_read and not sequence.is_pinned():
                self.lose(sequence, "the server pins its blocks no more")

    def take_lost(self) -> set[int]:
        """First blocks of newly lost requests, after a step's last layer."""
        self.find_lost()
        for sequence in self:
            sequence.has_read = False
        return self.take_reports()
