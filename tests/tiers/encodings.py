"""Blocks that compress well, or not, and tiers that encode."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.dataplane.plan import Region
from hotkv_server.tiers.compression import codec_kernels
from hotkv_server.tiers.compression.form import room_bytes
from hotkv_server.tiers.compression.staged import Codec, Staged
from hotkv_server.tiers.protocol import (
    Read,
    Write,
)
from tests.contracts.flush_contract import answer
from tests.contracts.tier_contract import (
    SLOTS,
    Bench,
    TierRig,
    key,
    shared_blocks,
)

ODD = np.array(
    [0, 0x8000, 1, 0x8001, 0x7F, 0x80, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7FFF, 0x7F7F], np.uint16
)
"""Zeros, denormals, infinities, NaNs, and the largest value."""


def keys_and_values(num_bytes: int, seed: int, odd_share: float = 0.0) -> Any:
    """bfloat16, distributed as a model's; `odd_share` of them replaced, half by ODD and half by
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
    """`by`: the compiled kernels or a reference."""
    codec = Codec(block, room)
    codec._kernels = by
    return codec


BEFORE_BYTES = SLOT_ALIGN
"""Margins before and after a block and its form, which must not change."""


def between(content: Any, others: int) -> Any:
    """With a margin of `others` on both sides."""
    edge = np.full(BEFORE_BYTES, others, np.uint8)
    return np.concatenate([edge, content, edge])


def inner(memory: Any, others: int) -> Any:
    """The content that `between` got; checks the margins."""
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
    """Checks at the end that all staging memory is free.

    make: makes the tier, given arena and staging memory.
    arena: ARENA_BYTES long; None: allocated.
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
    """The middle one of three blocks is larger than the staging memory."""
    size = (staging_slots + 1) * SLOT_BYTES
    sizes = np.array([SLOT_BYTES, size, SLOT_BYTES], np.int64)
    slots = np.array([0, SLOT_BYTES, size + SLOT_BYTES], np.int64)
    end = size + 2 * SLOT_BYTES
    wanted = keys_and_values(end, 7)
    bench.arena[:end] = wanted
    blocks = shared_blocks([key(91), key(92), key(93)], slots, sizes)
    codes, _ = bench.answer(blocks)
    assert codes.tolist() == [Write.STORED] * 3
    assert bench.answer(blocks)[0].tolist() == [Write.PRESENT] * 3
    bench.arena[:end] = 0
    found = answer(lambda done: bench.tier.read(blocks, time.monotonic() + 20, done))
    assert found.tolist() == [Read.FOUND] * 3
    assert np.array_equal(bench.arena[:end], wanted)
