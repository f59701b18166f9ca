"""Copies pages for a step over contexts whose old blocks are only in the server's arena: from the
mapped arena into hot slots (blocks of the device's pool for selected blocks), and the pages of a
whole batch into a staging area.

`SlotPlaces` locates the bytes of one rank. A slot of the arena holds a block: the shards of all
ranks in order. A shard of a block holds the pages of the group's layers in vLLM's order. A shard of
a representation (a compact form of the block's keys) holds all sparse layers in the model's order,
each with its formats in the order of the configuration (`sparse.shared`).

Always true:
- A page that only the server has is copied from the address that the server named. Otherwise
  LostBytesError is raised.
- A sequence whose bytes were read from the arena is marked (`has_read`), so that its pins are
  checked afterwards.
- Pages that were staged ahead are used only for the same layer and the same slots.
- A staging area that attention reads is not written.
"""

import ctypes
import itertools
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hotkv_proto import native
from hotkv_vllm.residency.sequences import ResidentSequence
from hotkv_vllm.sparse.batch import SparseLayer

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
Positions = npt.NDArray[np.integer[Any]]
AREAS = 2
"""Number of staging areas."""
MAX_THREADS = 4
BYTES_PER_THREAD = 1 << 20
"""A copy uses one more thread for every so many bytes, up to the number of threads."""


# ---------------------------------------------------------------------------------- where pages lie


@dataclass(frozen=True, slots=True)
class SlotPlaces:
    """Where the bytes of a rank are in a slot (a block's place in the server's arena).

    pages: offset in bytes of each layer's page in a block's slot, by layer index.
    representations: offset in bytes of each layer's representation (compact form of a block's keys)
        in the slot of a block's representations, by layer index and format.
    """

    pages: dict[int, int] = field(default_factory=dict)
    representations: dict[int, dict[str, int]] = field(default_factory=dict)


def slot_places(
    layers: Sequence[SparseLayer], layer_names: Sequence[str], shard_index: int
) -> SlotPlaces:
    """Returns where the bytes of a rank are in a slot (a block's place in the server's arena).
    `layer_names`: the layers of the group, all of them among `layers`."""
    by_name = {layer.name: layer for layer in layers}
    shard_bytes = sum(by_name[name].pages.page_bytes for name in layer_names)
    places = SlotPlaces()
    at = shard_index * shard_bytes
    for name in layer_names:
        places.pages[by_name[name].index] = at
        at += by_name[name].pages.page_bytes
    ordered = sorted(layers, key=lambda layer: layer.index)
    row_bytes = [
        (layer, name, layer.shape.row_bytes(name))
        for layer in ordered
        for name in layer.shape.formats
    ]
    at = shard_index * sum(num_bytes for _, _, num_bytes in row_bytes)
    for layer, name, num_bytes in row_bytes:
        places.representations.setdefault(layer.index, {})[name] = at
        at += num_bytes
    return places


# ------------------------------------------------------------------------------------------- copies


class PageCopier:
    """Copies pages between the engine's memory, the mapped arena and staging areas, by address. One
    caller at a time. The copier's threads hold no GIL."""

    def __init__(self, num_threads: int | None = None) -> None:
        """num_threads: number of threads; None for as many as there are cores, up to
        MAX_THREADS."""
        usual = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0))))
        self._num_threads = num_threads or usual
        self._threads: ThreadPoolExecutor | None = None
        self._kernels: Any = native.load("hotkv_proto.kernels")
        self._sizes = np.empty(0, np.int64)

    def __repr__(self) -> str:
        return f"PageCopier({self._num_threads} threads)"

    def copy(self, to: I64, source: I64, page_bytes: int) -> None:
        """Copies `page_bytes` from each of the addresses `source` [n] to the address in `to` [n].
        Both arrays are contiguous; pages must not overlap. Returns when all are copied."""
        count = len(to)
        if not count:
            return
        self._sizes_for(count, page_bytes)
        parts = min(self._num_threads, 1 + count * page_bytes // BYTES_PER_THREAD)
        if parts == 1 or self._kernels is None:
            self._part(to, source, page_bytes)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num_threads - 1, "hotkv-pages")
        edges = np.linspace(0, count, parts + 1).astype(int)
        others = [
            self._threads.submit(self._part, to[a:b], source[a:b], page_bytes)
            for a, b in itertools.pairwise(edges[1:])
        ]
        self._part(to[: edges[1]], source[: edges[1]], page_bytes)
        for other in others:
            other.result()

    def _part(self, to: I64, source: I64, page_bytes: int) -> None:
        if self._kernels is None:
            for place, origin in zip(to.tolist(), source.tolist(), strict=True):
                ctypes.memmove(place, origin, page_bytes)
            return
        self._kernels.copy_runs(0, 0, to, source, self._sizes, 0, len(to), False)

    def _sizes_for(self, count: int, page_bytes: int) -> None:
        """Makes `_sizes` hold `page_bytes` at least `count` times. In most calls the array is right
        already."""
        if len(self._sizes) < count or self._sizes[0] != page_bytes:
            self._sizes = np.full(max(count, 64), page_bytes, np.int64)


# ------------------------------------------------------------------------------------------ staging


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A copy that runs ahead of attention: a layer's pages, from slots of the server's arena, into
    one of the staging areas."""

    layer_idx: int
    slots: I64
    area: int
    done: "Future[None]"


def staged_places(is_away: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """Returns the place of each page in the area, int32 [n]. The pages that only the server has
    come first."""
    num_away, places = int(is_away.sum()), np.empty(len(is_away), np.int32)
    places[is_away], places[~is_away] = np.arange(num_away), np.arange(num_away, len(is_away))
    return places


class PageStaging:
    """The staging area: pages of a whole batch side by side, for one call of attention. One thread
    uses it. The area's memory is never freed.

    There are two areas. While a layer attends to one, the pages that the next layer needs from the
    arena are copied into the other, if a core is free for that.
    """

    def __init__(
        self,
        layers: Sequence[SparseLayer],
        places: SlotPlaces,
        copier: PageCopier,
        usual_blocks: int = 0,
    ) -> None:
        """layers: the layers, in the order in which they attend.

        usual_blocks: an area grows ahead of its need up to this size, and no further.
        """
        self._usual_blocks = usual_blocks
        self._following = {
            one.name: other
            for one, other in itertools.pairwise(layers)
            if one.group == other.group and one.pages.page_bytes == other.pages.page_bytes
        }
        self._places = places
        self._copier = copier
        self._areas = [torch.empty(0, dtype=torch.uint8)] * AREAS
        self._ahead: _Ahead | None = None
        has_free_core = len(os.sched_getaffinity(0)) > torch.get_num_threads()
        self._thread = ThreadPoolExecutor(1, "hotkv-staging") if has_free_core else None
        self._thread_copier = PageCopier(num_threads=1)
        self.num_ahead = 0
        """Number of pages that were copied ahead of attention and then used."""

    def __repr__(self) -> str:
        sizes = " + ".join(str(area.numel() >> 20) for area in self._areas)
        return f"PageStaging({sizes} MiB, {self.num_ahead} pages copied ahead)"

    @property
    def num_bytes(self) -> int:
        """Returns the memory of both areas, bytes."""
        return sum(area.numel() for area in self._areas)

    def fill(self, layer: SparseLayer, slots: I64, here: I64, goes_on: bool = True) -> torch.Tensor:
        """Returns pages of `layer`: first the pages of the server's slots at addresses `slots` [n],
        then the pages at addresses `here` [m]. The pages are valid until the next call.

        goes_on: True if the next layer is going to ask for the same slots.
        """
        num_away, page_bytes = len(slots), layer.pages.page_bytes
        num_bytes = (num_away + len(here)) * page_bytes
        ahead, self._ahead = self._ahead, None
        area, is_there = 0, False
        if ahead is not None:
            ahead.done.result()
            area = ahead.area
            is_there = ahead.layer_idx == layer.index and np.array_equal(ahead.slots, slots)
            is_there &= self._areas[area].numel() >= num_bytes
        pages = self._pages(area, layer, num_bytes)
        to = pages.data_ptr() + np.arange(num_away + len(here)) * page_bytes
        if is_there:
            self.num_ahead += num_away
        else:
            source = slots + self._places.pages[layer.index]
            self._copier.copy(to[:num_away], source, page_bytes)
        self._copier.copy(to[num_away:], here, page_bytes)
        following = self._following.get(layer.name) if goes_on else None
        if following is not None and num_away and self._thread is not None:
            self._begin(self._thread, 1 - area, following, slots, num_bytes)
        return pages

    def _begin(
        self, thread: ThreadPoolExecutor, area: int, layer: SparseLayer, slots: I64, num_bytes: int
    ) -> None:
        """Begins to copy the pages that `layer` is going to ask for."""
        pages = self._pages(area, layer, num_bytes)
        source = slots + self._places.pages[layer.index]
        done = thread.submit(self._copy_ahead, pages, source, layer.pages.page_bytes)
        self._ahead = _Ahead(layer.index, slots, area, done)

    def _copy_ahead(self, pages: torch.Tensor, source: I64, page_bytes: int) -> None:
        """Copies in the staging thread. Holds a reference to the memory of `pages` while it is
        written."""
        to = pages.data_ptr() + np.arange(len(source)) * page_bytes
        self._thread_copier.copy(to, source, page_bytes)

    def _pages(self, area: int, layer: SparseLayer, num_bytes: int) -> torch.Tensor:
        """Returns an area as pages of a layer, at least `num_bytes` long. Grows the area if
        needed."""
        if self._areas[area].numel() < num_bytes:
            usual_bytes = self._usual_blocks * layer.pages.page_bytes
            more = max(num_bytes, min(2 * self._areas[area].numel(), usual_bytes))
            self._areas[area] = torch.empty(more, dtype=torch.uint8)
        memory, kv = self._areas[area], layer.pages.tensor
        room = memory.numel() // layer.pages.page_bytes
        return memory[: room * layer.pages.page_bytes].view(kv.dtype).view(room, *kv.shape[1:])


# ----------------------------------------------------------------------- pages of resident contexts


class LostBytesError(Exception):
    """Raised if bytes of a request are lost. The text says why."""


class ResidentPages:
    """Copies, for a step, pages that only the server's arena has into hot slots and staging areas;
    see the module.

    counted: copied pages, by names of `counter_help.COUNTERS`.
    """

    def __init__(
        self, layers: Sequence[SparseLayer], places: SlotPlaces, longest_blocks: int
    ) -> None:
        """longest_blocks: number of blocks of the longest context."""
        self._places = places
        self._copier = PageCopier()
        self.staging = PageStaging(layers, places, self._copier, longest_blocks)
        self.counted: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"ResidentPages({self.staging})"

    def take_counters(self) -> dict[str, float]:
        """Returns the number of pages copied since the last call."""
        counted, self.counted = self.counted, Counter()
        return dict(counted)

    def on_device(self, layer: SparseLayer, pages: torch.Tensor, blocks: Positions) -> I64:
        """Returns the addresses of blocks [n] in a tensor of pages of the layer."""
        addresses: I64 = pages.data_ptr() + blocks.astype(np.int64) * layer.pages.page_bytes
        return addresses

    def slots(self, sequence: ResidentSequence, positions: Positions) -> I64:
        """Returns the addresses of the arena slots of blocks that only the server has. `positions`
        must ascend. Raises LostBytesError."""
        if sequence.is_lost:
            raise LostBytesError("it was lost before")
        known = sequence.addresses
        is_known = not len(positions) or positions[-1] < len(known)
        slots: I64 = known[positions] if is_known else known[:0]
        if not is_known or (len(slots) and np.minimum.reduce(slots) < 0):
            raise LostBytesError("it is not known where the server keeps some of its blocks")
        sequence.has_read = True
        return slots

    def away(self, layer: SparseLayer, sequence: ResidentSequence, positions: Positions) -> I64:
        """Returns the addresses of the layer's pages in the arena slots of these blocks. Raises
        LostBytesError."""
        addresses: I64 = self.slots(sequence, positions) + self._places.pages[layer.index]
        return addresses

    def copy(self, layer: SparseLayer, to: I64, source: I64) -> None:
        """Copies the layer's pages between addresses."""
        self._copier.copy(to, source, layer.pages.page_bytes)

    def copy_rows(
        self, layer: SparseLayer, name: str, pool: npt.NDArray[np.uint8], rows: I32, slots: I64
    ) -> None:
        """Copies representations (compact forms of keys) in a format from their arena slots into
        rows of `pool`."""
        row_bytes = layer.shape.row_bytes(name)
        place = self._places.representations[layer.index][name]
        to = pool.ctypes.data + rows.astype(np.int64) * row_bytes
        self._copier.copy(to, slots + place, row_bytes)

    def fill_hot_slots(
        self, layer: SparseLayer, sequence: ResidentSequence, slots: I32, positions: I32
    ) -> I32:
        """Fills hot slots (device blocks for selected blocks) with the pages of the blocks at these
        positions, unless the slots hold the pages already. Returns the slots' blocks. Raises
        LostBytesError."""
        # As uint32, a negative slot is a large number, so one comparison checks both bounds.
        if np.maximum.reduce(slots.view(np.uint32)) >= len(sequence.hot_blocks):
            raise LostBytesError(
                f"a hot set uses slot {slots.max()} of the {len(sequence.hot_blocks)} it has"
            )
        content, blocks = sequence.hot_content(layer.index), sequence.hot_blocks[slots]
        at = (content[slots] != positions).nonzero()[0]
        if len(at):
            missing = positions[at]
            self.copy(
                layer,
                self.on_device(layer, layer.pages.tensor, blocks[at]),
                self.away(layer, sequence, missing),
            )
            content[slots[at]] = missing
            self.counted["resident_pulled_pages"] += len(at)
        return blocks
