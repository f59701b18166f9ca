"""A worker's record of the requests of an engine with residency: from the first step in which the
scheduler lists a request (`ResidentRow`) to the request's end. Also holds the representations of
the requests' blocks: compact forms of keys, by which sparse attention selects blocks.

Always true:
- Each request has one `ResidentSequence`, which ends before another request gets the rows of its
  representations.
- A block that is not on the device has an address in a mapped arena; otherwise its sequence is
  marked as lost when the block is needed.
- A *hot slot* is a block of the device's pool into which selected blocks are copied. If `content`
  says that a layer's hot slot holds the block at some position of the context, the slot has that
  block's page.
- A request whose bytes in the server were lost is reported once, with the step in which the loss
  was found.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from hotkv_client.arena import Arena
from hotkv_client.types import ResidencyOpened
from hotkv_sparse.selection import Source
from hotkv_vllm import link
from hotkv_vllm.residency.step import FileId, KeptBlocks, ResidentRow
from hotkv_vllm.sparse.pool import BlockReprManager

I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
FIRST_ROWS = 1024
MORE_ROWS = 64
"""Upper limit on the rows that a request allocates for the representations (compact forms of keys)
of blocks that it does not have yet."""
NOT_KEPT = -1
_FIRST_BLOCKS = 64
logger = link.logger
STEPS_IN_FLIGHT = 2
"""Number of steps that vLLM may have planned before it hears the result of a step."""


# -------------------------------------------------------------------------- rows of representations


def num_rows_for(num_taken: int) -> int:
    """Returns how many rows (places for representations, the compact forms of keys) `KeptRows`
    allocates when requests need `num_taken` of them."""
    num_rows = FIRST_ROWS
    while num_rows < num_taken:
        num_rows *= 2
    return num_rows


class KeptRows:
    """Representations (compact forms of keys) of all complete blocks of resident contexts, by layer
    and row. One thread.

    When a block is freed, its row in the pool of the device's blocks (`pool`) is lost. So each
    resident request has its own rows here, one per block, for as long as it runs. Memory grows with
    the contexts that run at a time, to about 7 % of their KV. A row belongs to one request at a
    time. Formats, centres and axes are the same as in `pool`.
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
        """Returns how many rows (each for a block's representations, the compact forms of its keys)
        belong to requests."""
        return self._num_rows - len(self._free)

    def sources(self, layer_idx: int) -> Mapping[str, Source]:
        """Returns a layer's representations (compact forms of keys) by format. The representations
        are valid until the next `take`."""
        of_pool = self._pool.sources(layer_idx)
        known = self._sources.setdefault(layer_idx, {})
        for name, source in of_pool.items():
            # Called in every layer of a step, so they are made anew only if something has changed.
            one = known.get(name)
            if one is None or one[0] is not source or one[1] != self._num_rows:
                mine = replace(source, pool=self._of(layer_idx, name, source))
                known[name] = source, self._num_rows, mine
        return {name: one[2] for name, one in known.items()}

    def take(self, count: int) -> I32:
        """Allocates `count` free rows, int32 [count]. Makes more rows if too few are free."""
        if count > len(self._free):
            num_rows = num_rows_for(self.num_taken + count)
            self._free = [*range(num_rows - 1, self._num_rows - 1, -1), *self._free]
            self._num_rows = num_rows
        return np.array([self._free.pop() for _ in range(count)], np.int32)

    def give_back(self, rows: I32) -> None:
        """Frees rows that were allocated."""
        self._free.extend(sorted(rows.tolist(), reverse=True))

    def copy(self, layer_idx: int, rows: I32, blocks: I32) -> None:
        """Copies the representations (compact forms of keys) of `blocks` [n] from the pool of the
        device's blocks into `rows`."""
        for name, source in self._pool.sources(layer_idx).items():
            self._of(layer_idx, name, source)[rows] = source.pool[blocks]

    def _of(self, layer_idx: int, name: str, source: Source) -> U8:
        """Returns a layer's rows of a format, uint8 [rows, H, N]."""
        rows = self._rows.get((layer_idx, name))
        if rows is None or len(rows) < self._num_rows:
            grown = np.zeros((self._num_rows, *source.pool.shape[1:]), np.uint8)
            if rows is not None:
                grown[: len(rows)] = rows
            rows = self._rows[layer_idx, name] = grown
        return rows


# ---------------------------------------------------------------------------------------- a request


@dataclass(slots=True, eq=False)
class ResidentSequence:
    """A request of an engine with residency. A position is that of a block in the request's
    context.

    addresses: int64, by position, the address of the block's arena slot in this process; -1 if the
        server is not known to hold the block.
    representations: int64, by position, the address of the slot with the block's representation; -1
        if the server is not known to hold the representation.
    rows: int32, by position, the row of `KeptRows` for the block's representation.
    num_kept: by layer, the number of leading blocks whose representations are in `rows`.
    num_freed: position up to which the blocks after the sinks (first blocks) are not on the device.
    content: by layer index, the position of the block that each hot slot (`hot_blocks`) holds.
    pin: the server's pin under which the bytes at the addresses are read.
    arenas: the arenas that the addresses are in.
    has_read: True if bytes were read from an arena in this step.
    """

    request_id: str
    first_block: int = 0
    may_outgrow: bool = False
    num_freed: int = 0
    hot_blocks: I32 = field(default_factory=lambda: np.empty(0, np.int32))
    addresses: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    representations: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    rows: I32 = field(default_factory=lambda: np.empty(0, np.int32))
    num_kept: dict[int, int] = field(default_factory=dict)
    content: dict[int, I32] = field(default_factory=dict)
    pin: ResidencyOpened | None = None
    arenas: list[Arena] = field(default_factory=list)
    is_lost: bool = False
    has_read: bool = False

    def kept(self, first: int, slots: I64, representations: I64) -> None:
        """Sets the addresses int64 [n] of blocks from `first` on, and of their representations
        (compact forms of keys); -1 for a missing representation."""
        stop = first + len(slots)
        if stop > len(self.addresses):
            more = max(stop, 2 * len(self.addresses), _FIRST_BLOCKS) - len(self.addresses)
            nothing = np.full(more, NOT_KEPT, np.int64)
            self.addresses = np.concatenate([self.addresses, nothing])
            self.representations = np.concatenate([self.representations, nothing])
        self.addresses[first:stop] = slots
        self.representations[first:stop] = representations

    def hot_content(self, layer_idx: int) -> I32:
        """Returns, for each hot slot (device block for a selected block) of a layer, the position
        of the block that it holds; -1 for an empty slot. The caller may write to the array."""
        content = self.content.get(layer_idx)
        if content is None or len(content) != len(self.hot_blocks):
            content = self.content[layer_idx] = np.full(len(self.hot_blocks), -1, np.int32)
        return content

    def still_holds(self) -> bool:
        """Returns True if the bytes read from the arenas were pinned when they were read."""
        pin = self.pin
        return not self.has_read or (
            pin is not None and all(arena.holds(pin) for arena in self.arenas)
        )


# ------------------------------------------------------------------------------------- all requests


class ResidentSequences:
    """Holds the sequences of all requests; see the module.

    arena_of: returns the arena that this process maps.
    of_step: the sequences of the present step, by the block that the step writes last.
    """

    def __init__(self, kept: KeptRows) -> None:
        self._kept = kept
        self._sequences: dict[str, ResidentSequence] = {}
        self._arenas: dict[FileId, Arena] = {}
        self._lost: set[int] = set()
        self._unnamed: dict[int, int] = {}
        self.of_step: dict[int, ResidentSequence] = {}
        self.arena_of: Callable[[], Arena | None] = lambda: None

    def __len__(self) -> int:
        return len(self._sequences)

    def __repr__(self) -> str:
        return f"ResidentSequences({len(self._sequences)})"

    def begin_step(self, rows: Iterable[ResidentRow]) -> None:
        """Receives the scheduler's rows of the step, and sets `of_step`."""
        self._unnamed = {block: left - 1 for block, left in self._unnamed.items() if left}
        self.of_step = {row.written_block: self._follow(row) for row in rows}

    def end(self, request_id: str) -> None:
        """Forgets a request that has ended or lost its blocks, and frees the request's rows (places
        for representations)."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._kept.give_back(sequence.rows)
            used = {one.file_id for other in self._sequences.values() for one in other.arenas}
            # The memory of servers that are gone is unmapped with its last reader.
            self._arenas = {
                file_id: one for file_id, one in self._arenas.items() if file_id in used
            }

    def _follow(self, row: ResidentRow) -> ResidentSequence:
        sequence = self._sequences.get(row.request_id)
        if sequence is None:
            sequence = self._sequences[row.request_id] = ResidentSequence(row.request_id)
            if row.first_block in self._unnamed:
                # This row was planned before the scheduler heard of the step with the unknown row.
                sequence.is_lost = True
        sequence.first_block = row.first_block
        sequence.may_outgrow, sequence.num_freed = row.may_outgrow, row.num_freed
        if row.hot_blocks:
            sequence.hot_blocks = np.array(row.hot_blocks, np.int32)
            sequence.content.clear()
        if row.pin is not None:
            sequence.pin = row.pin
        for kept in row.kept:
            self._take_in(sequence, kept)
        return sequence

    def _take_in(self, sequence: ResidentSequence, kept: KeptBlocks) -> None:
        """Computes the addresses of blocks that the server holds. Blocks get no address if this
        process does not map the blocks' arena."""
        arena = self._arenas.get(kept.file_id)
        if arena is None:
            arena = self.arena_of()
            if arena is None or arena.file_id != kept.file_id:
                return
            self._arenas[kept.file_id] = arena
        if arena not in sequence.arenas:
            sequence.arenas.append(arena)
        base = arena.memory.ctypes.data
        slots, representations = (
            np.where(offsets >= 0, offsets + base, NOT_KEPT)
            for offsets in (kept.offsets, kept.representations)
        )
        sequence.kept(kept.first, slots, representations)

    # ----------------------------------------------------------------------------------------- loss

    def lose(self, sequence: ResidentSequence, why: str) -> None:
        """Marks the request as lost and reports it with this step, even if the step did not read
        its lost bytes. Reports the request only once: later its blocks may belong to other
        requests."""
        if not sequence.is_lost:
            logger.warning("hotkv: request %s is computed anew: %s", sequence.request_id, why)
            sequence.is_lost = True
            self._lost.add(sequence.first_block)

    def lose_named(self, request_ids: Iterable[str]) -> None:
        """Marks these requests as lost, because the server has not pinned their blocks again."""
        for request_id in request_ids:
            if request_id in self._sequences:
                self.lose(self._sequences[request_id], "the server has lost its blocks")

    def lose_all_away(self, why: str) -> None:
        """Marks all requests as lost that have blocks in host memory only."""
        for sequence in self._sequences.values():
            if sequence.num_freed:
                self.lose(sequence, why)

    def lose_unnamed(self, first_block: int, has_gaps: bool) -> None:
        """Handles a row (request of a step) that the scheduler has not named: marks the request
        with this first block as lost, if it has freed blocks. `has_gaps`: some blocks of the row
        are not on the device. Then the block is reported as lost even if no request is known for
        it."""
        for sequence in self._sequences.values():
            if sequence.num_freed and sequence.first_block == first_block:
                self.lose(sequence, "the step's plan does not name it")
        if has_gaps:
            self._lost.add(first_block)
            self._unnamed[first_block] = STEPS_IN_FLIGHT

    def find_lost(self) -> None:
        """Marks requests as lost whose bytes were read while the server did not pin these bytes.
        Call this method after a step's last layer."""
        for sequence in self._sequences.values():
            if sequence.has_read and not sequence.still_holds():
                self.lose(sequence, "the server pins its blocks no more")

    def is_lost(self, request_id: str) -> bool:
        """Returns True if the request's output of this step may be wrong: the request was lost and
        is not computed anew yet, or the request is unknown."""
        sequence = self._sequences.get(request_id)
        return sequence is None or sequence.is_lost

    def take_lost(self) -> set[int]:
        """Returns the block id of the first block of each request that was lost since the last
        call. Call this method after a step's last layer."""
        self.find_lost()
        for sequence in self._sequences.values():
            sequence.has_read = False
        lost, self._lost = self._lost, set()
        return lost

    def all_away(self) -> set[int]:
        """Returns the block id of the first block of each request that has blocks in host memory
        only. Shares no code with `take_lost`, because it gives the answer if `take_lost` raises."""
        return {one.first_block for one in self._sequences.values() if one.num_freed}
