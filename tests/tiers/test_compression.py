"""Tests `tiers.compression`: bytes come back, malformed input is refused within its memory,
staging memory is lent once at a time."""

import ctypes
import errno
import mmap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray

from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.dataplane.plan import Region
from hotkv_server.memory.mapping import FileMapping
from hotkv_server.tiers.compression import codec_kernels, form
from hotkv_server.tiers.compression.staged import Codec, Staged
from tests.oracles import compression as oracle
from tests.support.waiting import WAIT_S, wait_for
from tests.tiers.encodings import BEFORE_BYTES, between, codec_by, encode, inner, keys_and_values

GROUP_BYTES = form.GROUP_VALUES * form.VALUE_BYTES
TILE_BYTES = form.TILE_VALUES * form.VALUE_BYTES
LARGEST_BYTES = 2 * TILE_BYTES + 5 * GROUP_BYTES
SIZES = st.integers(1, LARGEST_BYTES // GROUP_BYTES).map(lambda groups: groups * GROUP_BYTES)


def decode(room: Any, num_bytes: int) -> tuple[int, Any]:
    blocks, rooms = between(np.full(num_bytes, 0x5A, np.uint8), 0x5A), between(room, 0xFF)
    columns = [np.array([n], np.int64) for n in (BEFORE_BYTES, num_bytes, BEFORE_BYTES, len(room))]
    (is_sound,) = Codec(blocks, rooms).decode(*columns).tolist()
    return is_sound, inner(blocks, 0x5A)


def all_escapes(num_bytes: int) -> int:
    """Largest size that a block's form can have."""
    return form.escapes_at(num_bytes // 2) + num_bytes // 2 * form.ESCAPE_BYTES


@given(num_bytes=SIZES, seed=st.integers(0, 1000), share=st.sampled_from([0, 0.001, 0.1, 1]))
@example(num_bytes=12 * TILE_BYTES, seed=1, share=0.001)
def test_blocks_come_back_as_the_reference_says(num_bytes: int, seed: int, share: float) -> None:
    block = keys_and_values(num_bytes, seed, share)
    used, room = encode(block, all_escapes(num_bytes))
    expected_used, expected = encode(block, all_escapes(num_bytes), oracle)
    assert used == expected_used > 0
    assert np.array_equal(room, expected)
    assert not room[used:].any()
    is_sound, back = decode(room, num_bytes)
    assert is_sound and np.array_equal(back, block)


@given(pages=st.integers(1, 40), seed=st.integers(0, 100))
@settings(max_examples=20)
def test_rooms_hold_keys_values_no_old_bytes(pages: int, seed: int) -> None:
    block = keys_and_values(pages * SLOT_ALIGN, seed)
    room_bytes = form.room_bytes(len(block))
    assert not room_bytes % SLOT_ALIGN
    used, room = encode(block, room_bytes)
    assert 0 < used <= room_bytes and not room[used:].any()


def test_a_block_of_smollm2_takes_three_quarters() -> None:
    # 16 tokens, 30 layers, keys and values, 3 heads, 64 channels, 2 bytes.
    num_bytes = 16 * 30 * 2 * 3 * 64 * 2
    assert num_bytes / form.room_bytes(num_bytes) >= 1.30


@pytest.mark.parametrize("kind", ["random", "float32", "float16", "fp8"])
def test_other_bytes_do_not_fit(kind: str) -> None:
    rng, num_bytes = np.random.default_rng(3), 16 * SLOT_ALIGN
    block = {
        "random": rng.integers(0, 256, num_bytes, np.uint8),
        "float32": rng.normal(size=num_bytes // 4).astype(np.float32).view(np.uint8),
        "float16": rng.normal(size=num_bytes // 2).astype(np.float16).view(np.uint8),
        # float8_e4m3: a sign, 4 bits of exponent (near 7), 3 of mantissa.
        "fp8": (rng.normal(7, 1.5, num_bytes).clip(0, 15).astype(np.uint8) << 3)
        | rng.integers(0, 8, num_bytes, np.uint8)
        | rng.integers(0, 2, num_bytes, np.uint8) << 7,
    }[kind]
    assert encode(block, form.room_bytes(num_bytes))[0] == 0


def test_a_form_fits_its_room_to_the_byte() -> None:
    block = keys_and_values(4 * SLOT_ALIGN, 5, 0.01)
    used, room = encode(block, all_escapes(len(block)))
    assert encode(block, used)[0] == used
    assert encode(block, used - 1)[0] == 0
    for room_bytes in (0, 1, 8, 24, 63, form.HEAD_BYTES):
        assert encode(block, room_bytes)[0] == 0
    assert decode(room[:used], len(block))[0] == 1
    assert decode(room[: used - 1], len(block))[0] == 0


class Guarded:
    """Arrays that end at an inaccessible page: an access beyond kills the process. `check`:
    nothing was written before them."""

    def __init__(self) -> None:
        self._mappings: list[mmap.mmap] = []
        self._befores: list[Any] = []

    def array(self, content: Any) -> Any:
        pages = -(-len(content) // mmap.PAGESIZE) + 1
        mapping = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
        self._mappings.append(mapping)
        whole = np.frombuffer(mapping, np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        end = pages * mmap.PAGESIZE
        address = ctypes.c_void_p(whole.ctypes.data + end)
        assert not libc.mprotect(address, ctypes.c_size_t(mmap.PAGESIZE), 0)
        self._befores.append(whole[: end - len(content)])
        whole[: end - len(content)] = 0xEE
        whole[end - len(content) : end] = content
        return whole[end - len(content) : end]

    def check(self) -> None:
        assert all((before == 0xEE).all() for before in self._befores)


GOOD_BYTES = TILE_BYTES + 2 * GROUP_BYTES
_, GOOD = encode(keys_and_values(GOOD_BYTES, 7, 0.02), all_escapes(GOOD_BYTES))
HEADS = form.HEAD_BYTES + 2 * form.TILE_BYTES
ESCAPES = form.escapes_at(GOOD_BYTES // 2)
NUM_ESCAPES = int(GOOD[16:24].view("<i8")[0])
OF_HEAD = [0, 4, 5, 8, 16, 17, 23]
CHANGES = st.lists(
    st.tuples(
        st.one_of(
            st.sampled_from(OF_HEAD),
            st.integers(0, HEADS - 1),
            st.integers(ESCAPES, ESCAPES + 3 * NUM_ESCAPES - 1),
            st.integers(0, len(GOOD) - 1),
        ),
        st.integers(0, 255),
    ),
    max_size=4,
)


def each_spoiled(test: Callable[..., None]) -> Callable[..., None]:
    """Adds examples: each important byte of the head changed, and other sizes."""
    for at in OF_HEAD:
        test = example(changes=[(at, int(GOOD[at]) ^ 0xFF)], cut=0, grown=0)(test)
    for grown in (-2, -1, 1):
        test = example(changes=[], cut=0, grown=grown)(test)
    return test


@given(
    changes=CHANGES,
    cut=st.one_of(st.just(0), st.integers(0, len(GOOD)), st.integers(0, len(GOOD) - ESCAPES)),
    grown=st.sampled_from([-2, -1, 0, 0, 0, 1]),
)
@each_spoiled
def test_malformed_forms_stay_in_their_memory(
    changes: list[tuple[int, int]], cut: int, grown: int
) -> None:
    spoiled = GOOD[: len(GOOD) - cut].copy()
    for at, byte in changes:
        if at < len(spoiled):
            spoiled[at] = byte
    num_bytes = GOOD_BYTES + grown * GROUP_BYTES
    answers = []
    for by in (codec_kernels, oracle):
        guarded = Guarded()
        room, block = guarded.array(spoiled), guarded.array(np.zeros(num_bytes, np.uint8))
        columns = [np.array([number], np.int64) for number in (0, num_bytes, 0, len(spoiled))]
        (is_sound,) = codec_by(by, block, room).decode(*columns).tolist()
        guarded.check()
        assert np.array_equal(room, spoiled)
        answers.append((is_sound, block.tobytes() if is_sound else b""))
    assert answers[0] == answers[1]
    assert answers[0][0] or cut or grown or changes


UNITS = 24


class StagedMachine(RuleBasedStateMachine):
    """Against a list of parts. Writes may use half of the memory, so that reads always have the
    other half."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = np.zeros(SLOT_ALIGN, np.uint8)
        region = Region(self.arena.ctypes.data, SLOT_ALIGN, "arena")
        self.staged = Staged(region, UNITS * SLOT_ALIGN)
        self.parts: list[tuple[int, int, bool]] = []
        self.is_open = False

    @rule(units=st.integers(1, UNITS + 2), is_write=st.booleans())
    def take(self, units: int, is_write: bool) -> None:
        size = units * SLOT_ALIGN
        self.is_open |= units <= UNITS
        place = self.staged.take(size, 0.0, is_write=is_write)
        writing = sum(size for _, size, writes in self.parts if writes)
        if is_write and writing + size > max(self.staged.num_bytes // 2, size):
            assert place is None, "a write took what is for reads"
        else:
            has_run = units <= UNITS and any(
                not self.used()[at : at + units].any() for at in range(UNITS - units + 1)
            )
            assert (place is not None) == has_run, "free memory is refused, or used memory given"
        if place is not None:
            self.parts.append((place, size, is_write))

    @precondition(lambda self: self.parts)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        place, size, is_write = self.parts.pop(data.draw(st.integers(0, len(self.parts) - 1)))
        self.staged.give(place, size, is_write=is_write)

    @rule(rooms=st.lists(st.integers(1, UNITS + 2), max_size=6), is_write=st.booleans())
    def cut(self, rooms: list[int], is_write: bool) -> None:
        sizes = np.array(rooms, np.int64) * SLOT_ALIGN
        parts = list(self.staged.parts(sizes, is_write=is_write))
        assert [row for part in parts for row in range(len(rooms))[part]] == [*range(len(rooms))]
        most = self.staged.num_bytes // (2 if is_write else 1)
        assert all(sizes[part].sum() <= most or len(sizes[part]) == 1 for part in parts)

    def used(self) -> NDArray[np.int64]:
        """How many parts contain each unit of SLOT_ALIGN bytes; more than one is an overlap."""
        used = np.zeros(UNITS, np.int64)
        for place, size, _ in self.parts:
            used[place // SLOT_ALIGN : (place + size) // SLOT_ALIGN] += 1
        return used

    @invariant()
    def agrees(self) -> None:
        assert self.used().max() <= 1
        assert self.staged.held_bytes == self.is_open * self.staged.num_bytes
        if not self.parts:
            self.staged.check_invariants()

    def teardown(self) -> None:
        self.staged.close()


TestStaged = StagedMachine.TestCase


@pytest.mark.parametrize("how", ["give", "stop"])
def test_who_waits_for_staging_memory_is_woken(how: str) -> None:
    arena = np.zeros(SLOT_ALIGN, np.uint8)
    staged = Staged(Region(arena.ctypes.data, SLOT_ALIGN, "arena"), UNITS * SLOT_ALIGN)
    assert staged.take(staged.num_bytes, 0.0, is_write=False) == 0
    with ThreadPoolExecutor() as threads:
        until_s = time.monotonic() + 2 * WAIT_S
        waiting = threads.submit(staged.take, SLOT_ALIGN, until_s, is_write=False)
        wait_for(lambda: vars(staged._changed)["_waiters"], "nobody waits")
        if how == "give":
            staged.give(0, staged.num_bytes, is_write=False)
        else:
            staged.stop()
        assert waiting.result(WAIT_S) == (0 if how == "give" else None)
    staged.close()


def test_short_memory_leaves_no_staging_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(memory: FileMapping) -> None:
        raise OSError(errno.ENOMEM, "short")

    def mapped() -> int:
        return Path("/proc/self/maps").read_bytes().count(b"hotkv-staging")

    monkeypatch.setattr(FileMapping, "populate", short)
    region = Region(0, SLOT_ALIGN, "arena")
    before = mapped()  # another test's may still be there
    with pytest.raises(OSError, match="short"):
        Staged(region, UNITS * SLOT_ALIGN).open()
    assert mapped() <= before
