"""Sparse offloading under the names of vLLM's RFC #37263: host memory holds every block, hot slots
(blocks of device memory) hold the attended blocks.

`SparseOffloadingManager` is the scheduler's part: it selects the relevant blocks of a prefix, pins
them while they are loaded, and allocates new blocks of host memory. `SparseOffloadingHandler` is
the worker's part: a layer's step and the copies that it needs. `BlockReprManager` (`pool`) holds
representations (compact forms of keys, by which blocks are selected) by host block. All three are
thin: selection and hot sets come from `hotkv_sparse`. Host memory is an array of this process
(`ArrayPages`) or a residency of hotkv-server (`ResidencyPages`).

Always true:
- A block is attended only in a hot slot that holds its bytes.
- A new block stays in its hot slot until its copy in host memory is complete. Only then is it
  ready.
- A pinned host block is not allocated again.

Shapes: L layers, Q query heads, H KV heads, D channels, T tokens of a block, C blocks of the
context, n blocks of one call, S blocks of the staging memory.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hotkv_client import BlockRun, ResidencyOpened, Session
from hotkv_proto.blocks import StoreOptions
from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse import HotSet, SparseConfig, prepare, score, span
from hotkv_sparse.config import COPY_METHODS
from hotkv_sparse.selection import exact_log_mass, select_layer
from hotkv_vllm.residency.pages import PageCopier
from hotkv_vllm.sparse.pool import BlockReprManager, LayerShape

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]
NO_BLOCKS = np.empty(0, np.int32)


# ---------------------------------------------------------------------------------------- scheduler


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Ids of the host blocks to load, int32. The blocks are pinned until the load ends."""

    blocks: I32


class SparseOffloadingManager:
    """Manages blocks of host memory by hash. `representations` holds the representation (compact
    form of the keys) of each of these blocks. One thread."""

    def __init__(
        self,
        config: SparseConfig,
        num_blocks: int,
        block_tokens: int,
        representations: BlockReprManager,
    ) -> None:
        self._config = config
        self._block_tokens = block_tokens
        self._reprs = representations
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._is_ready = np.zeros(num_blocks, np.bool_)
        self._pins = np.zeros(num_blocks, np.int32)
        self._free = list(range(num_blocks - 1, -1, -1))

    def __repr__(self) -> str:
        return (
            f"SparseOffloadingManager(ready {int(self._is_ready.sum())}, free "
            f"{len(self._free)}, pinned {int((self._pins > 0).sum())})"
        )

    def lookup_with_sparse(
        self, block_hashes: Sequence[bytes], query: F32, layer_idx: int
    ) -> tuple[I32, F32]:
        """Returns (selected_blocks, scores) of the longest ready prefix, for a query float32 [Q,
        D].

        `selected_blocks` int32 are host blocks in the context's order. `scores` float32 are their
        shares of the attention mass; inf for a block that is always attended. The attention mass of
        blocks that are always attended is estimated too, because their keys are not available here.
        """
        rows = self._ready_prefix(block_hashes)
        context_tokens = len(rows) * self._block_tokens
        if not len(rows):
            return NO_BLOCKS, np.empty(0, np.float32)
        always = rows[span(self._config, context_tokens, self._block_tokens).always]
        sources = self._reprs.sources(layer_idx)
        name, source = next(iter(sources.items()))
        kept = score(prepare(name, query, source.mu), source.pool, always)
        log_mass = (
            np.logaddexp.reduce(kept, axis=1) if len(always) else np.full(len(query), -np.inf)
        )
        selection = select_layer(
            self._config,
            layer_idx,
            query,
            sources,
            rows,
            log_mass.astype(np.float32),
            context_tokens,
            self._block_tokens,
        )
        return rows[selection.blocks], selection.weights

    def _ready_prefix(self, block_hashes: Sequence[bytes]) -> I32:
        rows = []
        for block_hash in block_hashes:
            block = self._block_of.get(block_hash)
            if block is None or not self._is_ready[block]:
                break
            rows.append(block)
        return np.array(rows, np.int32)

    def prepare_sparse_load(self, selected_blocks: I32) -> LoadSpec:
        """Pins the blocks until `complete_load`. Raises INVALID_FIELD if a block isn't ready."""
        if not self._is_ready[selected_blocks].all():
            raise HotKVError(
                Reason.INVALID_FIELD,
                "selected_blocks include some that are not ready; pass those of lookup_with_sparse",
            )
        np.add.at(self._pins, selected_blocks, 1)
        return LoadSpec(selected_blocks)

    def complete_load(self, selected_blocks: I32) -> None:
        """Unpins blocks whose load has ended or will not happen."""
        if not (self._pins[selected_blocks] > 0).all():
            raise HotKVError(
                Reason.INVALID_FIELD,
                (
                    "selected_blocks include some that are not pinned; call complete_load once for "
                    "each load"
                ),
            )
        np.subtract.at(self._pins, selected_blocks, 1)

    def prepare_store(self, block_hashes: Sequence[bytes]) -> I32:
        """Allocates host blocks int32 for new blocks, which become ready in `complete_store`.
        Raises OVERLOADED if too few blocks are free."""
        fresh = [block_hash for block_hash in block_hashes if block_hash not in self._block_of]
        if len(fresh) > len(self._free):
            raise HotKVError(
                Reason.OVERLOADED,
                (
                    f"{len(fresh)} new blocks, {len(self._free)} free in host memory; give it more "
                    "blocks"
                ),
            )
        for block_hash in fresh:
            block = self._free.pop()
            self._block_of[block_hash], self._hash_of[block] = block, block_hash
        return np.array([self._block_of[block_hash] for block_hash in block_hashes], np.int32)

    def complete_store(self, new_blocks: I32, success: bool = True) -> None:
        """Marks `new_blocks` as ready; frees these blocks if the store failed."""
        for block in new_blocks.tolist():
            if block not in self._hash_of:
                raise HotKVError(
                    Reason.INVALID_FIELD,
                    f"block {block} was not reserved; pass blocks of prepare_store",
                )
        if success:
            self._is_ready[new_blocks] = True
            return
        for block in new_blocks[~self._is_ready[new_blocks]].tolist():
            del self._block_of[self._hash_of.pop(block)]
            self._free.append(block)


# -------------------------------------------------------------------------------------- host memory


class HostPages(Protocol):
    """Pages in host memory, by layer and block. One thread at a time."""

    def read(self, layer_idx: int, blocks: I32) -> U8:
        """Returns the pages uint8 [n, page bytes] of blocks that are stored."""
        ...

    def load(self, layer_idx: int, blocks: I32, hot: U8, slots: I32) -> None:
        """Copies pages of blocks [n] to `hot` uint8 [slots, page bytes]."""
        ...

    def store(self, layer_idx: int, blocks: I32, hot: U8, slots: I32) -> None:
        """Copies pages of `hot` to blocks [n]. Raises an error if the pages can't be stored."""
        ...


class ArrayPages:
    """Host memory of this process.

    pages: uint8 [L, blocks, page bytes], contiguous.
    copy_method: how blocks are copied. `memcpy` copies each sequence of blocks that is contiguous
        on both sides, `batch` passes all blocks in a single call, `kernel` and `auto` run the
        compiled loop of `PageCopier`.
    """

    def __init__(self, pages: U8, copy_method: str = "auto") -> None:
        if copy_method not in COPY_METHODS:
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"copy_method is {copy_method!r}; use one of {', '.join(COPY_METHODS)}",
            )
        self._pages = pages
        self._copy_method = copy_method
        self._copier = PageCopier()

    def __repr__(self) -> str:
        return f"ArrayPages({self._pages.shape})"

    def read(self, layer_idx: int, blocks: I32) -> U8:
        pages: U8 = self._pages[layer_idx, blocks]
        return pages

    def load(self, layer_idx: int, blocks: I32, hot: U8, slots: I32) -> None:
        self._copy(self._pages[layer_idx], hot, blocks, slots)

    def store(self, layer_idx: int, blocks: I32, hot: U8, slots: I32) -> None:
        self._copy(hot, self._pages[layer_idx], slots, blocks)

    def _copy(self, source: U8, destination: U8, sources: I32, destinations: I32) -> None:
        """Copies rows of `source` to rows of `destination`, both contiguous uint8 [blocks, page
        bytes]. Raises INVALID_FIELD if the rows don't fit."""
        size = self._pages.shape[2]
        for pages, rows in ((source, sources), (destination, destinations)):
            if (
                pages.dtype != np.uint8
                or pages.shape[1:] != (size,)
                or not pages.flags.c_contiguous
            ):
                raise HotKVError(
                    Reason.INVALID_FIELD,
                    f"pages are {pages.dtype} {list(pages.shape)}; pass contiguous uint8 [blocks, "
                    f"{size}]",
                )
            if len(rows) and not 0 <= rows.min() <= rows.max() < len(pages):
                raise HotKVError(Reason.INVALID_FIELD, f"blocks must be from 0 to {len(pages) - 1}")
        if self._copy_method == "batch":
            destination[destinations] = source[sources]
        elif self._copy_method == "memcpy":
            broken = (np.diff(sources) != 1) | (np.diff(destinations) != 1)
            edges = [0, *(np.flatnonzero(broken) + 1).tolist(), len(sources)]
            for first, last in itertools.pairwise(edges):
                if first < last:
                    start, to, count = int(sources[first]), int(destinations[first]), last - first
                    destination[to : to + count] = source[start : start + count]
        else:
            self._copier.copy(
                destination.ctypes.data + destinations.astype(np.int64) * size,
                source.ctypes.data + sources.astype(np.int64) * size,
                size,
            )


@dataclass(slots=True)
class _Staged:
    """A block that waits for its store to the server: its index in the staging memory, and the
    layers whose page is already there."""

    place: int
    layers: set[int] = field(default_factory=set)


class ResidencyPages:
    """A residency of hotkv-server. Pages are read from the mapped arena, without a call. A block is
    stored once all layers have provided their page of it. After that the block is read only while
    the server pins it.

    memory: uint8 [L, S, page bytes], staging memory that `session` has registered. Blocks wait here
        for their store. A slot of the server has a block's pages in the same order of layers.
    layers: the layers' indices, in this order.
    """

    def __init__(
        self, session: Session, memory: U8, layers: Sequence[int], timeout_s: float = 30.0
    ) -> None:
        arena = session.arena()
        if arena is None or not session.has_residency:
            raise HotKVError(
                Reason.INVALID_FIELD,
                "session has no arena to read; connect it to a hotkv-server of this node",
            )
        self._session, self._arena, self._memory = session, arena, memory
        self._place_of = {layer: place for place, layer in enumerate(layers)}
        self._timeout_s = timeout_s
        self._copier = PageCopier()
        self._opened: dict[str, ResidencyOpened] = {}
        self._names: dict[int, tuple[str, int, bytes]] = {}
        self._offsets: dict[int, int] = {}
        self._staged: dict[int, _Staged] = {}
        self._free = list(range(memory.shape[1] - 1, -1, -1))
        self._num_stores = 0

    def __repr__(self) -> str:
        return f"ResidencyPages({len(self._offsets)} blocks pinned, {len(self._staged)} staged)"

    # ------------------------------------------------------------------------------------ sequences

    def open(self, sequence_id: str, num_blocks: int) -> None:
        """Reserves room for all blocks that a sequence may ever have. Raises HotKVError if the
        server has no room."""
        answer = self._session.open_residency(sequence_id, {0: num_blocks})
        self._opened[sequence_id] = answer.result(self._timeout_s)

    def close(self, sequence_id: str) -> None:
        """Closes the sequence's residency, so that the server may evict its blocks."""
        del self._opened[sequence_id]
        self._session.close_residency(sequence_id)
        for block in [block for block, name in self._names.items() if name[0] == sequence_id]:
            del self._names[block]
            self._offsets.pop(block, None)

    def name(self, sequence_id: str, first: int, hashes: Sequence[bytes], blocks: I32) -> None:
        """Assigns these host blocks to a sequence, from its block `first` on, under these
        hashes."""
        for place, (block_hash, block) in enumerate(
            zip(hashes, blocks.tolist(), strict=True), first
        ):
            self._names[block] = sequence_id, place, block_hash

    # ---------------------------------------------------------------------------------------- pages

    def read(self, layer_idx: int, blocks: I32) -> U8:
        pages = np.empty((len(blocks), self._memory.shape[2]), np.uint8)
        self.load(layer_idx, blocks, pages, np.arange(len(blocks), dtype=np.int32))
        return pages

    def load(self, layer_idx: int, blocks: I32, hot: U8, slots: I32) -> None:
        source = np.array([self._address(layer_idx, block) for block in blocks.tolist()], np.int64)
        page_bytes = self._memory.shape[2]
        self._copier.copy(hot.ctypes.data + slots.astype(np.int64) * page_bytes, source, page_bytes)
        # Pins are looked at behind the copies.
        for sequence_id in {self._names[block][0] for block in blocks.tolist()}:
            if not self._arena.holds(self._opened[sequence_id]):
                raise HotKVError(
                    Reason.UNKNOWN_RESIDENCY,
                    f"the server no longer keeps blocks of {sequence_id}; compute it anew",
                )

    def _address(self, layer_idx: int, block: int) -> int:
        place, page_bytes = self._place_of[layer_idx], self._memory.shape[2]
        staged = self._staged.get(block)
        if staged is not None:
            return int(self._memory[place, staged.place].ctypes.data)
        return int(self._arena.memory.ctypes.data) + self._offsets[block] + place * page_bytes

    def store(self, layer_idx: int, blocks: I32, hot: U8, slots: I32) -> None:
        for block, slot in zip(blocks.tolist(), slots.tolist(), strict=True):
            staged = self._staged.get(block)
            if staged is None:
                if not self._free:
                    raise HotKVError(
                        Reason.OVERLOADED,
                        f"all {self._memory.shape[1]} blocks of the staging memory are taken; wait "
                        "for the stores of other layers, or give it more",
                    )
                staged = self._staged[block] = _Staged(self._free.pop())
            self._memory[self._place_of[layer_idx], staged.place] = hot[slot]
            staged.layers.add(layer_idx)
        complete = [
            block
            for block in blocks.tolist()
            if len(self._staged[block].layers) == len(self._place_of)
        ]
        # Neighbours of a sequence go together.
        for _, run in itertools.groupby(
            enumerate(sorted(complete, key=lambda block: self._names[block][:2])),
            lambda one: (self._names[one[1]][0], self._names[one[1]][1] - one[0]),
        ):
            self._send([block for _, block in run])

    def _send(self, blocks: list[int]) -> None:
        """Stores blocks that are neighbours in a sequence into its residency, and notes where the
        server pins them."""
        sequence_id, first, _ = self._names[blocks[0]]
        names = [self._names[block][2] for block in blocks]
        places = np.array([self._staged[block].place for block in blocks], np.int32)
        self._num_stores += 1
        call, runs = f"{sequence_id}-{self._num_stores}", [BlockRun(0, names, places, depth=first)]
        stored = self._session.store(
            call, call, runs, self._timeout_s, StoreOptions(residency_id=sequence_id)
        )
        stored.result(self._timeout_s)
        pinned = self._session.extend_residency(sequence_id, 0, first, names)
        offsets = pinned.result(self._timeout_s).offsets.tolist()
        for block, offset in zip(blocks, offsets, strict=True):
            if offset < 0:
                raise HotKVError(
                    Reason.UNKNOWN_RESIDENCY,
                    f"the server has not stored blocks of {sequence_id}; store them again",
                )
            self._offsets[block] = offset
            self._free.append(self._staged.pop(block).place)


# ------------------------------------------------------------------------------------------- worker


@dataclass(frozen=True, slots=True)
class SwapSpec:
    """The copies between host memory and hot slots for a sequence in a layer. Copy i is between the
    host block `blocks[i]`, at position `positions[i]` of the context, and the hot slot `slots[i]`
    (int32 arrays).

    is_load: True for copies to the hot slots, False for copies to host memory.
    """

    sequence_id: str
    layer_idx: int
    positions: I32
    blocks: I32
    slots: I32
    is_load: bool


@dataclass(frozen=True, slots=True)
class DecodeMetadata:
    """A sequence in a layer.

    block_table: int32, the blocks to attend to, in order. The last block holds the tokens up to
        `seq_len`. The argument of `handle_layer` names host blocks of the whole context; its result
        names hot slots.
    """

    sequence_id: str
    block_table: I32
    seq_len: int


@dataclass(slots=True)
class _LayerState:
    """A sequence in a layer.

    pending: int32, positions of complete blocks whose swap-out has not been requested yet.
    """

    hot: HotSet
    has_begun: bool = False
    pending: I32 = field(default_factory=lambda: NO_BLOCKS)


class SparseOffloadingHandler:
    """The hot slots (device blocks for attended blocks) of every layer, cut into one region per
    sequence, and the copies between them and host memory.

    host: pages of all blocks.
    hot: uint8 [layers, slots, page bytes].
    keys_of: returns unpacked keys float32 [n, T, H, D] of pages uint8 [n, page bytes].
    slots_per_sequence: most blocks of a hot set (the blocks of a sequence and layer on the device).

    Decides in the caller's thread. Copies run in a thread of the handler, in the order in which
    they were submitted.
    """

    def __init__(
        self,
        config: SparseConfig,
        layers: Mapping[int, LayerShape],
        slots_per_sequence: int,
        host: HostPages,
        hot: U8,
        keys_of: Callable[[U8], F32],
    ) -> None:
        if slots_per_sequence > hot.shape[1]:
            raise HotKVError(
                Reason.INVALID_FIELD,
                (
                    f"slots_per_sequence is {slots_per_sequence}; there are {hot.shape[1]} hot "
                    "slots, use no more"
                ),
            )
        self._config = config
        self._layers = dict(layers)
        self._slots = slots_per_sequence
        self._host, self._hot = host, hot
        self._keys_of = keys_of
        self.representations = BlockReprManager(
            layers, {index: partial(self._host_keys, index) for index in layers}
        )
        self._regions = list(range(hot.shape[1] // slots_per_sequence - 1, -1, -1))
        self._region_of: dict[str, int] = {}
        self._states: dict[tuple[str, int], _LayerState] = {}
        self._jobs: dict[int, tuple[SwapSpec, Future[None]]] = {}
        self._copier = ThreadPoolExecutor(1, "hotkv-swap")

    def __repr__(self) -> str:
        return (
            f"SparseOffloadingHandler(sequences {len(self._region_of)}, layers "
            f"{len(self._states)}, jobs {len(self._jobs)})"
        )

    # ------------------------------------------------------------------------------------ sequences

    def begin(self, sequence_id: str) -> None:
        """Begins a sequence whose complete blocks are all in host memory.

        Raises OVERLOADED if all regions are in use."""
        if not self._regions:
            raise HotKVError(
                Reason.OVERLOADED,
                f"all {len(self._region_of)} regions of hot slots are taken; end a sequence first",
            )
        self._region_of[sequence_id] = self._regions.pop()

    def end(self, sequence_id: str) -> None:
        """Ends a sequence. The sequence's jobs must have ended before."""
        self._regions.append(self._region_of.pop(sequence_id))
        for owner in [owner for owner in self._states if owner[0] == sequence_id]:
            del self._states[owner]

    def extend(self, sequence_id: str, layer_idx: int, seq_len: int) -> int:
        """Extends the context to `seq_len` tokens. Returns the hot slot of the last token's block.
        Call before the step's keys are written."""
        block_tokens = self._layers[layer_idx].block_tokens
        where = span(self._config, seq_len, block_tokens)
        state = self._states.get((sequence_id, layer_idx))
        # The last block counts as incomplete even when this step fills it: its keys are about to be
        # written.
        num_complete = where.count - 1
        num_host = 0
        if state is None:
            state = self._states[sequence_id, layer_idx] = _LayerState(
                HotSet(self._slots, 0, self._config.cache_policy)
            )
            num_host = num_complete
        swap_out = state.hot.extend(where, num_complete, num_host).swap_out
        state.pending = np.concatenate([state.pending, swap_out])
        return int(self._slots_of(sequence_id, state.hot, np.array([num_complete], np.int32))[0])

    def _slots_of(self, sequence_id: str, hot: HotSet, positions: I32) -> I32:
        """Returns the hot slots int32 of resident blocks."""
        present = hot.map()
        slots: I32 = present.slots[np.searchsorted(present.blocks, positions)] + np.int32(
            self._region_of[sequence_id] * self._slots
        )
        return slots

    # ---------------------------------------------------------------------------------------- steps

    def handle_layer(
        self, attn_metadata: DecodeMetadata, layer_idx: int, query: F32
    ) -> tuple[DecodeMetadata, SwapSpec, SwapSpec]:
        """Returns (new_attn_metadata, swap_in_spec, swap_out_spec) of a layer's step with a query
        float32 [Q, D].

        Carry out the swap-in, attend with the new metadata, then carry out the swap-out. A
        sequence's first step loads its whole selection, every later step at most
        `max_correction_blocks`.
        """
        sequence_id, table, seq_len = (
            attn_metadata.sequence_id,
            attn_metadata.block_table,
            attn_metadata.seq_len,
        )
        state = self._states[sequence_id, layer_idx]
        hot, shape = state.hot, self._layers[layer_idx]
        log_mass = self._always_log_mass(attn_metadata, layer_idx, query)
        sources = self.representations.sources(layer_idx)
        selection = select_layer(
            self._config, layer_idx, query, sources, table, log_mass, seq_len, shape.block_tokens
        )
        step = hot.step(
            selection, self._config.max_correction_blocks if state.has_begun else hot.span.count
        )
        state.has_begun = True
        pending, state.pending = state.pending, NO_BLOCKS
        region = np.int32(self._region_of[sequence_id] * self._slots)
        loads = step.load
        num_left_out = hot.span.count - len(step.map.blocks)
        return (
            DecodeMetadata(
                sequence_id, step.map.slots + region, seq_len - num_left_out * shape.block_tokens
            ),
            SwapSpec(
                sequence_id,
                layer_idx,
                loads.blocks,
                table[loads.blocks],
                loads.slots + region,
                True,
            ),
            SwapSpec(
                sequence_id,
                layer_idx,
                pending,
                table[pending],
                self._slots_of(sequence_id, hot, pending),
                False,
            ),
        )

    def _always_log_mass(self, metadata: DecodeMetadata, layer_idx: int, query: F32) -> F32:
        """Returns the exact log mass float32 [Q] of the blocks that are always attended, read from
        hot slots where possible, else from host memory."""
        hot, block_tokens = (
            self._states[metadata.sequence_id, layer_idx].hot,
            self._layers[layer_idx].block_tokens,
        )
        always = hot.span.always
        resident = np.isin(always, hot.map().blocks)
        pages = np.empty((len(always), self._hot.shape[2]), np.uint8)
        pages[~resident] = self._host.read(layer_idx, metadata.block_table[always[~resident]])
        pages[resident] = self._hot[
            layer_idx, self._slots_of(metadata.sequence_id, hot, always[resident])
        ]
        keys = self._keys_of(pages)
        keys_RHD = keys.reshape(-1, *keys.shape[2:])
        excess = hot.span.count * block_tokens - metadata.seq_len
        return exact_log_mass(query, keys_RHD[: len(keys_RHD) - excess])

    def _host_keys(self, layer_idx: int, blocks: I32) -> F32:
        """Returns the keys of host blocks. Waits for copies that write them."""
        wait_futures(
            [
                job
                for spec, job in self._jobs.values()
                if not spec.is_load and np.isin(blocks, spec.blocks).any()
            ]
        )
        return self._keys_of(self._host.read(layer_idx, blocks))

    # --------------------------------------------------------------------------------------- copies

    def transfer_async(self, job_id: int, spec: SwapSpec) -> None:
        """Begins the copies in the handler's thread. Raises INVALID_FIELD if the id is in use."""
        if job_id in self._jobs:
            raise HotKVError(
                Reason.INVALID_FIELD, f"job_id {job_id} is in use; wait for it, or choose another"
            )
        self._jobs[job_id] = spec, self._copier.submit(self._copy, spec)

    def _copy(self, spec: SwapSpec) -> None:
        copy = self._host.load if spec.is_load else self._host.store
        copy(spec.layer_idx, spec.blocks, self._hot[spec.layer_idx], spec.slots)

    def wait(self, job_ids: Iterable[int]) -> None:
        """Waits until these jobs have ended. Raises the error of a failed job.

        Afterwards, blocks that were swapped out may leave their hot slots.
        """
        jobs = [self._jobs.pop(job_id) for job_id in job_ids]
        wait_futures([job for _, job in jobs])
        for spec, job in jobs:
            if (
                not spec.is_load
                and (state := self._states.get((spec.sequence_id, spec.layer_idx))) is not None
            ):
                state.hot.swapped_out(spec.positions, job.exception() is None)
        for _, job in jobs:
            job.result()

    def close(self) -> None:
        """Waits for all copies."""
        self._copier.shutdown()
