"""Copy plans: what a copy engine copies from where to where. A *run* is a contiguous byte range.

Always true: a plan's bytes are checked to lie inside both memories when it is made. It lists whole
blocks, so its size does not depend on their runs.
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
"""Most runs of a share; only a single block may have more."""


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
        """Device that the copy involves; HOST if none."""
        return max(self.engine.device, self.arena.device)

    @property
    def total_bytes(self) -> int:
        return self.recipe.block_bytes * len(self.block_ids)

    def part(self, begin: int, end: int, whole: int) -> slice:
        """Blocks of shares `begin` to `end` - 1 of `whole` equal ones."""
        count = len(self.block_ids)
        return slice(count * begin // whole, count * end // whole)


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


def num_shares(plan: BlockCopies, piece_bytes: int) -> int:
    """Number of equal shares, at least 1, of about `piece_bytes` and PIECE_RUNS at most."""
    num_runs = len(plan.recipe.bases) * len(plan.block_ids)
    return max(1, -(-plan.total_bytes // piece_bytes), -(-num_runs // PIECE_RUNS))
