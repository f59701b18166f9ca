"""Blocks that compress, and blocks that do not compress."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.dataplane.plan import Region
from hotkv_server.testing.tier_contract import SLOTS, Rig
from hotkv_server.tiers.compression import kernels
from hotkv_server.tiers.compression.form import room_bytes
from hotkv_server.tiers.compression.staged import Codec, Staged

ODD = np.array(
    [0, 0x8000, 1, 0x8001, 0x7F, 0x80, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7FFF, 0x7F7F], np.uint16
)
"""Zeros, denormals, infinities, NaNs of several kinds, the largest value."""


def keys_and_values(num_bytes: int, seed: int, odd_share: float = 0.0) -> Any:
    """Returns a block with values like those of models. `odd_share`: the share of odd values and
    random bits."""
    rng = np.random.default_rng(seed)
    floats = rng.normal(size=num_bytes // 2).astype(np.float32) * np.float32(2.0 ** (seed % 40))
    values = (floats.view(np.uint32) >> 16).astype(np.uint16)
    where = np.flatnonzero(rng.random(len(values)) < odd_share)
    values[where] = np.where(
        rng.random(len(where)) < 0.5,
        rng.choice(ODD, len(where)),
        rng.integers(0, 1 << 16, len(where), np.uint16),
    )
    return values.view(np.uint8)


def codec_by(by: Any, block: Any, room: Any) -> Codec:
    """Returns a codec that calls the functions of a module: kernels, or their reference."""
    codec = Codec(block, room)
    codec._kernels = by
    return codec


def encode(block: Any, room_bytes: int, by: Any = kernels) -> tuple[int, Any]:
    room = np.full(room_bytes, 0xA5, np.uint8)
    zero, size = np.zeros(1, np.int64), np.array([len(block)], np.int64)
    codec = codec_by(by, block, room)
    (used,) = codec.encode(zero, size, zero, np.array([room_bytes], np.int64)).tolist()
    return used, room


SLOT_BYTES = 8 * SLOT_ALIGN
ROOM_BYTES = room_bytes(SLOT_BYTES)
ARENA_BYTES = SLOTS * SLOT_BYTES


def compressible(number: int) -> Any:
    return keys_and_values(SLOT_BYTES, number)


def noise(number: int) -> Any:
    return np.random.default_rng(number).integers(0, 256, SLOT_BYTES, np.uint8)


def mixed(number: int) -> Any:
    return noise(number) if number % 3 == 0 else compressible(number)


@contextlib.contextmanager
def encoding_rig(
    make: Callable[[Region, Staged], Any],
    damage: Callable[[bytes, int], None],
    breaks: Callable[[], Any] | None = None,
    *,
    content: Callable[[int], Any] = mixed,
    staging_slots: int = 16,
) -> Iterator[Rig]:
    """Yields a rig over a tier that encodes. All staging memory is free at the end."""
    memory = np.zeros(ARENA_BYTES, np.uint8)
    arena = Region(memory.ctypes.data, ARENA_BYTES, "arena")
    staged = Staged(arena, staging_slots * SLOT_BYTES)
    staged.open()
    tier = make(arena, staged)
    try:
        yield Rig(tier, arena, damage, breaks, content, SLOT_BYTES)
        staged.check_invariants()
    finally:
        tier.close()
        assert not tier.figures().queued_bytes
