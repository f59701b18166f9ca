"""Copies pages (a page is the KV of a block in one layer) that are only in the server's arena, for
a step of a CPU engine with residency (contexts larger than the engine's own KV cache).
`ResidentPages` copies selected pages into hot slots, blocks of vLLM's pool that are reserved for
such copies. `PageStaging` copies all pages that a batch needs into a staging area, where they lie
side by side.

`SlotPlaces` says where the bytes of one rank are in a slot of the arena. A block's slot holds one
shard (part) per rank, in the order of the ranks. A shard holds the pages of the group's layers, in
vLLM's order. A block's sketch (a compact form of its keys, by which sparse attention
selects blocks) has a slot of its own, also with one shard per rank. A shard there holds the
sketches of all sparse layers, in the model's order. A layer may have sketches in
several formats, in the order of the configuration (`sparse.shared`).

Always true:
- A page that is only in the arena is copied from the address that the server has named. If the
  address is not known, LostBytesError is raised, and vLLM computes the request anew.
- When blocks of a request are read from the arena, the request's `ResidentSequence.has_read` is
  set. After the step the worker checks whether these blocks were still pinned.
- Pages that were copied ahead, before their layer asked for them, are used only if the layer then
  asks for the same arena slots.
- A staging area is not written while attention reads it.
"""

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
"""Number of staging areas. A staging area holds, side by side, all pages that a batch needs in a
layer. With two, the next layer's pages can be copied while a layer attends."""
MAX_THREADS = 4
BYTES_PER_THREAD = 1 << 20
"""A copy uses one thread, and one more thread for each BYTES_PER_THREAD bytes, up to the number of
threads of the copier."""


# ---------------------------------------------------------------------------------- where pages lie


@dataclass(frozen=True, slots=True)
class SlotPlaces:
    """The places of a rank's part of a block in a slot of the server's arena. All offsets are in
    bytes from the start of the slot.

    pages: by layer index, the offset of the layer's page in the slot of a block.
    sketches: by layer index and format, the offset of the layer's sketch (compact
        form of keys) in the slot of a block's sketch.
    """

    pages: dict[int, int] = field(default_factory=dict)
    sketches: dict[int, dict[str, int]] = field(default_factory=dict)


def slot_places(
    layers: Sequence[SparseLayer], layer_names: Sequence[str], shard_index: int
) -> SlotPlaces:
    """Computes where a rank finds its part of a block in a slot of the server's arena.

    layers: the layers with sparse attention.
    layer_names: the names of the KV cache group's layers, in vLLM's order. All must be among
        `layers`.
    shard_index: the place of the rank's shard (part of a block) in a slot: 0 is the first.
    """
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
        places.sketches.setdefault(layer.index, {})[name] = at
        at += num_bytes
    return places


# ------------------------------------------------------------------------------------------- copies


class PageCopier:
    """Copies pages by address, on several threads without the GIL: between the engine's memory, the
    mapped arena and staging areas. Only one thread may call it."""

    def __init__(self, num_threads: int | None = None) -> None:
        """Sets the number of threads, including the caller's. The others are started when a copy
        needs them.

        num_threads: number of threads that copy; None for the number of cores, up to
            MAX_THREADS.
        """
        usual = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0))))
        self._num_threads = num_threads or usual
        self._threads: ThreadPoolExecutor | None = None
        self._sizes: I64 = np.array([], np.int64)

    def __repr__(self) -> str:
        return f"PageCopier({self._num_threads} threads)"

    def copy(self, to: I64, source: I64, page_bytes: int) -> None:
        """Copies pages, and returns when all are copied. The pages must not overlap.

        to: for each page, the address to copy it to, int64, contiguous.
        source: for each page, the address to copy it from, int64, contiguous.
        page_bytes: size of a page.
        """
        count = len(to)
        if not count:
            return
        if len(self._sizes) < count or self._sizes[0] != page_bytes:
            self._sizes = np.full(max(count, 64), page_bytes, np.int64)
        parts = min(self._num_threads, 1 + count * page_bytes // BYTES_PER_THREAD)
        if parts == 1:
            self._part(to, source)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num_threads - 1, "hotkv-pages")
        edges = np.linspace(0, count, parts + 1).astype(int)
        try:
            others = [
                self._threads.submit(self._part, to[a:b], source[a:b])
                for a, b in itertools.pairwise(edges[1:])
            ]
        except RuntimeError:
            # The operating system refuses another thread. Ends the thread pool, which would
            # otherwise execute the refused copy later, and copies in this thread.
            self._threads.shutdown(cancel_futures=True)
            self._threads = None
            self._part(to, source)
            return
        self._part(to[: edges[1]], source[: edges[1]])
        for other in others:
            other.result()

    def _part(self, to: I64, source: I64) -> None:
        kernels = native.require("hotkv_proto.table_reading")
        kernels.copy_runs(0, 0, to, source, self._sizes, 0, len(to), False)


# ------------------------------------------------------------------------------------------ staging


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A copy that was begun before it is needed: the pages of the next layer are copied from arena
    slots into a staging area while the present layer attends.

    layer_idx: index of the layer whose pages are copied.
    slots: addresses of the arena slots, int64, one per block.
    area: index of the staging area.
    done: future of the copy.
    """

    layer_idx: int
    slots: I64
    area: int
    done: "Future[None]"


def staged_places(is_away: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """Returns, for each page, its index in a staging area (the copy of all pages that a batch
    needs), int32. The area holds first all pages that are only in the arena, then all pages on the
    device, both in their order.

    is_away: for each page, True if it is only in the arena.
    """
    num_away, places = int(is_away.sum()), np.empty(len(is_away), np.int32)
    places[is_away], places[~is_away] = np.arange(num_away), np.arange(num_away, len(is_away))
    return places


class PageStaging:
    """Copies the pages that a whole batch needs, from the arena and from the device, side by side
    into a staging area. So one call of attention can serve the batch, although some pages are only
    in the arena. Used by one thread.

    There are two areas. While a layer attends to one area, a thread copies the pages that the next
    layer needs from the arena into the other area, if a core is free. The memory of the areas is
    never freed.
    """

    def __init__(
        self,
        layers: Sequence[SparseLayer],
        places: SlotPlaces,
        copier: PageCopier,
        usual_blocks: int = 0,
    ) -> None:
        """Allocates no memory; the areas grow when `fill` needs them.

        layers: the layers, in the order in which they attend.
        places: where the layers' pages are in a slot of the arena.
        usual_blocks: an area that is too small grows to twice its size, up to this size in blocks.
            If more blocks are needed, the area grows to just the needed size.
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
        """Number of pages that were copied before their layer asked for them, and were then
        used."""

    def __repr__(self) -> str:
        sizes = " + ".join(str(area.numel() >> 20) for area in self._areas)
        return f"PageStaging({sizes} MiB, {self.num_ahead} pages copied ahead)"

    @property
    def num_bytes(self) -> int:
        """Returns the size of both staging areas together, bytes."""
        return sum(area.numel() for area in self._areas)

    def fill(self, layer: SparseLayer, slots: I64, here: I64, goes_on: bool = True) -> torch.Tensor:
        """Copies pages of `layer` into a staging area, and returns the area as a tensor of pages in
        the shape of the layer's KV cache. The pages are valid until the next call.

        slots: addresses of arena slots, int64. The layer's pages in these slots come first in the
            tensor.
        here: addresses of the layer's pages on the device, int64. They come next.
        goes_on: True if the next layer is likely to need the same slots. Another thread then begins
            to copy the next layer's pages.
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
        """Begins to copy the pages that the next call of `fill` is likely to need, on `thread`.

        area: index of the staging area (buffer for copies of pages) to copy to.
        layer: the next layer.
        slots: addresses of the arena slots from which the layer's pages are copied.
        num_bytes: size that the area must have.
        """
        pages = self._pages(area, layer, num_bytes)
        source = slots + self._places.pages[layer.index]
        try:
            done = thread.submit(self._copy_ahead, pages, source, layer.pages.page_bytes)
        except RuntimeError:
            # The operating system refuses to start the thread. From now on pages are copied only
            # when their layer asks for them.
            self._thread = None
            return
        self._ahead = _Ahead(layer.index, slots, area, done)

    def _copy_ahead(self, pages: torch.Tensor, source: I64, page_bytes: int) -> None:
        """Copies pages into a staging area, on the staging thread. Holds a reference to the area
        `pages` meanwhile, so that its memory is not freed."""
        to = pages.data_ptr() + np.arange(len(source)) * page_bytes
        self._thread_copier.copy(to, source, page_bytes)

    def _pages(self, area: int, layer: SparseLayer, num_bytes: int) -> torch.Tensor:
        """Returns a staging area (a buffer for copies of pages) as a tensor of the layer's pages.
        Grows the area if it is smaller than `num_bytes`."""
        if self._areas[area].numel() < num_bytes:
            usual_bytes = self._usual_blocks * layer.pages.page_bytes
            more = max(num_bytes, min(2 * self._areas[area].numel(), usual_bytes))
            self._areas[area] = torch.empty(more, dtype=torch.uint8)
        memory, kv = self._areas[area], layer.pages.tensor
        room = memory.numel() // layer.pages.page_bytes
        return memory[: room * layer.pages.page_bytes].view(kv.dtype).view(room, *kv.shape[1:])


# ----------------------------------------------------------------------- pages of resident contexts


class LostBytesError(Exception):
    """Raised if the worker can't read blocks of a request that are only in the server's arena. vLLM
    must then compute the request anew."""


class ResidentPages:
    """Copies pages and sketches (compact forms of keys) that are only in the server's arena,
    for the requests of a step.

    staging: copies all pages that a batch needs into a staging area. Used in steps in which a
        request attends to its whole context.
    counted: numbers of copied pages, by names of `counter_help.COUNTERS`.
    """

    def __init__(
        self, layers: Sequence[SparseLayer], places: SlotPlaces, longest_blocks: int
    ) -> None:
        """Creates the staging areas, which hold no memory yet.

        layers: the layers, in the order in which they attend.
        places: where the layers' pages are in a slot of the arena.
        longest_blocks: number of blocks of the longest context.
        """
        self._places = places
        self._copier = PageCopier()
        self.staging = PageStaging(layers, places, self._copier, longest_blocks)
        self.counted: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"ResidentPages({self.staging})"

    def take_counters(self) -> dict[str, float]:
        """Returns the numbers of pages copied since the last call, by counter name."""
        counted, self.counted = self.counted, Counter()
        return dict(counted)

    def on_device(self, layer: SparseLayer, pages: torch.Tensor, blocks: Positions) -> I64:
        """Returns the address of a layer's page in the engine's own KV cache, for each of `blocks`,
        int64.

        pages: the layer's KV cache tensor.
        blocks: ids of device blocks.
        """
        addresses: I64 = pages.data_ptr() + blocks.astype(np.int64) * layer.pages.page_bytes
        return addresses

    def slots(self, sequence: ResidentSequence, positions: Positions) -> I64:
        """Returns the addresses of the arena slots that hold a request's blocks, and records that
        the blocks are read (`has_read`). Raises LostBytesError if an address is not known, or if
        the request is lost (marked to be computed anew).

        positions: positions of the blocks in the context, ascending.
        """
        if sequence.is_lost:
            raise LostBytesError("it was lost before")
        known = sequence.addresses
        is_known = not len(positions) or positions[-1] < len(known)
        slots: I64 = known[positions] if is_known else known[:0]
        if not is_known or (len(slots) and np.minimum.reduce(slots) < 0):
            raise LostBytesError("it is not known where the server keeps some of its blocks")
        sequence.has_read = True
        return slots

    def copy_rows(
        self, layer: SparseLayer, name: str, pool: npt.NDArray[np.uint8], rows: I32, slots: I64
    ) -> None:
        """Copies a layer's sketches of blocks (compact forms of their keys) from arena slots
        into rows of `pool`.

        name: format of the sketches to copy.
        pool: the layer's sketches in that format, uint8 [rows, KV heads, bytes].
        rows: for each block, the row to copy to, int32.
        slots: for each block, the address of the arena slot to copy from, int64.
        """
        row_bytes = layer.shape.row_bytes(name)
        place = self._places.sketches[layer.index][name]
        to = pool.ctypes.data + rows.astype(np.int64) * row_bytes
        self._copier.copy(to, slots + place, row_bytes)

    def fill_hot_slots(
        self, layer: SparseLayer, sequence: ResidentSequence, slots: I32, positions: I32
    ) -> I32:
        """Copies the layer's pages of selected blocks from the arena into hot slots (device blocks
        that the request has for such copies). Skips pages that are there already. Returns, for each
        block, the id of the hot slot's device block. Raises LostBytesError if a page can't be read.

        slots: for each block, the index of its hot slot in `sequence.hot_blocks`, int32.
        positions: for each block, its position in the context, int32.
        """
        # As uint32, a negative slot is a large number, so one comparison checks both bounds.
        if np.maximum.reduce(slots.view(np.uint32)) >= len(sequence.hot_blocks):
            raise LostBytesError(
                f"a hot set uses slot {slots.max()} of the {len(sequence.hot_blocks)} it has"
            )
        content, blocks = sequence.hot_content(layer.index), sequence.hot_blocks[slots]
        at = (content[slots] != positions).nonzero()[0]
        if len(at):
            missing = positions[at]
            to = self.on_device(layer, layer.pages.tensor, blocks[at])
            source = self.slots(sequence, missing) + self._places.pages[layer.index]
            self._copier.copy(to, source, layer.pages.page_bytes)
            content[slots[at]] = missing
            self.counted["resident_pulled_pages"] += len(at)
        return blocks
