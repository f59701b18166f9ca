"""Makes blocks that compress well and blocks that do not compress, and tiers that encode (compress)
blocks."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.dataplane.plan import Region
from hotkv_server.testing.flush_contract import answer
from hotkv_server.testing.tier_contract import SLOTS, Bench, TierRig, key
from hotkv_server.tiers.compression import codec_kernels
from hotkv_server.tiers.compression.form import room_bytes
from hotkv_server.tiers.compression.staged import Codec, Staged
from hotkv_server.tiers.protocol import Blocks, Read, Write

ODD = np.array(
    [0, 0x8000, 1, 0x8001, 0x7F, 0x80, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7FFF, 0x7F7F], np.uint16
)
"""Unusual bfloat16 values: zeros, denormals, infinities, several NaNs, the largest value."""


def keys_and_values(num_bytes: int, seed: int, odd_share: float = 0.0) -> Any:
    """Returns a block of bfloat16 values, distributed as keys and values of a model. `odd_share`:
    the share of the values that are replaced, half by values from ODD and half by random bits."""
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
    """Returns a `Codec` that calls the functions of the module `by`: the compiled kernels or a
    reference implementation."""
    codec = Codec(block, room)
    codec._kernels = by
    return codec


BEFORE_BYTES = SLOT_ALIGN
"""Size of the margins before and after a block and its encoded form. They must stay
unchanged."""


def between(content: Any, others: int) -> Any:
    """Returns memory with this content, and with a margin of BEFORE_BYTES bytes before and after
    it. Each byte of the margins is `others`."""
    edge = np.full(BEFORE_BYTES, others, np.uint8)
    return np.concatenate([edge, content, edge])


def inner(memory: Any, others: int) -> Any:
    """Returns the content of a memory that `between` made, without its margins. Checks that each
    byte of the margins is still `others`."""
    assert (memory[:BEFORE_BYTES] == others).all() and (memory[-BEFORE_BYTES:] == others).all()
    return memory[BEFORE_BYTES:-BEFORE_BYTES]


def encode(block: Any, room_bytes: int, by: Any = codec_kernels) -> tuple[int, Any]:
    blocks, rooms = between(block, 0xC3), between(np.full(room_bytes, 0xA5, np.uint8), 0xA5)
    columns = [
        np.array([n], np.int64) for n in (BEFORE_BYTES, len(block), BEFORE_BYTES, room_bytes)
    ]
    (used,) = codec_by(by, blocks, rooms).encode(*columns).tolist()
    return used, inner(rooms, 0xA5)


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
    arena: Region | None = None,
) -> Iterator[TierRig]:
    """Yields a `TierRig` (a tier with an arena) whose tier encodes (compresses) blocks. Checks at
    the end that all staging memory, in which blocks are encoded, is free.

    make: makes the tier, given its arena and its staging memory.
    damage, breaks, content: fields of `TierRig`.
    staging_slots: size of the staging memory, in slots.
    arena: the arena's memory, ARENA_BYTES long; None to allocate it.
    """
    memory = np.zeros(ARENA_BYTES, np.uint8)
    arena = arena or Region(memory.ctypes.data, ARENA_BYTES, "arena")
    staged = Staged(arena, staging_slots * SLOT_BYTES)
    staged.open()
    tier = make(arena, staged)
    try:
        yield TierRig(tier, arena, damage, breaks, content, SLOT_BYTES)
        staged.check_invariants()
    finally:
        tier.close()
        assert not tier.figures().queued_bytes and not staged.held_bytes


def check_larger_blocks(bench: Bench, staging_slots: int = 16) -> None:
    """Writes and reads three blocks in one call. The middle one is larger than the staging memory,
    in which the tier encodes blocks. Checks that all three blocks are read back with the same
    bytes."""
    size = (staging_slots + 1) * SLOT_BYTES
    sizes = np.array([SLOT_BYTES, size, SLOT_BYTES], np.int64)
    slots = np.array([0, SLOT_BYTES, size + SLOT_BYTES], np.int64)
    end = size + 2 * SLOT_BYTES
    wanted = keys_and_values(end, 7)
    bench.arena[:end] = wanted
    blocks = Blocks([key(91), key(92), key(93)], slots, sizes)
    codes, _ = bench.answer(blocks)
    assert codes.tolist() == [Write.STORED] * 3
    assert bench.answer(blocks)[0].tolist() == [Write.PRESENT] * 3
    bench.arena[:end] = 0
    found = answer(lambda done: bench.tier.read(blocks, time.monotonic() + 20, done))
    assert found.tolist() == [Read.FOUND] * 3
    assert np.array_equal(bench.arena[:end], wanted)
