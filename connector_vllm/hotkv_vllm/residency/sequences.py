"""A worker's record of the requests of an engine with residency (`ResidentSequences`), and the
representations of these requests' blocks (`KeptRows`). A representation is a compact form of a
block's keys, by which sparse attention selects blocks. A *hot slot* is a block of the device's pool
into which selected blocks are copied. A request is *lost* if the worker can't read its blocks that
are only in the server's arena; vLLM then computes it anew. For CPU engines; CUDA engines use
`cuda_worker`.

Always true:
- A request has one `ResidentSequence`, from the first step whose message from the scheduler lists
  the request (`ResidentRow`) to the request's end.
- A row of `KeptRows` belongs to at most one request at a time.
- A block that is not on the device is read only at its known address in a mapped arena. If the
  address is not known, the request is marked as lost when the block is needed.
- If `ResidentSequence.content` says that a hot slot holds a block in a layer, the slot contains
  this block's page (its KV in the layer).
- A lost request is reported to the scheduler once, with the step in which the loss was found.
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
"""Largest number of rows of `KeptRows` (a row holds the representations of a block, compact forms
of its keys) that a request gets before its context has that many blocks."""
NOT_KEPT = -1
_FIRST_BLOCKS = 64
logger = link.logger
STEPS_IN_FLIGHT = 2
"""When vLLM gets the results of a step, it may have planned up to this many later steps. So a
request that the worker reports as lost may still be in the messages of this many steps."""


# -------------------------------------------------------------------------- rows of representations


def num_rows_for(num_taken: int) -> int:
    """Returns for how many rows `KeptRows` allocates memory if requests need `num_taken` rows:
    FIRST_ROWS, doubled until it is enough. A row holds the representations (compact forms of keys)
    of a block."""
    num_rows = FIRST_ROWS
    while num_rows < num_taken:
        num_rows *= 2
    return num_rows


class KeptRows:
    """Holds the representations (compact forms of keys) of all complete blocks of resident
    contexts, also of blocks that are not on the device. Used by one thread.

    Each resident request has rows here as long as it runs, one per block of its context; a row has
    the block's representations in all layers. The memory grows with the contexts that run at the
    same time, to about 7 % of their KV.

    pool: the worker's `BlockReprManager`, which holds representations only of blocks on the device.
        The rows have the same formats, centres (mean keys) and principal axes.
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
        """Returns the number of rows (one per block) that belong to requests."""
        return self._num_rows - len(self._free)

    def sources(self, layer_idx: int) -> Mapping[str, Source]:
        """Returns, by format, a layer's representations (compact forms of keys) in all rows, in the
        form that the selection of blocks needs (`Source`). Valid until the next `take`, which may
        replace the arrays."""
        of_pool = self._pool.sources(layer_idx)
        known = self._sources.setdefault(layer_idx, {})
        for name, source in of_pool.items():
            # To save time, because this method is called in every layer of a step, makes a new
            # `Source` only if the pool's `Source` or the number of rows has changed.
            one = known.get(name)
            if one is None or one[0] is not source or one[1] != self._num_rows:
                mine = replace(source, pool=self._of(layer_idx, name, source))
                known[name] = source, self._num_rows, mine
        return {name: one[2] for name, one in known.items()}

    def take(self, count: int) -> I32:
        """Allocates `count` rows and returns them, int32 [count]. Enlarges the arrays if too few
        rows are free."""
        if count > len(self._free):
            num_rows = num_rows_for(self.num_taken + count)
            self._free = [*range(num_rows - 1, self._num_rows - 1, -1), *self._free]
            self._num_rows = num_rows
        return np.array([self._free.pop() for _ in range(count)], np.int32)

    def give_back(self, rows: I32) -> None:
        """Frees rows that `take` has returned."""
        self._free.extend(sorted(rows.tolist(), reverse=True))

    def copy(self, layer_idx: int, rows: I32, blocks: I32) -> None:
        """Copies a layer's representations (compact forms of keys) from `pool` into rows.

        rows: the row to copy to, for each block.
        blocks: ids of the device blocks whose representations are copied.
        """
        for name, source in self._pool.sources(layer_idx).items():
            self._of(layer_idx, name, source)[rows] = source.pool[blocks]

    def _of(self, layer_idx: int, name: str, source: Source) -> U8:
        """Returns a layer's representations (compact forms of keys) in a format, for all rows,
        uint8 [rows, KV heads, bytes]. Enlarges the array if rows were added.

        name: name of the format.
        source: the layer's representations in `pool`.
        """
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
    """A worker's record of a request in an engine with residency. A position is the index of a
    block in the request's context.

    first_block: id of the device block with the context's first tokens. The worker reports the
        request as lost by this id.
    may_outgrow: True if the request is resident: its old blocks may be freed on the device, and are
        then only in the server's memory.
    num_freed: the blocks between the sinks (first blocks, which stay on the device) and this
        position are not on the device.
    hot_blocks: ids of the request's hot slots (device blocks for copies of selected blocks), int32.
    addresses: by position, the address of the block's arena slot in this process, int64; -1 if not
        known.
    representations: by position, the address of the arena slot with the block's representations
        (compact forms of keys), int64; -1 if the server lacks them.
    rows: by position, the row of `KeptRows` with the block's representations, int32.
    num_kept: by layer index, the number of leading blocks whose representations are in `rows`.
    content: by layer index: for each hot slot, the position of the block that it holds, int32; -1
        if empty.
    pin: identifies the server's pin of the blocks at `addresses`, for `still_holds`.
    arenas: the arenas in which the addresses are.
    unmapped: what the scheduler has said about blocks in an arena that this process did not map
        then; each step tries again.
    is_lost: True if the request must be computed anew.
    has_read: True if blocks were read from an arena in this step.
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
    unmapped: list[KeptBlocks] = field(default_factory=list)
    is_lost: bool = False
    has_read: bool = False

    def kept(self, first: int, slots: I64, representations: I64) -> None:
        """Records where the server has pinned consecutive blocks.

        first: position of the first of these blocks.
        slots: address of each block's slot, int64.
        representations: address of the slot with each block's representation (compact form of
            keys), int64; -1 for a missing representation.
        """
        stop = first + len(slots)
        if stop > len(self.addresses):
            more = max(stop, 2 * len(self.addresses), _FIRST_BLOCKS) - len(self.addresses)
            nothing = np.full(more, NOT_KEPT, np.int64)
            self.addresses = np.concatenate([self.addresses, nothing])
            self.representations = np.concatenate([self.representations, nothing])
        self.addresses[first:stop] = slots
        self.representations[first:stop] = representations

    def forget_kept(self) -> None:
        """Forgets the arena addresses of all blocks."""
        self.addresses[:] = self.representations[:] = NOT_KEPT
        self.arenas, self.unmapped = [], []

    def hot_content(self, layer_idx: int) -> I32:
        """Returns, for each hot slot (device block for a copy of a selected block), the position of
        the block whose page the slot holds in this layer, int32; -1 for an empty slot. A caller
        that copies a page into a slot must write the block's position into this array."""
        content = self.content.get(layer_idx)
        if content is None or len(content) != len(self.hot_blocks):
            content = self.content[layer_idx] = np.full(len(self.hot_blocks), -1, np.int32)
        return content

    def still_holds(self) -> bool:
        """Returns True if the server still pins all blocks that this step has read from arenas, so
        that the bytes that were read are valid. True if nothing was read."""
        pin = self.pin
        return not self.has_read or (
            pin is not None and all(arena.holds(pin) for arena in self.arenas)
        )


# ------------------------------------------------------------------------------------- all requests


class ResidentSequences:
    """Holds the `ResidentSequence` of each request, and finds lost requests (requests whose blocks
    the worker can't read any more).

    kept: holds the representations (compact forms of keys) of the requests' blocks.
    arena_of: a function that returns the arena that this process maps; None without an arena.
    of_step: the sequences of the present step, by the id of the last device block that the step
        writes for the request (`ResidentRow.written_block`).
    """

    def __init__(self, kept: KeptRows) -> None:
        self._kept = kept
        self._sequences: dict[str, ResidentSequence] = {}
        self._arenas: dict[FileId, Arena] = {}
        # The last arena that this process could map, as long as requests run: a server that dies
        # may just have pinned their first blocks.
        self._newest: Arena | None = None
        self._lost: set[int] = set()
        self._unnamed: dict[int, int] = {}
        self.of_step: dict[int, ResidentSequence] = {}
        self.arena_of: Callable[[], Arena | None] = lambda: None

    def __len__(self) -> int:
        return len(self._sequences)

    def __repr__(self) -> str:
        return f"ResidentSequences({len(self._sequences)})"

    def begin_step(self, rows: Iterable[ResidentRow]) -> None:
        """Processes the scheduler's message about a step, and sets `of_step`.

        rows: the message's entries, one for each request of the step.
        """
        self._unnamed = {block: left - 1 for block, left in self._unnamed.items() if left}
        rows = tuple(rows)
        if rows and (arena := self.arena_of()) is not None:
            self._newest = arena
        self.of_step = {row.written_block: self._follow(row) for row in rows}

    def end(self, request_id: str) -> None:
        """Forgets a request that has ended or was preempted, and frees its rows of `KeptRows`, the
        memory for the representations (compact forms of keys) of its blocks."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._kept.give_back(sequence.rows)
            self._unmap_unused()

    def _unmap_unused(self) -> None:
        """Unmaps arenas of earlier servers in which no request has addresses."""
        used = {one.file_id for other in self._sequences.values() for one in other.arenas}
        self._arenas = {file_id: one for file_id, one in self._arenas.items() if file_id in used}
        if not self._sequences:
            self._newest = None

    def _follow(self, row: ResidentRow) -> ResidentSequence:
        sequence = self._sequences.get(row.request_id)
        if sequence is None:
            sequence = self._sequences[row.request_id] = ResidentSequence(row.request_id)
            begins = not row.num_freed or row.pin is not None
            if row.first_block in self._unnamed and not begins:
                # `lose_unnamed` or `forget_all` has reported the request with this first block as
                # lost. The scheduler has planned this step before it got the report.
                sequence.is_lost = True
        sequence.first_block = row.first_block
        sequence.may_outgrow, sequence.num_freed = row.may_outgrow, row.num_freed
        if row.hot_blocks:
            sequence.hot_blocks = np.array(row.hot_blocks, np.int32)
            sequence.content.clear()
        if row.pin is not None:
            sequence.pin = row.pin
        if row.kept and not row.kept[0].first and (sequence.arenas or sequence.unmapped):
            # The message lists the request's pinned blocks from the first block on, although some
            # were known: the server had lost them, and has pinned them again at other places.
            sequence.forget_kept()
            self._unmap_unused()
        told = (*sequence.unmapped, *row.kept)
        sequence.unmapped = [kept for kept in told if not self._take_in(sequence, kept)]
        return sequence

    def _take_in(self, sequence: ResidentSequence, kept: KeptBlocks) -> bool:
        """Computes the addresses in this process of blocks that the server has pinned, and records
        them. Returns False if this process does not map the blocks' arena."""
        arena = self._arenas.get(kept.file_id, self._newest)
        if arena is None or arena.file_id != kept.file_id:
            return False
        self._arenas[kept.file_id] = arena
        if arena not in sequence.arenas:
            sequence.arenas.append(arena)
        base = arena.memory.ctypes.data
        slots, representations = (
            np.where(offsets >= 0, offsets + base, NOT_KEPT)
            for offsets in (kept.offsets, kept.representations)
        )
        sequence.kept(kept.first, slots, representations)
        return True

    # ----------------------------------------------------------------------------------------- loss

    def lose(self, sequence: ResidentSequence, why: str) -> None:
        """Marks the request as lost (vLLM then computes it anew), and queues it to be reported with
        this step. Each request is reported only once: the report names the request's first block,
        and after the first report vLLM may give this block to another request.

        why: the reason, for the log.
        """
        if not sequence.is_lost:
            logger.warning("hotkv: request %s is computed anew: %s", sequence.request_id, why)
            sequence.is_lost = True
            self._lost.add(sequence.first_block)

    def lose_named(self, request_ids: Iterable[str]) -> None:
        """Marks requests as lost, so that vLLM computes them anew.

        request_ids: the requests that the scheduler's message names as lost: after a reconnect the
            server did not pin their blocks at the old offsets of the arena.
        """
        for request_id in request_ids:
            if request_id in self._sequences:
                self.lose(self._sequences[request_id], "the server has lost its blocks")

    def forget_all(self, why: str) -> None:
        """Reports each request that has blocks only in host memory as lost, so that vLLM computes
        it anew. Then forgets all requests. Used if a message of the scheduler was lost, which may
        have said that a request was preempted and begins anew.

        why: the reason, for the log.
        """
        for sequence in list(self._sequences.values()):
            if sequence.num_freed:
                self.lose(sequence, why)
                self._unnamed[sequence.first_block] = STEPS_IN_FLIGHT
            self.end(sequence.request_id)

    def lose_unnamed(self, first_block: int, has_gaps: bool) -> None:
        """Handles a row of vLLM's batch that the scheduler's message does not list, so that the
        worker can't know where its blocks are. If blocks of its request are only in host memory,
        marks the request as lost: vLLM computes it anew.

        first_block: id of the row's first block, by which the request is found.
        has_gaps: True if the row's block table has null blocks in place of freed blocks. The
            request is then reported as lost even if the worker does not know it.
        """
        for sequence in self._sequences.values():
            if sequence.num_freed and sequence.first_block == first_block:
                self.lose(sequence, "the step's plan does not name it")
        if has_gaps:
            self._lost.add(first_block)
            self._unnamed[first_block] = STEPS_IN_FLIGHT

    def find_lost(self) -> None:
        """Marks requests as lost if this step has read their blocks from the arena and the server
        no longer pins these blocks: the step may have read wrong bytes. vLLM then computes the
        requests anew. Called after a step's last layer."""
        for sequence in self._sequences.values():
            if sequence.has_read and not sequence.still_holds():
                self.lose(sequence, "the server pins its blocks no more")

    def is_lost(self, request_id: str) -> bool:
        """Returns True if the KV that this step computes for the request may be wrong: the request
        is marked as lost (to be computed anew), or it is not known."""
        sequence = self._sequences.get(request_id)
        return sequence is None or sequence.is_lost

    def take_lost(self) -> set[int]:
        """Returns the id of the first block of each request that was marked as lost (to be computed
        anew) since the last call, for the report to the scheduler. Called after a step's last
        layer."""
        self.find_lost()
        for sequence in self._sequences.values():
            sequence.has_read = False
        lost, self._lost = self._lost, set()
        return lost

    def all_away(self) -> set[int]:
        """Returns the id of the first block of each request that has blocks only in host memory.
        Used if `take_lost` raises, so this method shares no code with `take_lost`."""
        return {one.first_block for one in self._sequences.values() if one.num_freed}
