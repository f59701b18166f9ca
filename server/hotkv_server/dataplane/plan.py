"""Copy plans, which tell a copy engine what to copy: the sources, destinations and sizes. A *run*
is a contiguous byte range.

Always true: when a plan is made, it is checked that all its bytes are inside the two memories.

The plan of a transfer (`BlockCopies`) lists whole blocks, so its size depends on the number of
blocks, not on the number of their runs. The copy engine for host memory executes such a plan
directly. The copy engines of devices need runs, and expand the plan part by part into plans of runs
(`CopyPlan`). Both kinds of copy engine merge runs that adjoin in both memories.
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
"""Most runs (contiguous byte ranges) into which a plan is expanded at a time. Only a single block
may have more runs."""


@dataclass(frozen=True, slots=True)
class Region:
    """A range of memory, in this process or on a device.

    `address`, `num_bytes`: address and size of the range.
    `name`: name of the memory in messages.
    `device`: number of the device that has the memory, or HOST.
    """

    address: int
    num_bytes: int
    name: str
    device: int = HOST

    def array(self) -> NDArray[np.uint8]:
        """Returns the bytes of the memory as a writable array, uint8 [num_bytes]. Raises ValueError
        if the memory is on a device."""
        if self.device != HOST:
            raise ValueError(f"{self.name} lies on device {self.device}")
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.num_bytes).from_address(self.address))

    def offset_of(self, part: memoryview) -> int:
        """Returns the offset of `part`, a view into this memory, in bytes from the beginning of the
        memory."""
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
    """A plan of runs (contiguous byte ranges). For each run i, `num_bytes[i]` bytes are copied from
    `src` + `src_offsets[i]` to `dst` + `dst_offsets[i]`. The arrays are int64 [runs]."""

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
        """Number of the device that the copy reads or writes; HOST if it has host memory only."""
        return max(self.dst.device, self.src.device)

    @property
    def total_bytes(self) -> int:
        return int(self.num_bytes.sum())

    @staticmethod
    def build(
        dst: Region, src: Region, dst_offsets: Int64s, src_offsets: Int64s, num_bytes: Int64s
    ) -> "CopyPlan":
        """Makes a plan that copies these runs (contiguous byte ranges); the arguments are the
        plan's fields. Merges neighbouring runs that adjoin in both memories."""
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
        """Divides the runs into `whole` equal shares. Returns a plan with the runs of the shares
        from `begin` to `end` - 1."""
        mine = slice(self.num_runs * begin // whole, self.num_runs * end // whole)
        return CopyPlan(
            self.dst, self.src, self.dst_offsets[mine], self.src_offsets[mine], self.num_bytes[mine]
        )


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """A plan of whole blocks, between the memory of a vLLM engine and the arena.

    `recipe`: the byte ranges of a block, in the engine's memory and in its slot.
    `block_ids`: the engine's ids of the blocks, int64 [blocks].
    `slot_offsets`: offsets of the blocks' slots in the arena, in bytes, int64 [blocks].
    `to_engine`: True for a copy from the arena to the engine's memory (a load), False for a store.
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
        """Number of the device that the copy reads or writes; HOST if it has host memory only."""
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
        """Number of runs (contiguous byte ranges) of the blocks, before adjoining runs are
        merged."""
        return len(self.recipe.bases) * len(self.block_ids)

    def part(self, begin: int, end: int, whole: int) -> slice:
        """Divides the blocks into `whole` equal shares. Returns the slice of the blocks in the
        shares from `begin` to `end` - 1."""
        count = len(self.block_ids)
        return slice(count * begin // whole, count * end // whole)

    def share(self, begin: int, end: int, whole: int) -> CopyPlan:
        """Divides the blocks into `whole` equal shares. Returns a plan with the runs (contiguous
        byte ranges) of the blocks in the shares from `begin` to `end` - 1."""
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
    """Returns plans that copy blocks between the memory of a vLLM engine and the arena, one plan
    for each recipe.

    `recipes`: the byte ranges of a block, one recipe for each memory of the engine.
    `block_ids`: the engine's ids of the blocks, int64 [blocks].
    `slot_offsets`: offsets of the blocks' slots in the arena, in bytes, int64 [blocks].
    `to_engine`: True for copies from the arena to the engine's memory (a load), False for a store.
    `arena`: the arena.
    `engine`: the memories of the engine, by their handle id (`Recipe.handle_id`).
    """
    ids, offsets = np.ascontiguousarray(block_ids), np.ascontiguousarray(slot_offsets)
    return [
        BlockCopies(recipe, engine[recipe.handle_id], arena, ids, offsets, to_engine)
        for recipe in recipes
    ]


def num_shares(plan: Plan, piece_bytes: int) -> int:
    """Returns into how many equal shares to divide a plan, at least 1; the copy engine for host
    memory copies a share at a time. Each share then has at most about `piece_bytes` bytes, and at
    most about PIECE_RUNS runs (contiguous byte ranges)."""
    return max(1, -(-plan.total_bytes // piece_bytes), -(-plan.num_runs // PIECE_RUNS))
