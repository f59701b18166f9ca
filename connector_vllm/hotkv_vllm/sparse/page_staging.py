"""The staging area: pages of a whole batch side by side, where one call of attention finds them.

There are two areas. While a layer attends to one, the pages that the next layer needs out of the
arena are copied into the other, if a core is free for that.

What is always true: pages that were copied ahead are used only for the layer and the very slots
that they were copied for; an area that attention reads is not written.
"""

import itertools
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hotkv_vllm.residency.page_copies import PageCopier
from hotkv_vllm.residency.slot_places import SlotPlaces
from hotkv_vllm.sparse.batch import SparseLayer

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A copy of these slots' pages of a layer into one of the areas."""

    layer_idx: int
    slots: I64
    area: int
    done: "Future[None]"


def staged_places(is_away: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """Where each page lies in the area, int32 [n]: first those that only the server has."""
    num_away, places = int(is_away.sum()), np.empty(len(is_away), np.int32)
    places[is_away], places[~is_away] = np.arange(num_away), np.arange(num_away, len(is_away))
    return places


class PageStaging:
    """See the module. One thread asks; its memory stays."""

    def __init__(
        self, layers: Sequence[SparseLayer], places: SlotPlaces, copier: PageCopier
    ) -> None:
        """`layers`: in the order in which they attend."""
        self._following = {
            one.name: other
            for one, other in itertools.pairwise(layers)
            if one.group == other.group and one.pages.page_bytes == other.pages.page_bytes
        }
        self._places = places
        self._copier = copier
        self._areas = [torch.empty(0, dtype=torch.uint8)] * 2
        self._ahead: _Ahead | None = None
        has_free_core = len(os.sched_getaffinity(0)) > torch.get_num_threads()
        self._thread = ThreadPoolExecutor(1, "hotkv-staging") if has_free_core else None
        self._thread_copier = PageCopier(num_threads=1)
        self.num_ahead = 0
        """Pages that were copied ahead and used."""

    def __repr__(self) -> str:
        sizes = " + ".join(str(area.numel() >> 20) for area in self._areas)
        return f"PageStaging({sizes} MiB, {self.num_ahead} pages copied ahead)"

    @property
    def num_bytes(self) -> int:
        """Memory of both areas."""
        return sum(area.numel() for area in self._areas)

    def fill(self, layer: SparseLayer, slots: I64, here: I64, goes_on: bool = True) -> torch.Tensor:
        """Pages of `layer`: those of the server's slots at addresses `slots` [n], then those at
        addresses `here` [m]. They hold until the next call. `goes_on`: the next layer is going to
        ask for the same slots."""
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
        """In the thread. Holds the memory of `pages` for as long as it is written."""
        to = pages.data_ptr() + np.arange(len(source)) * page_bytes
        self._thread_copier.copy(to, source, page_bytes)

    def _pages(self, area: int, layer: SparseLayer, num_bytes: int) -> torch.Tensor:
        """An area as pages of a layer, so many bytes of them at least."""
        if self._areas[area].numel() < num_bytes:
            more = max(num_bytes, 2 * self._areas[area].numel())
            self._areas[area] = torch.empty(more, dtype=torch.uint8)
        memory, kv = self._areas[area], layer.pages.tensor
        room = memory.numel() // layer.pages.page_bytes
        return memory[: room * layer.pages.page_bytes].view(kv.dtype).view(room, *kv.shape[1:])
