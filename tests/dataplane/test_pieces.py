"""Tests how copy plans are cut into pieces for a CUDA device, against plain Python."""

from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from hotkv_proto.layout import Recipe
from hotkv_server.dataplane.cuda.pieces import pieces, plan_staged
from hotkv_server.dataplane.cuda.values import MAX_PIECE_RUNS, CudaCopySettings, Direction, Method
from hotkv_server.dataplane.plan import BlockCopies, Region
from hotkv_server.device.runtime import Int64s
from tests.support.plans import runs_plan

ARENA, DEVICE = 1 << 40, 1 << 46
ARENA_BYTES = 1 << 20


@dataclass
class Pinned:
    piece_bytes: int
    pinned_bytes: int
    address: int = ARENA
    num_bytes: int = ARENA_BYTES


@st.composite
def host_runs(draw: st.DrawFn, space: int = ARENA_BYTES) -> tuple[list[int], list[int]]:
    """(offsets, sizes) in any order, without overlaps, often adjacent."""
    page = draw(st.sampled_from([1, 7, 512, 4096, 65536]))
    numbers = draw(st.lists(st.integers(0, min(space // page, 48) - 1), unique=True, max_size=40))
    sizes = draw(
        st.lists(st.just(page) | st.integers(0, page), min_size=len(numbers), max_size=len(numbers))
    )
    return [number * page for number in numbers], sizes


@settings(max_examples=60, deadline=None)
@given(
    host_runs(),
    st.integers(1, 3),
    st.sampled_from([4096, 3 * 4096, 1 << 18, 1 << 30]),
    st.floats(0, 1),
    st.sampled_from(Direction),
    st.sampled_from([Method.BATCH, Method.STAGED]),
    st.integers(4096, 1 << 17),
    st.integers(4096, 1 << 15),
)
def test_pieces_move_every_byte_once_within_bounds(
    runs: tuple[list[int], list[int]],
    num_plans: int,
    registration_bytes: int,
    pinned_ratio: float,
    direction: Direction,
    method: Method,
    piece_bytes: int,
    staging_bytes: int,
) -> None:
    pinned_bytes = int(ARENA_BYTES * pinned_ratio) // registration_bytes * registration_bytes
    if pinned_ratio == 1:
        pinned_bytes = ARENA_BYTES
    arena = Pinned(registration_bytes, pinned_bytes)
    told = CudaCopySettings(piece_bytes=piece_bytes, depth=1, staging_bytes=2 * staging_bytes)
    plans, to_load = [], direction is Direction.LOAD
    # Per byte of the arena its device address; 0: not copied.
    wanted, found = np.zeros((2, ARENA_BYTES), np.int64)
    for number in range(num_plans):
        offsets, sizes = (np.array(column[number::num_plans], np.int64) for column in runs)
        # On the device the runs lie one behind the other; in the arena anywhere.
        packed = np.cumsum(sizes) - sizes
        on_host = Region(ARENA, ARENA_BYTES, "arena")
        on_device = Region(DEVICE + number * ARENA_BYTES, ARENA_BYTES, "memory", 0)
        dst, src = (on_device, on_host) if to_load else (on_host, on_device)
        to, from_ = (packed, offsets) if to_load else (offsets, packed)
        plans.append(runs_plan(dst, src, to, from_, sizes))
        paint(wanted, offsets, on_device.address + packed, sizes)
    room = told.slot_staging_bytes if method is Method.STAGED else piece_bytes
    for piece in pieces(plans, direction, arena, told, lambda page, run: method):
        paint(found, piece.host - ARENA, piece.device, piece.num_bytes)
        ends = piece.host + piece.num_bytes
        is_pinned = (ends <= ARENA + pinned_bytes).all()
        assert piece.direction is direction and piece.method is (method if is_pinned else None)
        assert is_pinned or (ends > ARENA + pinned_bytes).all()
        assert 0 < len(piece.host) <= MAX_PIECE_RUNS and (piece.num_bytes > 0).all()
        assert piece.total_bytes <= (room if is_pinned else piece_bytes)
        for edge in (piece.host, ends - 1):
            assert ((edge - ARENA) // registration_bytes == piece.registration).all()
        assert (piece.dst is piece.device) == to_load != (piece.src is piece.device)
        if piece.method is Method.STAGED:
            plan = plan_staged(piece.host, piece.num_bytes, piece.registration)
            assert int((plan.starts + plan.num_bytes).max()) <= told.slot_staging_bytes
    assert np.array_equal(found, wanted)


def paint(places: Int64s, offsets: Int64s, addresses: Int64s, sizes: Int64s) -> None:
    """Records each byte's device address in `places` (int64 [bytes of the arena], 0: none)."""
    for at, address, size in zip(offsets, addresses, sizes, strict=True):
        assert not places[at : at + size].any(), "a byte is moved twice"
        places[at : at + size] = address + np.arange(size)


def test_separate_layer_memories_are_one_arena_run() -> None:
    # 64 blocks of 8 layers, each with its own memory on the device; pages of 4 KiB.
    blocks, layers, page = 64, 8, 4096
    arena = Region(ARENA, ARENA_BYTES * 4, "arena")
    slots = (
        np.random.default_rng(0).permutation(2 * blocks)[:blocks].astype(np.int64) * layers * page
    )
    ids = np.arange(blocks, dtype=np.int64)
    plans = [
        BlockCopies(
            Recipe("kv", *(np.array([each]) for each in (0, page, layer * page, page))),
            Region(DEVICE + layer * ARENA_BYTES, ARENA_BYTES, "layer", 0),
            arena,
            ids,
            slots,
            to_engine=True,
        )
        for layer in range(layers)
    ]
    asked: list[tuple[int, int]] = []

    def choose(page_bytes: int, slot_run_bytes: int) -> Method:
        asked.append((page_bytes, slot_run_bytes))
        return Method.STAGED

    (piece,) = pieces(
        plans,
        Direction.LOAD,
        Pinned(1 << 22, 1 << 22, num_bytes=1 << 22),
        CudaCopySettings(),
        choose,
    )
    assert asked[0][0] == page and asked[0][1] >= layers * page
    assert len(plan_staged(piece.host, piece.num_bytes, piece.registration).starts) <= blocks


def test_a_large_job_is_planned_piece_by_piece() -> None:
    count = 5 * MAX_PIECE_RUNS + 3
    arena, memory = Region(ARENA, 8 * count, "arena"), Region(DEVICE, 8 * count, "memory", 0)
    where = np.arange(count, dtype=np.int64) * 8
    plan = runs_plan(memory, arena, where[::-1].copy(), where, np.full(count, 8, np.int64))
    asked: list[int] = []
    made = pieces(
        [plan],
        Direction.LOAD,
        Pinned(1 << 20, 1 << 20),
        CudaCopySettings(),
        lambda page, run: asked.append(page) or Method.BATCH,
    )
    first = next(made)
    assert len(asked) == 1 and first.total_bytes <= MAX_PIECE_RUNS * 8
    assert first.total_bytes + sum(piece.total_bytes for piece in made) == 8 * count
