"""Copies of pages for a step over resident contexts: out of the mapped arena into hot slots, and of
a whole batch into a staging area.

What is always true: a page that only the server has is copied from the address that the server
named, or LostError is raised; whoever reads the arena is marked (`has_read`), so that the pins are
checked afterwards.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hotkv_vllm.residency.page_copies import PageCopier
from hotkv_vllm.residency.sequence import ResidentSequence
from hotkv_vllm.residency.slot_places import SlotPlaces
from hotkv_vllm.sparse.batch import SparseLayer
from hotkv_vllm.sparse.page_staging import PageStaging

I32 = npt.NDArray[np.int32]
Positions = npt.NDArray[np.integer[Any]]
I64 = npt.NDArray[np.int64]


class LostError(Exception):
    """Bytes of a request can't be had any more; the text says why."""


class ResidentPages:
    """See the module. `counted`: pages that were copied, by names of `counter_help.COUNTERS`."""

    def __init__(self, layers: Sequence[SparseLayer], places: SlotPlaces) -> None:
        self._places = places
        self._copier = PageCopier()
        self.staging = PageStaging(layers, places, self._copier)
        self.counted: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"ResidentPages({self.staging})"

    def take_counters(self) -> dict[str, float]:
        """Pages that were copied since the last call."""
        counted, self.counted = self.counted, Counter()
        return dict(counted)

    def on_device(self, layer: SparseLayer, pages: torch.Tensor, blocks: Positions) -> I64:
        """Addresses of blocks [n] in a tensor of pages of the layer."""
        addresses: I64 = pages.data_ptr() + blocks.astype(np.int64) * layer.pages.page_bytes
        return addresses

    def slots(self, sequence: ResidentSequence, positions: Positions) -> I64:
        """Addresses of the server's slots of blocks that only it has, at rising positions. Raises
        LostError."""
        if sequence.is_lost:
            raise LostError("it was lost before")
        known = sequence.addresses
        is_known = not len(positions) or positions[-1] < len(known)
        slots: I64 = known[positions] if is_known else known[:0]
        if not is_known or (len(slots) and np.minimum.reduce(slots) < 0):
            raise LostError("it is not known where the server keeps some of its blocks")
        sequence.has_read = True
        return slots

    def away(self, layer: SparseLayer, sequence: ResidentSequence, positions: Positions) -> I64:
        """The same of the layer's pages in these slots."""
        addresses: I64 = self.slots(sequence, positions) + self._places.pages[layer.index]
        return addresses

    def copy(self, layer: SparseLayer, to: I64, source: I64) -> None:
        """Copies the layer's pages between addresses."""
        self._copier.copy(to, source, layer.pages.page_bytes)

    def copy_rows(
        self, layer: SparseLayer, name: str, pool: npt.NDArray[np.uint8], rows: I32, slots: I64
    ) -> None:
        """Copies representations of one format out of their slots into rows of `pool`."""
        row_bytes = layer.shape.row_bytes(name)
        place = self._places.representations[layer.index][name]
        to = pool.ctypes.data + rows.astype(np.int64) * row_bytes
        self._copier.copy(to, slots + place, row_bytes)

    def fill_hot_slots(
        self, layer: SparseLayer, sequence: ResidentSequence, slots: I32, positions: I32
    ) -> I32:
        """Sees to it that hot slots hold the pages of these positions. Returns their blocks."""
        # Negative numbers are large ones where the sign is a digit.
        if np.maximum.reduce(slots.view(np.uint32)) >= len(sequence.hot_blocks):
            raise LostError(
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
