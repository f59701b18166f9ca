"""Copy plans: what a copy engine copies from where to where. A *run* is a contiguous byte range.

Always true: a plan's bytes are checked to lie inside both memories when it is made.

`BlockCopies` lists whole blocks, so its size does not depend on their runs; the host engine
executes it directly. Engines of devices need runs, and expand it part by part into `CopyPlan`s.
Both merge runs that adjoin in both memories.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import native
from hotkv_proto.layout import Recipe
from hotkv_server.device.runtime import HOST

Int64s = NDArray[np.int64]
PIECE_RUNS = 1 << 16
"""Runs into which a plan is expanded at a time; only a single block may have more."""


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of this process or of a device. `name`: for messages; `device`: HOST for host
    memory."""

    address: int
    num_bytes: int
    name: str
    device: int = HOST

    def array(self) -> NDArray[np.uint8]:
        """Writable view. Raises ValueError if the memory is on a device."""
        if self.device != HOST:
            raise ValueError(f"{self.name} lies on device {self.device}")
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.num_bytes).from_address(self.address))

    def offset_of(self, part: memoryview) -> int:
        """Of a view into this memory, in bytes."""
        return int(np.frombuffer(part, np.uint8).ctypes.data) - self.address


def _check(region: Region, begin: int, end: int) -> None:
    if begin < 0 or end > region.num_bytes:
        raise ValueError(f"copy plan leaves {region.name} of {region.num_bytes} bytes")


def _check_sides(one: Region, other: Region) -> None:
    if HOST not in (one.device, other.device):
        raise ValueError(
            f"copy plan goes between {one.name} and {other.name}; one side must be host memory"
        )


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Copies `num_bytes[i]` bytes from `src` + `src_offsets[i]` to `dst` + `dst_offsets[i]`, for
    each run; arrays are int64 [runs]."""

    dst: Region
    src: Region
    dst_offsets: Int64s
    src_offsets: Int64s
    num_bytes: Int64s

    def __post_init__(self) -> None:
        for region, offsets in ((self.dst, self.dst_offsets), (self.src, self.src_offsets)):
            if len(offsets):
                _check(region, int(offsets.min()), int((offsets + self.num_bytes).max()))
        _check_sides(self.dst, self.src)

    @property
    def device(self) -> int:
        """Device that the copy involves; HOST if none."""
        return max(self.dst.device, self.src.device)

    @property
    def total_bytes(self) -> int:
        return int(self.num_bytes.sum())

    @staticmethod
    def build(
        dst: Region, src: Region, dst_offsets: Int64s, src_offsets: Int64s, num_bytes: Int64s
    ) -> "CopyPlan":
        """Merges neighbouring runs that adjoin in both memories."""
        if len(num_bytes) > 1:
            follows = (dst_offsets[1:] == dst_offsets[:-1] + num_bytes[:-1]) & (
                src_offsets[1:] == src_offsets[:-1] + num_bytes[:-1]
            )
            if follows.any():
                starts = np.flatnonzero(np.concatenate(([True], ~follows)))
                return CopyPlan(
                    dst,
                    src,
                    dst_offsets[starts],
                    src_offsets[starts],
                    np.add.reduceat(num_bytes, starts),
                )
        return CopyPlan(dst, src, dst_offsets, src_offsets, num_bytes)

    @property
    def num_runs(self) -> int:
        return len(self.num_bytes)

    def share(self, begin: int, end: int, whole: int) -> "CopyPlan":
        """Runs of shares `begin` to `end` - 1 of `whole` equal ones."""
        mine = slice(self.num_runs * begin // whole, self.num_runs * end // whole)
        return CopyPlan(
            self.dst, self.src, self.dst_offsets[mine], self.src_offsets[mine], self.num_bytes[mine]
        )


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Whole blocks, between an engine's memory and the arena.

    `recipe`: a block's byte ranges in the engine's memory and in its slot.
    `block_ids`: the engine's, int64 [blocks].
    `slot_offsets`: in the arena, in bytes, int64 [blocks].
    `to_engine`: True for a load.
    """

    recipe: Recipe
    engine: Region
    arena: Region
    block_ids: Int64s
    slot_offsets: Int64s
    to_engine: bool

    def __post_init__(self) -> None:
        if not len(self.block_ids):
            return
        recipe = self.recipe
        low_id, end, low_slot, slot_end = native.require(
            "hotkv_proto.table_reading"
        ).extent_of_blocks(
            self.block_ids,
            self.slot_offsets,
            recipe.bases,
            recipe.strides,
            recipe.slot_offsets,
            recipe.num_bytes,
        )
        _check(self.engine, low_id, end)
        _check(self.arena, low_slot, slot_end)
        _check_sides(self.engine, self.arena)

    @property
    def device(self) -> int:
        """As in `CopyPlan`."""
        return max(self.engine.device, self.arena.device)

    @property
    def dst(self) -> Region:
        return self.engine if self.to_engine else self.arena

    @property
    def src(self) -> Region:
        return self.arena if self.to_engine else self.engine

    @property
    def total_bytes(self) -> int:
        return self.recipe.block_bytes * len(self.block_ids)

    @property
    def num_runs(self) -> int:
        """Before adjoining runs are merged."""
        return len(self.recipe.bases) * len(self.block_ids)

    def part(self, begin: int, end: int, whole: int) -> slice:
        """Blocks of shares `begin` to `end` - 1 of `whole` equal ones."""
        count = len(self.block_ids)
        return slice(count * begin // whole, count * end // whole)

    def share(self, begin: int, end: int, whole: int) -> CopyPlan:
        """As `part`, but as runs."""
        mine = self.part(begin, end, whole)
        runs = self.recipe.copy_runs(self.block_ids[mine], self.slot_offsets[mine])
        offsets = (
            (runs.engine_offsets, runs.slot_offsets)
            if self.to_engine
            else (runs.slot_offsets, runs.engine_offsets)
        )
        return CopyPlan.build(self.dst, self.src, *offsets, runs.num_bytes)


Plan = CopyPlan | BlockCopies


def block_copies(
    recipes: Sequence[Recipe],
    block_ids: Int64s,
    slot_offsets: Int64s,
    arena: Region,
    engine: Mapping[str, Region],
    *,
    to_engine: bool,
) -> list[BlockCopies]:
    """One plan for each recipe, that is for each memory of the engine. `engine`: by
    `Recipe.handle_id`; other arguments as in `BlockCopies`."""
    ids, offsets = np.ascontiguousarray(block_ids), np.ascontiguousarray(slot_offsets)
    return [
        BlockCopies(recipe, engine[recipe.handle_id], arena, ids, offsets, to_engine)
        for recipe in recipes
    ]


def num_shares(plan: Plan, piece_bytes: int) -> int:
    """Number of equal shares, at least 1, of about `piece_bytes` and PIECE_RUNS at most."""
    return max(1, -(-plan.total_bytes // piece_bytes), -(-plan.num_runs // PIECE_RUNS))
