"""Pages in the arena for a step of a CPU engine: `ResidentPages` says which go into hot slots
(`swap` copies them), `PageStaging` copies all pages of a batch side by side into a staging area.

A block's slot holds one shard per rank; a shard the group's layers in vLLM's order. A sketch's slot
holds per rank all sparse layers in the model's order, each with its formats in the configuration's
order (`cpu.shared`).

Always true:
- A page whose address is unknown raises LostBytesError; vLLM then computes the request anew.
- Reading from the arena sets `ResidentSequence.has_read`: after the step the worker tests the pins.
- Pages copied ahead are used only if the layer then asks for the same slots.
- A staging area is not written while attention reads it.
"""

import itertools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hotkv_sparse.vllm.cpu.batch import SparseLayer
from hotkv_sparse.vllm.cpu.resident_sequences import ResidentSequence
from hotkv_sparse.vllm.cpu.swap import HotFill, OptimizedSwapHandler, PageCopier, SwapIn

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
Positions = npt.NDArray[np.integer[Any]]
AREAS = 2
"""One for the layer that attends, one for the next."""


# ---------------------------------------------------------------------------------- where pages lie


@dataclass(frozen=True, slots=True)
class SlotPlaces:
    """Offsets in a slot, in bytes, by layer index, for sketches also by format."""

    pages: dict[int, int] = field(default_factory=dict)
    sketches: dict[int, dict[str, int]] = field(default_factory=dict)


def slot_places(
    layers: Sequence[SparseLayer], layer_names: Sequence[str], shard_index: int
) -> SlotPlaces:
    """Computes where a rank's pages and sketches lie in a slot.

    layer_names: of the group, in vLLM's order; all among `layers`.
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


# ------------------------------------------------------------------------------------------ staging


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A copy of the next layer's pages while the present layer attends.

    slots: addresses, int64.
    """

    layer_idx: int
    slots: I64
    area: int
    done: "Future[None]"


def staged_places(is_away: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """Index of each page in a staging area, int32: first the pages in the arena, then those on
    the device."""
    num_away, places = int(is_away.sum()), np.empty(len(is_away), np.int32)
    places[is_away], places[~is_away] = np.arange(num_away), np.arange(num_away, len(is_away))
    return places


class PageStaging:
    """Lets one call of attention serve pages in the arena and on the device. Used by one thread.

    A second thread copies the next layer's pages ahead, if a core is free. The areas are never
    freed.
    """

    def __init__(
        self,
        layers: Sequence[SparseLayer],
        places: SlotPlaces,
        copier: PageCopier,
        usual_blocks: int = 0,
    ) -> None:
        """layers: in the order in which they attend.
        usual_blocks: areas double up to this size, and grow to just the needed size above.
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
        """Pages copied ahead and then used."""

    def __repr__(self) -> str:
        sizes = " + ".join(str(area.numel() >> 20) for area in self._areas)
        return f"PageStaging({sizes} MiB, {self.num_ahead} pages copied ahead)"

    @property
    def num_bytes(self) -> int:
        return sum(area.numel() for area in self._areas)

    def fill(self, layer: SparseLayer, slots: I64, here: I64, goes_on: bool = True) -> torch.Tensor:
        """The area in the shape of the layer's KV cache, valid until the next call: first the pages
        in arena `slots`, then those `here` on the device, both addresses, int64.

        goes_on: the next layer is likely to need the same slots.
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
        """Copies ahead."""
        pages = self._pages(area, layer, num_bytes)
        source = slots + self._places.pages[layer.index]
        try:
            done = thread.submit(self._copy_ahead, pages, source, layer.pages.page_bytes)
        except RuntimeError:
            # The operating system refuses the thread: nothing is copied ahead from now on.
            self._thread = None
            return
        self._ahead = _Ahead(layer.index, slots, area, done)

    def _copy_ahead(self, pages: torch.Tensor, source: I64, page_bytes: int) -> None:
        """Runs on the staging thread. Holds `pages`, so that they are not freed."""
        to = pages.data_ptr() + np.arange(len(source)) * page_bytes
        self._thread_copier.copy(to, source, page_bytes)

    def _pages(self, area: int, layer: SparseLayer, num_bytes: int) -> torch.Tensor:
        """Grown to `num_bytes`."""
        if self._areas[area].numel() < num_bytes:
            usual_bytes = self._usual_blocks * layer.pages.page_bytes
            more = max(num_bytes, min(2 * self._areas[area].numel(), usual_bytes))
            self._areas[area] = torch.empty(more, dtype=torch.uint8)
        memory, kv = self._areas[area], layer.pages.tensor
        room = memory.numel() // layer.pages.page_bytes
        return memory[: room * layer.pages.page_bytes].view(kv.dtype).view(room, *kv.shape[1:])


# ----------------------------------------------------------------------- pages of resident contexts


class LostBytesError(Exception):
    """Blocks in the arena can't be read."""


class ResidentPages:
    """Copies sketches from the arena, and says which pages `swap` must copy into hot slots.

    staging: for requests that attend to their whole context.
    counted: copied pages, by names of `counter_help.COUNTERS`.
    """

    def __init__(
        self,
        layers: Sequence[SparseLayer],
        places: SlotPlaces,
        swap: OptimizedSwapHandler,
        longest_blocks: int = 0,
    ) -> None:
        self._places = places
        self._swap = swap
        self.staging = PageStaging(layers, places, swap.copier, longest_blocks)
        self.counted: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"ResidentPages({self.staging})"

    def take_counters(self) -> dict[str, float]:
        counted, self.counted = self.counted, Counter()
        return dict(counted)

    def on_device(self, layer: SparseLayer, pages: torch.Tensor, blocks: Positions) -> I64:
        """Addresses in the engine's own KV cache, int64."""
        addresses: I64 = pages.data_ptr() + blocks.astype(np.int64) * layer.pages.page_bytes
        return addresses

    def slots(self, sequence: ResidentSequence, positions: Positions) -> I64:
        """Counts slots as read. Raises LostBytesError if an address is unknown or the request is
        lost.

        positions: ascending.
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
        """Copies sketches into rows of `pool`, uint8 [rows, KV heads, bytes], from slots at
        addresses."""
        row_bytes = layer.shape.row_bytes(name)
        place = self._places.sketches[layer.index][name]
        to = pool.ctypes.data + rows.astype(np.int64) * row_bytes
        self._swap.copier.copy(to, slots + place, row_bytes)

    def hot_table(
        self,
        layer: SparseLayer,
        sequence: ResidentSequence,
        slots_of: Callable[[I32], I32],
        blocks_C: I32,
        positions: I32,
        num_sinks: int,
    ) -> tuple[I32, SwapIn | None]:
        """Block table of `positions`, ascending, and the pages to copy before attention reads it.

        slots_of: hot slots for positions that are not on the device.
        blocks_C: of the context; not used where the block is not on the device.
        """
        table = blocks_C[positions]
        # Blocks that are not on the device are one range.
        first, last = positions.searchsorted((num_sinks, sequence.num_freed)).tolist()
        if first >= last:
            return table, None
        away = positions[first:last]
        table[first:last], swap_in = self.hot_slots(layer, sequence, slots_of(away), away)
        return table, swap_in

    def hot_slots(
        self, layer: SparseLayer, sequence: ResidentSequence, slots: I32, positions: I32
    ) -> tuple[I32, SwapIn | None]:
        """The slots' device blocks, and the pages to copy there; None if all are there. Raises
        LostBytesError if a page can't be read.

        slots: indices in `sequence.hot_blocks`.
        """
        # As uint32, a negative slot is a large number, so one comparison checks both bounds.
        if np.maximum.reduce(slots.view(np.uint32)) >= len(sequence.hot_blocks):
            raise LostBytesError(
                f"a hot set uses slot {slots.max()} of the {len(sequence.hot_blocks)} it has"
            )
        content, blocks = sequence.hot_content(layer.index), sequence.hot_blocks[slots]
        at = (content[slots] != positions).nonzero()[0]
        if not len(at):
            return blocks, None
        missing = positions[at]
        to = self.on_device(layer, layer.pages.tensor, blocks[at])
        source = self.slots(sequence, missing) + self._places.pages[layer.index]
        self.counted["resident_pulled_pages"] += len(at)
        fill = HotFill(content, slots[at], missing)
        return blocks, SwapIn(layer.index, layer.pages.page_bytes, missing, to, source, (fill,))
