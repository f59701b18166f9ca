"""Sparse offloading with the classes and names of vLLM's RFC #37263. Host memory holds every block
of a context, at a *host block*; hot slots hold the blocks to attend to.

- `SparseOffloadingManager`, for the scheduler, selects, pins and allocates host blocks.
- `SparseOffloadingHandler`, for a worker, chooses the blocks of each step and layer, and copies
  pages.
- `BlockReprManager` (module `pool`) holds the sketches of host blocks.

Host memory is an array of this process (`ArrayPages`) or memory of the server (`ResidencyPages`).

Always true:
- Attention reads a block only from a hot slot that holds its bytes.
- A new block stays in its hot slot until its copy in host memory is complete.
- A host block becomes ready only with `complete_store`. A pinned one is never freed.

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
from hotkv_sparse.vllm.cpu.pool import BlockReprManager, LayerShape
from hotkv_sparse.vllm.cpu.swap import PageCopier

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]
NO_BLOCKS = np.empty(0, np.int32)


# ---------------------------------------------------------------------------------------- scheduler


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Host blocks to load, int32, pinned until the load ends."""

    blocks: I32


class SparseOffloadingManager:
    """By block hash. Used by one thread."""

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
        # Stores that write each block that is not ready.
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
        """Selects from the longest prefix that is ready in host memory. Returns (selected_blocks,
        scores): host blocks, int32, in the context's order; and their estimated masses, float32,
        inf for a block that is always attended.

        query: float32 [query heads, channels].
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
        """Pins host blocks until `complete_load`. Raises INVALID_FIELD if one is not ready."""
        if not self._is_ready[selected_blocks].all():
            raise HotKVError(
                Reason.INVALID_FIELD,
                "selected_blocks include some that are not ready; pass those of lookup_with_sparse",
            )
        np.add.at(self._pins, selected_blocks, 1)
        return LoadSpec(selected_blocks)

    def complete_load(self, selected_blocks: I32) -> None:
        """The load has ended or will not take place. Raises INVALID_FIELD if a block is not
        pinned."""
        if not (self._pins[selected_blocks] > 0).all():
            raise HotKVError(
                Reason.INVALID_FIELD,
                "selected_blocks include some that are not pinned; call complete_load once for "
                "each load",
            )
        np.subtract.at(self._pins, selected_blocks, 1)

    def prepare_store(self, block_hashes: Sequence[bytes]) -> I32:
        """Host blocks, int32, allocated if new. Raises OVERLOADED if too few are free."""
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
        """Marks blocks as ready; after a failure frees those that are not ready and that no
        other store writes. Raises INVALID_FIELD if one was not allocated."""
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
    """Used by one thread at a time. `hot` is uint8 [slots, page bytes]."""

    def read(self, layer_idx: int, blocks: I32) -> U8:
        """Copies, uint8 [n, page bytes]."""
        ...

    def load(self, layer_idx: int, blocks: I32, hot: U8, slots: I32) -> None:
        """Copies from host blocks [n] to hot slots [n]."""
        ...

    def store(self, layer_idx: int, blocks: I32, hot: U8, slots: I32) -> None:
        """Copies from hot slots [n] to host blocks [n]. Raises HotKVError if the pages can't be
        stored."""
        ...


class ArrayPages:
    """Host memory in an array of this process.

    pages: uint8 [layers, blocks, page bytes], contiguous.
    copy_method: `memcpy`: one copy for pages that are consecutive in both arrays; `batch`: one
        call of numpy; `kernel` and `auto`: the compiled loop of `PageCopier`.
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
        """Raises INVALID_FIELD unless both arrays are contiguous uint8 [blocks, page bytes] and
        have these rows."""
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
    """A block that waits until all layers have provided their page.

    place: in the staging memory.
    layers: that have provided their page.
    """

    place: int
    layers: set[int] = field(default_factory=set)


class ResidencyPages:
    """In the server, with a residency per sequence. A block is stored once all layers have provided
    their page. Reads come from the mapped arena, without a call, and raise HotKVError if the server
    no longer pins the block.

    memory: staging memory, uint8 [layers, blocks, page bytes], registered by `session`.
    layers: in the order of `memory` and of a slot.
    timeout_s: for an answer.
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
        # By host block and sequence: position in the sequence, hash.
        self._names: dict[int, dict[str, tuple[int, bytes]]] = {}
        # By host block and sequence for which it is pinned: offset of its slot in the arena.
        self._offsets: dict[int, dict[str, int]] = {}
        self._staged: dict[int, _Staged] = {}
        self._free = list(range(memory.shape[1] - 1, -1, -1))
        self._num_stores = 0

    def __repr__(self) -> str:
        return f"ResidencyPages({len(self._offsets)} blocks pinned, {len(self._staged)} staged)"

    # ------------------------------------------------------------------------------------ sequences

    def open(self, sequence_id: str, num_blocks: int) -> None:
        """Reserves room for the most blocks that the sequence may ever have. Waits at most
        `timeout_s`. Raises HotKVError without room."""
        answer = self._session.open_residency(sequence_id, {0: num_blocks})
        self._opened[sequence_id] = answer.result(self._timeout_s)

    def close(self, sequence_id: str) -> None:
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
        self._names.pop(block, None)
        self._offsets.pop(block, None)
        self._unstage(block)

    def _unstage(self, block: int) -> None:
        if (staged := self._staged.pop(block, None)) is not None:
            self._free.append(staged.place)

    def name(self, sequence_id: str, first: int, hashes: Sequence[bytes], blocks: I32) -> None:
        """Assigns host blocks to consecutive positions of a sequence, with their hashes in the
        server. A host block that had another hash loses its pages."""
        for place, (block_hash, block) in enumerate(
            zip(hashes, blocks.tolist(), strict=True), first
        ):
            if any(other != block_hash for _, other in self._names.get(block, {}).values()):
                self._forget(block)
            names = self._names.setdefault(block, {})
            # `store` stores a block for the sequence that comes last.
            names.pop(sequence_id, None)
            names[sequence_id] = place, block_hash

    def _last_name(self, block: int) -> tuple[str, int, bytes]:
        """Sequence, position and hash for the block's store."""
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
        # Tested after the copies, which are valid only if the blocks are still pinned.
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
        # Skip blocks that are pinned for their sequence: an earlier call may have stored them
        # before it raised, and the pages of their other layers are no longer staged. Blocks that
        # are pinned only for another sequence must be pinned for this one too.
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
        # Neighbours in a sequence are stored together.
        for _, run in itertools.groupby(
            enumerate(sorted(complete, key=lambda block: self._last_name(block)[:2])),
            lambda one: (self._last_name(one[1])[0], self._last_name(one[1])[1] - one[0]),
        ):
            self._send([block for _, block in run])

    def _send(self, blocks: list[int]) -> None:
        """Stores consecutive blocks of a sequence and records where they are pinned. Waits at
        most `timeout_s` for each answer. Raises HotKVError or TimeoutError; the store is then
        revoked, so that the pages may change."""
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
            # Otherwise the server could read the pages when other blocks have taken their place.
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
    """Copies between host block `blocks[i]` and hot slot `slots[i]`, int32 [copies].

    is_load: True copies to the hot slots.
    """

    sequence_id: str
    layer_idx: int
    positions: I32
    blocks: I32
    slots: I32
    is_load: bool


@dataclass(frozen=True, slots=True)
class DecodeMetadata:
    """The blocks of a sequence in a layer.

    block_table: int32, in the context's order: as argument of `handle_layer` host blocks of the
        whole context, in its result the hot slots to attend to.
    seq_len: tokens in these blocks; the last may be partial.
    """

    sequence_id: str
    block_table: I32
    seq_len: int


@dataclass(slots=True)
class _LayerState:
    """pending: complete blocks that are only in hot slots, int32: the next step requests their
    copies to host memory."""

    hot: HotSet
    has_begun: bool = False
    pending: I32 = field(default_factory=lambda: NO_BLOCKS)


class SparseOffloadingHandler:
    """Manages the hot slots of every layer, with a region per sequence. The caller's thread
    decides; copies and reads of host memory run in one thread, in the order of submission.

    slots_per_sequence: of a region.
    hot: uint8 [layers, slots, page bytes].
    keys_of: pages, uint8 [n, page bytes], to keys, float32 [n, tokens, KV heads, channels].
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
        # Starts the thread now: if the operating system refused it at the first copy, the pool
        # would keep this copy and execute it later.
        self._copier.submit(lambda: None).result()

    def __repr__(self) -> str:
        return (
            f"SparseOffloadingHandler(sequences {len(self._region_of)}, layers "
            f"{len(self._states)}, jobs {len(self._jobs)})"
        )

    # ------------------------------------------------------------------------------------ sequences

    def begin(self, sequence_id: str) -> None:
        """All complete blocks must be in host memory. Raises OVERLOADED if all regions are in
        use."""
        if not self._regions:
            raise HotKVError(
                Reason.OVERLOADED,
                f"all {len(self._region_of)} regions of hot slots are taken; end a sequence first",
            )
        self._region_of[sequence_id] = self._regions.pop()

    def end(self, sequence_id: str) -> None:
        """All copies of the sequence must have ended (`wait`)."""
        self._regions.append(self._region_of.pop(sequence_id))
        for owner in [owner for owner in self._states if owner[0] == sequence_id]:
            del self._states[owner]

    def extend(self, sequence_id: str, layer_idx: int, seq_len: int) -> int:
        """Must be called before the step writes its keys. Returns the hot slot of the last
        block, into which it writes."""
        block_tokens = self._layers[layer_idx].block_tokens
        where = span(self._config, seq_len, block_tokens)
        state = self._states.get((sequence_id, layer_idx))
        # Incomplete even if this step fills it: its keys are not written yet.
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
        """Hot slots of blocks of the hot set, int32."""
        present = hot.map()
        slots: I32 = present.slots[np.searchsorted(present.blocks, positions)] + np.int32(
            self._region_of[sequence_id] * self._slots
        )
        return slots

    # ---------------------------------------------------------------------------------------- steps

    def handle_layer(
        self, attn_metadata: DecodeMetadata, layer_idx: int, query: F32
    ) -> tuple[DecodeMetadata, SwapSpec, SwapSpec]:
        """Returns (new_attn_metadata, swap_in_spec, swap_out_spec). The caller must carry out the
        swap-in, attend with the new metadata, then carry out the swap-out. The first step loads all
        selected blocks; later ones at most `max_correction_blocks`.

        query: float32 [query heads, channels].
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
        """float32 [query heads], with keys from hot slots if they are there, else from host
        memory."""
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
        """float32 [blocks, tokens, KV heads, channels]."""
        return self._keys_of(self._read(layer_idx, blocks))

    def _read(self, layer_idx: int, blocks: I32) -> U8:
        """Reads in the handler's thread, after the copies submitted earlier, which may write the
        same blocks."""
        return self._copier.submit(self._host.read, layer_idx, blocks).result()

    # --------------------------------------------------------------------------------------- copies

    def transfer_async(self, job_id: int, spec: SwapSpec) -> None:
        """Raises INVALID_FIELD if `job_id` is in use."""
        if job_id in self._jobs:
            raise HotKVError(
                Reason.INVALID_FIELD, f"job_id {job_id} is in use; wait for it, or choose another"
            )
        self._jobs[job_id] = spec, self._copier.submit(self._copy, spec)

    def _copy(self, spec: SwapSpec) -> None:
        copy = self._host.load if spec.is_load else self._host.store
        copy(spec.layer_idx, spec.blocks, self._hot[spec.layer_idx], spec.slots)

    def wait(self, job_ids: Iterable[int]) -> None:
        """Raises the error of a failed job. Hot slots of blocks copied to host memory may then
        be reused; blocks whose load failed have none, and are loaded again later. Raises
        INVALID_FIELD at once if a job is unknown."""
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
        """Waits for all copies."""
        self._copier.shutdown()
