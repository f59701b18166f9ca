"""Implements sparse offloading with the classes and names of vLLM's RFC #37263: host memory holds
every block of a context, and *hot slots* (blocks of device memory) hold the blocks to attend to. A
*host block* is a block's place in host memory; a *page* is the KV of a block in one layer.

- `SparseOffloadingManager` is for the scheduler. It selects the relevant blocks of a prefix, pins
  them while they are loaded, and allocates host blocks.
- `SparseOffloadingHandler` is for a worker. In each step it chooses the blocks to which each layer
  attends, and copies pages between host memory and hot slots.
- `BlockReprManager` (module `pool`) holds the sketches (compact forms of keys, by which
  blocks are selected) of host blocks.

These classes contain little code: selection and hot sets (the blocks of a context that are in hot
slots) are in `hotkv_sparse`. Host memory is an array of this process (`ArrayPages`) or memory of
hotkv-server (`ResidencyPages`).

Always true:
- Attention reads a block only from a hot slot that holds the block's bytes.
- A new block stays in its hot slot until its copy in host memory is complete.
- A host block becomes ready only with `complete_store`. A pinned host block is never freed.

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
from hotkv_sparse import HotSet, SparseConfig, span
from hotkv_sparse.config import COPY_METHODS
from hotkv_sparse.selection import estimated_log_mass, exact_log_mass, select_layer
from hotkv_vllm.residency.pages import PageCopier
from hotkv_vllm.sparse.pool import BlockReprManager, LayerShape

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]
NO_BLOCKS = np.empty(0, np.int32)


# ---------------------------------------------------------------------------------------- scheduler


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """The host blocks (places of blocks in host memory) to load. They stay pinned until the load
    ends.

    blocks: ids of the host blocks, int32.
    """

    blocks: I32


class SparseOffloadingManager:
    """Manages the blocks in host memory by their hash. Used by one thread.

    num_blocks: number of host blocks (places for blocks in host memory).
    block_tokens: tokens of a block.
    sketches: the sketches (compact forms of keys) of the host blocks.
    """

    def __init__(
        self,
        config: SparseConfig,
        num_blocks: int,
        block_tokens: int,
        sketches: BlockReprManager,
    ) -> None:
        self._config = config
        self._block_tokens = block_tokens
        self._reprs = sketches
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._is_ready = np.zeros(num_blocks, np.bool_)
        self._pins = np.zeros(num_blocks, np.int32)
        # For each block that is not ready: the number of stores that write it.
        self._num_stores = np.zeros(num_blocks, np.int32)
        self._free = list(range(num_blocks - 1, -1, -1))

    def __repr__(self) -> str:
        return (
            f"SparseOffloadingManager(ready {int(self._is_ready.sum())}, free "
            f"{len(self._free)}, pinned {int((self._pins > 0).sum())})"
        )

    def lookup_with_sparse(
        self, block_hashes: Sequence[bytes], query: F32, layer_idx: int
    ) -> tuple[I32, F32]:
        """Selects the blocks of a context that are most relevant to a query. Considers only the
        longest prefix of the context whose blocks are all ready in host memory. Returns
        (selected_blocks, scores).

        `selected_blocks` are the ids of host blocks, int32, in the order of the context. `scores`
        are their shares of the query's attention, float32; inf for a block that is always attended.
        All shares are estimates, because the keys are not available here.

        block_hashes: the hashes of the context's blocks.
        query: the step's query, float32 [query heads, channels].
        layer_idx: number of the layer; its sketches (compact forms of keys) are scored.
        """
        rows = self._ready_prefix(block_hashes)
        context_tokens = len(rows) * self._block_tokens
        if not len(rows):
            return NO_BLOCKS, np.empty(0, np.float32)
        always = rows[span(self._config, context_tokens, self._block_tokens).always]
        sources = self._reprs.sources(layer_idx)
        selection = select_layer(
            self._config,
            layer_idx,
            query,
            sources,
            rows,
            estimated_log_mass(query, sources, always),
            context_tokens,
            self._block_tokens,
        )
        return rows[selection.blocks], selection.weights

    def _ready_prefix(self, block_hashes: Sequence[bytes]) -> I32:
        blocks = (self._block_of.get(block_hash, -1) for block_hash in block_hashes)
        ready = itertools.takewhile(lambda block: block >= 0 and self._is_ready[block], blocks)
        return np.fromiter(ready, np.int32)

    def prepare_sparse_load(self, selected_blocks: I32) -> LoadSpec:
        """Pins host blocks until `complete_load`. Raises HotKVError (INVALID_FIELD) if a block is
        not ready."""
        if not self._is_ready[selected_blocks].all():
            raise HotKVError(
                Reason.INVALID_FIELD,
                "selected_blocks include some that are not ready; pass those of lookup_with_sparse",
            )
        np.add.at(self._pins, selected_blocks, 1)
        return LoadSpec(selected_blocks)

    def complete_load(self, selected_blocks: I32) -> None:
        """Unpins host blocks whose load has ended or will not take place. Raises HotKVError
        (INVALID_FIELD) if a block is not pinned."""
        if not (self._pins[selected_blocks] > 0).all():
            raise HotKVError(
                Reason.INVALID_FIELD,
                "selected_blocks include some that are not pinned; call complete_load once for "
                "each load",
            )
        np.subtract.at(self._pins, selected_blocks, 1)

    def prepare_store(self, block_hashes: Sequence[bytes]) -> I32:
        """Allocates a host block for each hash that has no host block yet. Returns the id of each
        hash's host block, int32. New blocks become ready with `complete_store`. Raises HotKVError
        (OVERLOADED) if too few blocks are free."""
        fresh = [one for one in dict.fromkeys(block_hashes) if one not in self._block_of]
        if len(fresh) > len(self._free):
            raise HotKVError(
                Reason.OVERLOADED,
                f"{len(fresh)} new blocks, {len(self._free)} free in host memory; give it more "
                "blocks",
            )
        for block_hash in fresh:
            block = self._free.pop()
            self._block_of[block_hash], self._hash_of[block] = block, block_hash
        blocks = np.array([self._block_of[block_hash] for block_hash in block_hashes], np.int32)
        self._num_stores[np.unique(blocks[~self._is_ready[blocks]])] += 1
        return blocks

    def complete_store(self, new_blocks: I32, success: bool = True) -> None:
        """Ends a store. Marks the host blocks `new_blocks` as ready. If the store failed (`success`
        is False), frees the blocks among them that are not ready and that no other store writes.
        Raises HotKVError (INVALID_FIELD) if a block was not allocated."""
        for block in new_blocks.tolist():
            if block not in self._hash_of:
                raise HotKVError(
                    Reason.INVALID_FIELD,
                    f"block {block} was not reserved; pass blocks of prepare_store",
                )
        if success:
            self._is_ready[new_blocks], self._num_stores[new_blocks] = True, 0
            return
        waiting = np.unique(new_blocks[~self._is_ready[new_blocks]])
        self._num_stores[waiting] -= 1
        for block in waiting[self._num_stores[waiting] <= 0].tolist():
            del self._block_of[self._hash_of.pop(block)]
            self._free.append(block)


# -------------------------------------------------------------------------------------- host memory


class HostPages(Protocol):
    """Host memory for pages (a page is the KV of a block in one layer), by layer and host block (a
    block's place in host memory). Used by one thread at a time."""

    def read(self, layer_idx: int, blocks: I32) -> U8:
        """Returns a copy of the layer's pages of `blocks`, uint8 [n, page bytes].

        blocks: ids of host blocks, [n]. Their pages of the layer must have been stored before.
        """
        ...

    def load(self, layer_idx: int, blocks: I32, hot: U8, slots: I32) -> None:
        """Copies the layer's pages of `blocks` [n] from host memory to hot slots (blocks of device
        memory).

        hot: the layer's hot slots, uint8 [slots, page bytes].
        slots: the hot slot for each block [n].
        """
        ...

    def store(self, layer_idx: int, blocks: I32, hot: U8, slots: I32) -> None:
        """Copies the layer's pages from hot slots (blocks of device memory) to the host blocks
        `blocks` [n]. Raises HotKVError if the pages can't be stored.

        hot: the layer's hot slots, uint8 [slots, page bytes].
        slots: the hot slot for each block [n].
        """
        ...


class ArrayPages:
    """Holds pages in an array of this process.

    pages: uint8 [layers, blocks, page bytes], contiguous.
    copy_method: how pages are copied. `memcpy`: one copy for consecutive pages that are consecutive
        in both arrays. `batch`: one call of numpy for all pages. `kernel` and `auto`: the compiled
        loop of `PageCopier`.
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
        """Copies pages: row `sources[i]` of the array `source` to row `destinations[i]` of the
        array `destination`. Raises HotKVError (INVALID_FIELD) unless both arrays are contiguous
        uint8 [blocks, page bytes] and have these rows."""
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
    """A block in the staging memory, where it waits until it is stored in the server: all layers
    must provide their page of the block first.

    place: the block's index in the staging memory.
    layers: indices of the layers that have provided their page.
    """

    place: int
    layers: set[int] = field(default_factory=set)


class ResidencyPages:
    """Holds pages (a page is the KV of a block in one layer) in hotkv-server. Each sequence
    (decoding request) has a *residency*: the server's record of the sequence's reserved room and
    pinned blocks. A block is stored in the server once all layers have provided their page of the
    block. Pages are read from the mapped arena, without a call. A read raises HotKVError if the
    server no longer pins the block.

    memory: staging memory in which blocks wait for their store, uint8 [layers, blocks, page bytes].
        `session` must have registered it.
    layers: the indices of the layers, in the order of `memory`. A slot of the server has the pages
        in the same order.
    timeout_s: longest wait for an answer of the server.
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
        # By host block (place in host memory), and then by sequence that has the block: the block's
        # position in the sequence, and its hash.
        self._names: dict[int, dict[str, tuple[int, bytes]]] = {}
        # By host block, and then by sequence for which the server has pinned the block: the offset
        # of the block's slot in the arena.
        self._offsets: dict[int, dict[str, int]] = {}
        self._staged: dict[int, _Staged] = {}
        self._free = list(range(memory.shape[1] - 1, -1, -1))
        self._num_stores = 0

    def __repr__(self) -> str:
        return f"ResidencyPages({len(self._offsets)} blocks pinned, {len(self._staged)} staged)"

    # ------------------------------------------------------------------------------------ sequences

    def open(self, sequence_id: str, num_blocks: int) -> None:
        """Opens a sequence's residency (the server's record of the sequence): reserves room in the
        server for `num_blocks`, the largest number of blocks that the sequence may ever have. Waits
        for the server's answer, at most `timeout_s`. Raises HotKVError if the server has no
        room."""
        answer = self._session.open_residency(sequence_id, {0: num_blocks})
        self._opened[sequence_id] = answer.result(self._timeout_s)

    def close(self, sequence_id: str) -> None:
        """Closes the sequence's residency (the server's record of its reserved room and pinned
        blocks), so that the server may evict its blocks."""
        del self._opened[sequence_id]
        self._session.close_residency(sequence_id)
        for block in [block for block, names in self._names.items() if sequence_id in names]:
            del self._names[block][sequence_id]
            self._offsets.get(block, {}).pop(sequence_id, None)
            if not self._names[block]:
                self._forget(block)
            elif self._offsets.get(block):
                self._unstage(block)

    def _forget(self, block: int) -> None:
        """Forgets the sequences and hashes that `name` has assigned to a host block, and where its
        pages are."""
        self._names.pop(block, None)
        self._offsets.pop(block, None)
        self._unstage(block)

    def _unstage(self, block: int) -> None:
        if (staged := self._staged.pop(block, None)) is not None:
            self._free.append(staged.place)

    def name(self, sequence_id: str, first: int, hashes: Sequence[bytes], blocks: I32) -> None:
        """Assigns host blocks to consecutive positions of a sequence, with the hashes under which
        the server will store them. If a host block had another hash before, its pages are
        forgotten.

        first: position of the first of these blocks in the sequence.
        hashes, blocks: for each position, the hash and the id of the host block.
        """
        for place, (block_hash, block) in enumerate(
            zip(hashes, blocks.tolist(), strict=True), first
        ):
            if any(other != block_hash for _, other in self._names.get(block, {}).values()):
                self._forget(block)
            names = self._names.setdefault(block, {})
            # Puts the sequence at the end of the dict: `store` stores a block for the sequence that
            # comes last.
            names.pop(sequence_id, None)
            names[sequence_id] = place, block_hash

    def _last_name(self, block: int) -> tuple[str, int, bytes]:
        """Returns what `name` has last assigned to a host block, for the block's store: a sequence,
        the block's position in the sequence, and its hash."""
        sequence_id, (place, block_hash) = next(reversed(self._names[block].items()))
        return sequence_id, place, block_hash

    # ---------------------------------------------------------------------------------------- pages

    def read(self, layer_idx: int, blocks: I32) -> U8:
        pages = np.empty((len(blocks), self._memory.shape[2]), np.uint8)
        self.load(layer_idx, blocks, pages, np.arange(len(blocks), dtype=np.int32))
        return pages

    def load(self, layer_idx: int, blocks: I32, hot: U8, slots: I32) -> None:
        source = np.array([self._address(layer_idx, block) for block in blocks.tolist()], np.int64)
        page_bytes = self._memory.shape[2]
        self._copier.copy(hot.ctypes.data + slots.astype(np.int64) * page_bytes, source, page_bytes)
        # Tests the pins after the copies: the copied bytes are valid only if the blocks are still
        # pinned.
        pinned_for = (self._offsets.get(block) or self._names[block] for block in blocks.tolist())
        for sequence_id in {next(iter(names)) for names in pinned_for}:
            if not self._arena.holds(self._opened[sequence_id]):
                raise HotKVError(
                    Reason.UNKNOWN_RESIDENCY,
                    f"the server no longer keeps blocks of {sequence_id}; compute it anew",
                )

    def _address(self, layer_idx: int, block: int) -> int:
        place, page_bytes = self._place_of[layer_idx], self._memory.shape[2]
        staged = self._staged.get(block)
        if staged is not None and layer_idx in staged.layers:
            return int(self._memory[place, staged.place].ctypes.data)
        offset = next(iter(self._offsets[block].values()))
        return int(self._arena.memory.ctypes.data) + offset + place * page_bytes

    def store(self, layer_idx: int, blocks: I32, hot: U8, slots: I32) -> None:
        # Skip blocks that the server has already pinned for their sequence: an earlier call may
        # have stored them before it raised. The pages of their other layers are then no longer in
        # the staging memory, so they could not be stored again. Don't skip blocks that are pinned
        # only for another sequence, so that they are pinned for this sequence too.
        is_pinned = [
            self._last_name(block)[0] in self._offsets.get(block, {}) for block in blocks.tolist()
        ]
        blocks, slots = (part[np.logical_not(is_pinned)] for part in (blocks, slots))
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
        # Blocks that are neighbours in a sequence are stored together.
        for _, run in itertools.groupby(
            enumerate(sorted(complete, key=lambda block: self._last_name(block)[:2])),
            lambda one: (self._last_name(one[1])[0], self._last_name(one[1])[1] - one[0]),
        ):
            self._send([block for _, block in run])

    def _send(self, blocks: list[int]) -> None:
        """Stores consecutive blocks of a sequence in the server, and records where the server has
        pinned them. Waits for the server's answers, each for at most `timeout_s`. Raises HotKVError
        if the server has not stored the blocks, TimeoutError without an answer. If the store fails
        or its answer is late, it is revoked, so that the caller may change the pages after this
        call."""
        sequence_id, first, _ = self._last_name(blocks[0])
        names = [self._last_name(block)[2] for block in blocks]
        places = np.array([self._staged[block].place for block in blocks], np.int32)
        self._num_stores += 1
        call, runs = f"{sequence_id}-{self._num_stores}", [BlockRun(0, names, places, depth=first)]
        stored = self._session.store(
            call, call, runs, self._timeout_s, StoreOptions(residency_id=sequence_id)
        )
        try:
            stored.result(self._timeout_s)
        except BaseException:
            # Cancels the store. Otherwise the server could read the pages later, when the staging
            # memory has other blocks in their place.
            self._session.cancel(call)
            raise
        pinned = self._session.extend_residency(sequence_id, 0, first, names)
        offsets = pinned.result(self._timeout_s).offsets.tolist()
        for block, offset in zip(blocks, offsets, strict=True):
            if offset < 0:
                raise HotKVError(
                    Reason.UNKNOWN_RESIDENCY,
                    f"the server has not stored blocks of {sequence_id}; store them again",
                )
            self._offsets.setdefault(block, {})[sequence_id] = offset
            self._free.append(self._staged.pop(block).place)


# ------------------------------------------------------------------------------------------- worker


@dataclass(frozen=True, slots=True)
class SwapSpec:
    """The copies of pages that a step needs for a sequence in a layer, between host memory and hot
    slots (blocks of device memory). Copy i is between host block `blocks[i]` and hot slot
    `slots[i]`.

    positions: position of each block in the context, int32 [copies].
    blocks: id of each host block, int32 [copies].
    slots: index of each hot slot, int32 [copies].
    is_load: True copies to the hot slots, False to host memory.
    """

    sequence_id: str
    layer_idx: int
    positions: I32
    blocks: I32
    slots: I32
    is_load: bool


@dataclass(frozen=True, slots=True)
class DecodeMetadata:
    """The blocks of a sequence in a layer, as argument and result of `handle_layer`.

    block_table: in the argument: ids of the host blocks of the whole context, int32, in order. In
        the result: indices of the hot slots (blocks of device memory) with the blocks to attend to,
        int32, in the order of the context.
    seq_len: number of tokens in these blocks; the last block may be partial.
    """

    sequence_id: str
    block_table: I32
    seq_len: int


@dataclass(slots=True)
class _LayerState:
    """The state of a sequence in a layer.

    hot: the sequence's hot set in the layer (its blocks that are in hot slots).
    has_begun: True after the sequence's first step in the layer.
    pending: positions of complete blocks that are only in hot slots, int32. The next step's result
        requests their copies to host memory.
    """

    hot: HotSet
    has_begun: bool = False
    pending: I32 = field(default_factory=lambda: NO_BLOCKS)


class SparseOffloadingHandler:
    """Manages the hot slots (blocks of device memory, with the blocks to attend to) of every layer,
    and the copies between hot slots and host memory. Each sequence (decoding request) has its own
    region of hot slots.

    Decisions are made in the caller's thread. Copies and reads of host memory run in a thread of
    the handler, in the order in which they were submitted.

    layers: by layer index, the shape of the layer's keys.
    slots_per_sequence: number of hot slots in a region. It limits how many blocks of a sequence can
        be in hot slots of a layer.
    host: the pages of all blocks, in host memory.
    hot: the hot slots, uint8 [layers, slots, page bytes].
    keys_of: takes pages, uint8 [n, page bytes], and returns the unpacked keys in these pages,
        float32 [n, tokens, KV heads, channels].
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
                f"slots_per_sequence is {slots_per_sequence}; there are {hot.shape[1]} hot "
                "slots, use no more",
            )
        self._config = config
        self._layers = dict(layers)
        self._slots = slots_per_sequence
        self._host, self._hot = host, hot
        self._keys_of = keys_of
        self.sketches = BlockReprManager(
            layers, {index: partial(self._host_keys, index) for index in layers}
        )
        self._regions = list(range(hot.shape[1] // slots_per_sequence - 1, -1, -1))
        self._region_of: dict[str, int] = {}
        self._states: dict[tuple[str, int], _LayerState] = {}
        self._jobs: dict[int, tuple[SwapSpec, Future[None]]] = {}
        self._copier = ThreadPoolExecutor(1, "hotkv-swap")
        # Starts the pool's thread now. If the operating system refused the thread only at the first
        # copy, the pool would keep this copy and execute it later.
        self._copier.submit(lambda: None).result()

    def __repr__(self) -> str:
        return (
            f"SparseOffloadingHandler(sequences {len(self._region_of)}, layers "
            f"{len(self._states)}, jobs {len(self._jobs)})"
        )

    # ------------------------------------------------------------------------------------ sequences

    def begin(self, sequence_id: str) -> None:
        """Begins a sequence whose complete blocks are all in host memory. Raises HotKVError
        (OVERLOADED) if all regions of hot slots (blocks of device memory) are in use."""
        if not self._regions:
            raise HotKVError(
                Reason.OVERLOADED,
                f"all {len(self._region_of)} regions of hot slots are taken; end a sequence first",
            )
        self._region_of[sequence_id] = self._regions.pop()

    def end(self, sequence_id: str) -> None:
        """Ends a sequence and frees its region of hot slots (blocks of device memory). All copies
        of the sequence must have ended before (`wait`)."""
        self._regions.append(self._region_of.pop(sequence_id))
        for owner in [owner for owner in self._states if owner[0] == sequence_id]:
            del self._states[owner]

    def extend(self, sequence_id: str, layer_idx: int, seq_len: int) -> int:
        """Extends a sequence's context in a layer to `seq_len` tokens. Returns the index of the hot
        slot (block of device memory) of the context's last block, into which the step writes. Must
        be called before the step writes its keys."""
        block_tokens = self._layers[layer_idx].block_tokens
        where = span(self._config, seq_len, block_tokens)
        state = self._states.get((sequence_id, layer_idx))
        # The last block counts as incomplete even if this step fills it, because its keys are not
        # written yet.
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
        """Returns, for blocks of the hot set (the blocks that are on the device), the indices of
        their hot slots (blocks of device memory), int32.

        positions: positions of the blocks in the context.
        """
        present = hot.map()
        slots: I32 = present.slots[np.searchsorted(present.blocks, positions)] + np.int32(
            self._region_of[sequence_id] * self._slots
        )
        return slots

    # ---------------------------------------------------------------------------------------- steps

    def handle_layer(
        self, attn_metadata: DecodeMetadata, layer_idx: int, query: F32
    ) -> tuple[DecodeMetadata, SwapSpec, SwapSpec]:
        """Chooses the blocks that a sequence's step attends to in a layer. Returns
        (new_attn_metadata, swap_in_spec, swap_out_spec): the hot slots to attend to, the copies
        from host memory that this needs, and copies to host memory.

        The caller must carry out the swap-in, then attend with the new metadata, then carry out the
        swap-out. The first step of a sequence loads all blocks that it selects; every later step
        loads at most `max_correction_blocks` blocks.

        attn_metadata: the host blocks and the length of the whole context.
        query: the step's query, float32 [query heads, channels].
        """
        sequence_id, table, seq_len = (
            attn_metadata.sequence_id,
            attn_metadata.block_table,
            attn_metadata.seq_len,
        )
        state = self._states[sequence_id, layer_idx]
        hot, shape = state.hot, self._layers[layer_idx]
        log_mass = self._always_log_mass(attn_metadata, layer_idx, query)
        sources = self.sketches.sources(layer_idx)
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
        """Returns how much attention the blocks that are always attended get: the log of the sum of
        exp(q · k * scale) over their tokens, float32 [query heads]. Reads their keys from hot slots
        (blocks of device memory), or from host memory for blocks that are not in a hot slot."""
        hot, block_tokens = (
            self._states[metadata.sequence_id, layer_idx].hot,
            self._layers[layer_idx].block_tokens,
        )
        always = hot.span.always
        resident = np.isin(always, hot.map().blocks)
        pages = np.empty((len(always), self._hot.shape[2]), np.uint8)
        if not resident.all():
            pages[~resident] = self._read(layer_idx, metadata.block_table[always[~resident]])
        pages[resident] = self._hot[
            layer_idx, self._slots_of(metadata.sequence_id, hot, always[resident])
        ]
        keys = self._keys_of(pages)
        keys_RHD = keys.reshape(-1, *keys.shape[2:])
        excess = hot.span.count * block_tokens - metadata.seq_len
        return exact_log_mass(query, keys_RHD[: len(keys_RHD) - excess])

    def _host_keys(self, layer_idx: int, blocks: I32) -> F32:
        """Returns the unpacked keys of host blocks in one layer, float32
        [blocks, tokens, KV heads, channels]."""
        return self._keys_of(self._read(layer_idx, blocks))

    def _read(self, layer_idx: int, blocks: I32) -> U8:
        """Returns the pages of host blocks in a layer. They are read in the handler's thread, after
        the copies that were submitted earlier, because these copies may write the same blocks."""
        return self._copier.submit(self._host.read, layer_idx, blocks).result()

    # --------------------------------------------------------------------------------------- copies

    def transfer_async(self, job_id: int, spec: SwapSpec) -> None:
        """Begins the copies of `spec` (between host memory and hot slots) in the handler's thread.
        Raises HotKVError (INVALID_FIELD) if `job_id` is in use."""
        if job_id in self._jobs:
            raise HotKVError(
                Reason.INVALID_FIELD, f"job_id {job_id} is in use; wait for it, or choose another"
            )
        self._jobs[job_id] = spec, self._copier.submit(self._copy, spec)

    def _copy(self, spec: SwapSpec) -> None:
        copy = self._host.load if spec.is_load else self._host.store
        copy(spec.layer_idx, spec.blocks, self._hot[spec.layer_idx], spec.slots)

    def wait(self, job_ids: Iterable[int]) -> None:
        """Waits until the jobs (copies begun by `transfer_async`) have ended, and raises the error
        of a failed job. From then on, hot slots of blocks that were copied to host memory may be
        reused. Blocks whose load failed have no hot slot any more; a later step loads them again.
        Raises HotKVError (INVALID_FIELD), and waits for no job, if a job is unknown.
        """
        names = dict.fromkeys(job_ids)
        for job_id in names.keys() - self._jobs.keys():
            raise HotKVError(
                Reason.INVALID_FIELD, f"job_id {job_id} is unknown; wait once for each job"
            )
        jobs = [self._jobs.pop(job_id) for job_id in names]
        wait_futures([job for _, job in jobs])
        for spec, job in jobs:
            state = self._states.get((spec.sequence_id, spec.layer_idx))
            if state is not None and not spec.is_load:
                state.hot.swapped_out(spec.positions, job.exception() is None)
            elif state is not None and job.exception() is not None:
                state.hot.forget(spec.positions)
        for _, job in jobs:
            job.result()

    def close(self) -> None:
        """Waits for all copies and ends the handler's thread."""
        self._copier.shutdown()
