"""Staging memory is allocated once at a time, and completely freed."""

import errno
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray

from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.dataplane.plan import Region
from hotkv_server.memory.mapping import FileMapping
from hotkv_server.tiers.compression.staged import Staged

UNITS = 24


class StagedMachine(RuleBasedStateMachine):
    """Compares allocated parts with a list: parts never overlap, free memory is found, and writes
    leave half of the memory to reads."""

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
        """Returns the number of parts that have each unit."""
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


def test_short_memory_leaves_no_staging_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(memory: FileMapping) -> None:
        raise OSError(errno.ENOMEM, "short")

    monkeypatch.setattr(FileMapping, "populate", short)
    region = Region(0, SLOT_ALIGN, "arena")
    with pytest.raises(OSError, match="short"):
        Staged(region, UNITS * SLOT_ALIGN).open()
    assert b"hotkv-staging" not in Path("/proc/self/maps").read_bytes()
