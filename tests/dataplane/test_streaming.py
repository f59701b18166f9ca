"""Compares the host's copy kernels, with and without streaming stores, with plain slices: odd
sizes, every misalignment, and no other byte changed."""

from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from hotkv_proto import native
from hotkv_proto.layout import Recipe
from hotkv_server.dataplane import host
from hotkv_server.dataplane.engines import CopyJob, Outcome
from hotkv_server.dataplane.host import HostCopyEngine
from hotkv_server.dataplane.plan import BlockCopies, Region
from tests.support.plans import runs_plan

GUARD = 0xA5
GAP_BYTES = 130
"""Between two runs; more than two cache lines, so that a line copied beyond a run is seen."""
LINE_BYTES = 64
FIRST_STREAMED_BYTES = 1024
HOWS = ["streamed", "plain"]


class Memories:
    """Random source bytes, and a destination full of guard values that begins at a multiple of
    64."""

    def __init__(self, num_bytes: int) -> None:
        self.src = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, dtype=np.uint8)
        self._room = np.full(num_bytes + LINE_BYTES, GUARD, np.uint8)
        start = -self._room.ctypes.data % LINE_BYTES
        self.dst = self._room[start : start + num_bytes]

    def plan(self, runs: list[tuple[int, int, int]]) -> BlockCopies:
        """runs: (destination offset, source offset, bytes) of each."""
        dst, src = (Region(one.ctypes.data, len(one), "memory") for one in (self.dst, self.src))
        return runs_plan(dst, src, *map(np.array, zip(*runs, strict=True)))

    def check(self, runs: list[tuple[int, int, int]]) -> None:
        """Exactly these runs were copied."""
        expected = np.full(len(self.dst), GUARD, np.uint8)
        for to, at, size in runs:
            expected[to : to + size] = self.src[at : at + size]
        wrong = np.flatnonzero(self.dst != expected)
        assert not len(wrong), f"{len(wrong)} bytes are wrong, the first at {wrong[0]}"


@pytest.mark.parametrize("how", HOWS)
def test_every_size_and_place_around_a_line(how: str) -> None:
    size_bytes = FIRST_STREAMED_BYTES + 2 * LINE_BYTES
    pitch = size_bytes + GAP_BYTES
    shapes = [(head, tail) for head in range(LINE_BYTES) for tail in range(0, LINE_BYTES, 7)]
    pitch = -(-pitch // LINE_BYTES) * LINE_BYTES
    runs = [
        (n * pitch + head, n * pitch + 1, FIRST_STREAMED_BYTES + tail)
        for n, (head, tail) in enumerate(shapes)
    ]
    memories = Memories((len(shapes) + 1) * pitch)
    ends: list[tuple[Outcome, str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "STREAMED_JOB_BYTES", 0 if how == "streamed" else 1 << 40)
        engine = HostCopyEngine(1)
        engine.submit(CopyJob([memories.plan(runs)], lambda *outcome: ends.append(outcome), None))
        engine.close()
    assert ends == [(Outcome.DONE, "")]
    memories.check(runs)


@pytest.mark.parametrize(("less", "streamed"), [(1, False), (0, True)])
def test_jobs_of_eight_mib_and_more_are_streamed(
    monkeypatch: pytest.MonkeyPatch, less: int, streamed: bool
) -> None:
    """The job's total decides, not a plan's or a piece's."""
    assert host.STREAMED_JOB_BYTES == 8 << 20
    kernels, said, ends = native.require("hotkv_proto.table_reading"), [], []

    def copy_blocks(*arguments: Any) -> None:
        said.append((len(arguments[2]), arguments[-1]))
        kernels.copy_blocks(*arguments)

    size, num_blocks = 64 << 10, 128
    memories = Memories(num_blocks * size)
    dst, src = (Region(one.ctypes.data, len(one), "memory") for one in (memories.dst, memories.src))
    plans = [
        BlockCopies(
            Recipe("kv", *(np.array([each], np.int64) for each in (0, size, 0, size - cut))),
            dst,
            src,
            half,
            half * size,
            to_engine=True,
        )
        for half, cut in ((np.arange(0, 127), 0), (np.arange(127, 128), less))
    ]
    monkeypatch.setattr(native, "require", lambda name: SimpleNamespace(copy_blocks=copy_blocks))
    engine = HostCopyEngine(2)
    engine.submit(CopyJob(plans, lambda *outcome: ends.append(outcome), None))
    engine.close()
    assert len(ends) == 1 and {how for _, how in said} == {streamed}
    assert sum(count for count, _ in said) == num_blocks, "a block was copied twice"
    # Two threads: pieces of at most 4 MiB.
    assert len(said) == 3
    runs = [(at * size, at * size, size - less * (at == 127)) for at in range(num_blocks)]
    memories.check(runs)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Recipe, list[int], list[int]]:
    """A recipe, block ids and slot offsets; runs may be adjacent on either side."""
    sizes = draw(
        st.lists(st.one_of(st.integers(0, 70), st.integers(900, 9000)), min_size=1, max_size=6)
    )
    gap = st.sampled_from([0, 0, 1, 63, GAP_BYTES])
    engine_gaps, slot_gaps = (
        draw(st.lists(gap, min_size=len(sizes) + 1, max_size=len(sizes) + 1)) for _ in range(2)
    )
    num_blocks = draw(st.integers(0, 5))
    ids, places = (
        draw(st.permutations(range(num_blocks + draw(st.integers(0, 1)))))[:num_blocks]
        for _ in range(2)
    )
    if draw(st.booleans()):
        ids, places = sorted(ids), sorted(places)
    spans = [sum(sizes) + sum(gaps) for gaps in (engine_gaps, slot_gaps)]
    ends = np.cumsum(sizes)
    bases, offsets = (ends - sizes + np.cumsum(gaps[:-1]) for gaps in (engine_gaps, slot_gaps))
    lengths = np.array(sizes, np.int64)
    recipe = Recipe(
        "kv",
        bases.astype(np.int64),
        np.full(len(sizes), spans[0], np.int64),
        offsets.astype(np.int64),
        lengths,
    )
    return recipe, list(ids), [place * spans[1] for place in places]


@pytest.mark.parametrize("to_engine", [True, False])
@pytest.mark.parametrize("how", HOWS)
@given(blocks(), st.integers(1, 20_000), st.integers(0, 70))
@settings(max_examples=30, deadline=None)
def test_blocks_are_copied_as_their_recipe_says(
    how: str,
    to_engine: bool,
    given: tuple[Recipe, list[int], list[int]],
    piece_bytes: int,
    misalignment: int,
) -> None:
    recipe, ids, slots = given
    end = misalignment + 8 * max(
        1, int((recipe.bases + recipe.slot_offsets + recipe.num_bytes).max()) + 8 * GAP_BYTES
    )
    memories, ends, copied = Memories(end), list[tuple[Outcome, str]](), list[int]()
    kernels = native.require("hotkv_proto.table_reading")

    def copy_blocks(*arguments: Any) -> None:
        copied.extend(arguments[2].tolist())
        kernels.copy_blocks(*arguments)

    dst, src = (
        Region(memory[misalignment:].ctypes.data, end - misalignment, "memory")
        for memory in (memories.dst, memories.src)
    )
    engine_side, arena = (dst, src) if to_engine else (src, dst)
    plan = BlockCopies(
        recipe, engine_side, arena, np.array(ids, np.int64), np.array(slots, np.int64), to_engine
    )
    expected = list[tuple[int, int, int]]()
    for block, slot in zip(ids, slots, strict=True):
        for base, stride, place, size in zip(
            *(column.tolist() for column in columns(recipe)), strict=True
        ):
            at_engine, at_slot = misalignment + block * stride + base, misalignment + slot + place
            expected.append((at_engine, at_slot, size) if to_engine else (at_slot, at_engine, size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "MAX_PIECE_BYTES", piece_bytes)
        patch.setattr(host, "STREAMED_JOB_BYTES", 0 if how == "streamed" else end**2)
        engine = HostCopyEngine(1)
        engine._kernels = SimpleNamespace(copy_blocks=copy_blocks)
        engine.submit(CopyJob([plan], lambda *outcome: ends.append(outcome), None))
        engine.close()
    assert ends == [(Outcome.DONE, "")] and copied == ids
    memories.check(expected)


def columns(recipe: Recipe) -> tuple[np.ndarray[Any, np.dtype[np.int64]], ...]:
    return recipe.bases, recipe.strides, recipe.slot_offsets, recipe.num_bytes
