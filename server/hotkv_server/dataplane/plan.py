"""Copy plans: which bytes go where, as arrays.

A plan is checked against both memories before anything moves, and neighbours that are contiguous on both sides are merged.
"""

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv.layout import CopyRuns
from hotkv_server.device.runtime import HOST

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of this process: an address and its size, a name for messages, and the number of the device on which it lies, or HOST."""

    address: int
    num_bytes: int
    name: str
    device: int = HOST

    def array(self) -> NDArray[np.uint8]:
        """Its bytes, writable. Raises ValueError where they are a device's."""
        if self.device != HOST:
            raise ValueError(f"{self.name} lies on device {self.device}")
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.num_bytes).from_address(self.address))


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """memcpy of `num_bytes[i]` from `src` + `src_offsets[i]` to `dst` + `dst_offsets[i]`, int64 [runs] each."""

    dst: Region
    src: Region
    dst_offsets: Int64s
    src_offsets: Int64s
    num_bytes: Int64s

    def __post_init__(self) -> None:
        for region, offsets in ((self.dst, self.dst_offsets), (self.src, self.src_offsets)):
            if len(offsets) and (int(offsets.min()) < 0 or int((offsets + self.num_bytes).max()) > region.num_bytes):
                raise ValueError(f"copy plan leaves {region.name} of {region.num_bytes} bytes")
        if HOST not in (self.dst.device, self.src.device):
            raise ValueError(f"copy plan goes from {self.src.name} to {self.dst.name}; one side must be host memory")

    @property
    def device(self) -> int:
        """The device that one side lies on; HOST where neither does."""
        return max(self.dst.device, self.src.device)

    @property
    def total_bytes(self) -> int:
        return int(self.num_bytes.sum())

    @staticmethod
    def build(dst: Region, src: Region, dst_offsets: Int64s, src_offsets: Int64s, num_bytes: Int64s) -> "CopyPlan":
        """Merges runs that follow each other on both sides."""
        if len(num_bytes) > 1:
            follows = (dst_offsets[1:] == dst_offsets[:-1] + num_bytes[:-1]) & (src_offsets[1:] == src_offsets[:-1] + num_bytes[:-1])
            if follows.any():
                starts = np.flatnonzero(np.concatenate(([True], ~follows)))
                return CopyPlan(dst, src, dst_offsets[starts], src_offsets[starts], np.add.reduceat(num_bytes, starts))
        return CopyPlan(dst, src, dst_offsets, src_offsets, num_bytes)

    def pieces(self, piece_bytes: int) -> list[tuple[int, int]]:
        """Ranges of runs of about `piece_bytes` each; a longer run is a piece of its own."""
        ends = np.cumsum(self.num_bytes)
        numbers = (ends - self.num_bytes) // piece_bytes
        starts = np.flatnonzero(np.concatenate(([True], numbers[1:] != numbers[:-1]))) if len(numbers) else np.empty(0, np.int64)
        bounds = [*starts.tolist(), len(numbers)]
        return list(itertools.pairwise(bounds))


def plans_for(runs: Sequence[CopyRuns], arena: Region, engine: dict[str, Region], *, to_engine: bool) -> list[CopyPlan]:
    """One plan for each of the runs, in either direction."""
    plans = []
    for run in runs:
        memory = engine[run.handle_id]
        if to_engine:
            plans.append(CopyPlan.build(memory, arena, run.engine_offsets, run.slot_offsets, run.num_bytes))
        else:
            plans.append(CopyPlan.build(arena, memory, run.slot_offsets, run.engine_offsets, run.num_bytes))
    return plans
