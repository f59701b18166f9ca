"""Where sparse offloading keeps the pages of all blocks: an array of this process, or a residency
of hotkv-server.

Shapes: L layers, n blocks of one call, S blocks of the staging memory.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hotkv.errors import HotKVError, Reason
from hotkv_client import BlockRun, ResidencyOpened, Session
from hotkv_vllm.sparse.page_copies import PageCopier
from hotkv_vllm.sparse.swaps import copy_blocks

I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]


class HostPages(Protocol):
    """Pages by layer and host block. One thread at a time."""

    def read(self, layer_idx: int, blocks: I32) -> U8:
        """Pages uint8 [n, page bytes] of blocks that are stored."""
        ...

    def load(self, layer_idx: int, blocks: I32, hot: U8, slots: I32) -> None:
        """Copies pages of blocks [n] to `hot` uint8 [slots, page bytes]."""
        ...

    def store(self, layer_idx: int, blocks: I32, hot: U8, slots: I32) -> None:
        """Copies pages of `hot` to blocks [n]. Raises what keeps them from being stored."""
        ...


class ArrayPages:
    """Host memory of this process. `pages`: uint8 [L, blocks, page bytes]; `copy_method`: as
    `SparseConfig.copy_method`."""

    def __init__(self, pages: U8, copy_method: str = "auto") -> None:
        self._pages = pages
        self._copy_method = copy_method

    def __repr__(self) -> str:
        return f"ArrayPages({self._pages.shape})"

    def read(self, layer_idx: int, blocks: I32) -> U8:
        pages: U8 = self._pages[layer_idx, blocks]
        return pages

    def load(self, layer_idx: int, blocks: I32, hot: U8, slots: I32) -> None:
        copy_blocks(self._pages[layer_idx], hot, blocks, slots, self._copy_method)

    def store(self, layer_idx: int, blocks: I32, hot: U8, slots: I32) -> None:
        copy_blocks(hot, self._pages[layer_idx], slots, blocks, self._copy_method)


@dataclass(slots=True)
class _Staged:
    """A block on its way to the server: its place in the staging memory, and the layers that are
    there."""

    place: int
    layers: set[int] = field(default_factory=set)


class ResidencyPages:
    """A residency of hotkv-server: pages are read where the server's arena is mapped, without a
    call; a block is stored once all layers have given their page of it, and read from then on only
    as long as the server pins it.

    `memory` uint8 [L, S, page bytes]: the engine's memory that `session` has registered, in which
    blocks wait for their store; a server's slot has the pages of a block's layers in this order.
    `layers`: indices of layers, in that order.
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
        server has none."""
        answer = self._session.open_residency(sequence_id, {0: num_blocks})
        self._opened[sequence_id] = answer.result(self._timeout_s)

    def close(self, sequence_id: str) -> None:
        """The server may forget the sequence's blocks."""
        del self._opened[sequence_id]
        self._session.close_residency(sequence_id)
        for block in [block for block, name in self._names.items() if name[0] == sequence_id]:
            del self._names[block]
            self._offsets.pop(block, None)

    def name(self, sequence_id: str, first: int, hashes: Sequence[bytes], blocks: I32) -> None:
        """These host blocks are the sequence's from its block `first` on, by these names."""
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
        """Stores neighbours into their residency, and takes in where the server pins them."""
        sequence_id, first, _ = self._names[blocks[0]]
        names = [self._names[block][2] for block in blocks]
        places = np.array([self._staged[block].place for block in blocks], np.int32)
        self._num_stores += 1
        call, runs = f"{sequence_id}-{self._num_stores}", [BlockRun(0, names, places, depth=first)]
        stored = self._session.store(call, call, runs, self._timeout_s, residency_id=sequence_id)
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
