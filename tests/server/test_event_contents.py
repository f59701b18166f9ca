"""Tests the ring file of blocks' contents against a naive model, also when full, restarted,
killed and damaged."""

import errno
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hotkv_proto.blocks import RunContent
from hotkv_proto.table import Words
from hotkv_server.cache.values import BoolMask
from hotkv_server.events import contents
from hotkv_server.events.contents import START, Contents
from hotkv_server.events.drive import StoredEvent
from tests.core.support import words_of

BLOCK_TOKENS = 4
KNOWN = [b"a" * 32, b"b" * 32]
SPACES = st.sampled_from(KNOWN)
NUMBERS, COUNTS = st.integers(0, 11), st.integers(1, 4)
RING_BYTES = 4096
NAMES = [words_of([number]).tobytes() for number in range(16)]
Block = tuple[bytes, int]


def run_of(version: int, first: int, count: int) -> StoredEvent:
    """Consecutive blocks of a chain. Token ids encode `version` and position."""
    numbers = range(first, first + count)
    tokens = np.repeat(numbers, BLOCK_TOKENS).astype(np.int32) + 1000 * version
    keys = tuple((("salt", b"digest", ("image", at)), None)[at % 2] for at in numbers)
    parent = words_of([first - 1])[0] if first else None
    content = RunContent(tokens, "adapter", keys if version % 2 else ())
    return StoredEvent(0, 0, words_of(numbers), parent, first, content)


def plain(run: StoredEvent) -> tuple[object, ...]:
    parent = None if run.parent is None else run.parent.tobytes()
    of_run = run.content.token_ids.tolist(), run.content.lora_name, run.content.extra_keys
    return run.depth, run.hashes.tobytes(), parent, *of_run


def content_of(book: Contents, fingerprint: bytes, number: int) -> StoredEvent | None:
    found, unknown = book.find(fingerprint, 0, [NAMES[number]])
    assert len(found) + len(unknown) == 1
    return found[0] if found else None


class Book(RuleBasedStateMachine):
    """Contents in the ring file and in dicts.

    stored: version of each block's last store.
    is_crowded: the cache has all blocks, more than the ring has room for.
    """

    @initialize()
    def begin(self) -> None:
        self.growth, contents.GROWTH_BYTES = contents.GROWTH_BYTES, RING_BYTES // 2
        self.longest, contents.RUN_BLOCKS = contents.RUN_BLOCKS, 2
        self.folder = tempfile.TemporaryDirectory()
        self.stored: dict[Block, int] = {}
        self.cached: set[Block] = set()
        self.is_crowded = False
        self.names: dict[bytes, list[str]] = {}
        self.known, self.others = [*KNOWN], list[bytes]()
        self.version = 0
        self.book = self.opened()

    def teardown(self) -> None:
        # Known names must find room in a full ring.
        for number in range(RING_BYTES // 200):
            self.known.append(number.to_bytes(32, "little"))
            self.book.add_name(self.known[-1], "n" * 200)
            assert self.book.names(self.known[-1])
        contents.GROWTH_BYTES, contents.RUN_BLOCKS = self.growth, self.longest
        self.book.close()
        self.folder.cleanup()

    def opened(self) -> Contents:
        return Contents(Path(self.folder.name, "contents"), RING_BYTES, self.present, self.known)

    def present(self, fingerprint: bytes, group_index: int, hashes: Words) -> BoolMask:
        numbers = [NAMES.index(row.tobytes()) for row in hashes]
        return np.array(
            [self.is_crowded or (fingerprint, number) in self.cached for number in numbers],
            np.bool_,
        )

    @rule(fingerprint=SPACES, first=NUMBERS, count=COUNTS, times=st.sampled_from([1, 2, 50]))
    def store(self, fingerprint: bytes, first: int, count: int, times: int) -> None:
        for _ in range(times):
            self.version += 1
            self.book.keep(fingerprint, run_of(self.version, first, count))
        for number in range(first, first + count):
            self.stored[fingerprint, number] = self.version
            assert self.content(fingerprint, number) is not None, "the newest run is not kept"

    @rule(fingerprint=SPACES, first=NUMBERS)
    def store_while_they_are_read(self, fingerprint: bytes, first: int) -> None:
        self.store(fingerprint, first, 1, 1)
        runs = self.book.runs()
        next(runs)
        self.store(fingerprint, first, 1, 1)
        tokens = run_of(self.version, first, 1).content.token_ids.tolist()
        found = [known.run().content.token_ids.tolist() for known in runs]
        assert found.count(tokens) == 1

    @rule(fingerprint=SPACES, numbers=st.lists(NUMBERS, unique=True))
    def find_many(self, fingerprint: bytes, numbers: list[int]) -> None:
        found, unknown = self.book.find(fingerprint, 0, [NAMES[number] for number in numbers])
        blocks = [run.part(at, at + 1) for run in found for at in range(len(run.hashes))]
        expected = {number: self.content(fingerprint, number) for number in numbers}
        assert unknown == [at for at, one in enumerate(numbers) if expected[one] is None]
        known = [plain(one) for one in expected.values() if one is not None]
        assert sorted(map(plain, blocks)) == sorted(known)

    @rule(fingerprint=SPACES, first=NUMBERS)
    def without_tokens(self, fingerprint: bytes, first: int) -> None:
        empty = RunContent(np.empty(0, np.int32))
        self.book.keep(fingerprint, StoredEvent(0, 0, words_of([first]), None, 0, empty))

    @rule(at=NUMBERS)
    def cache(self, at: int) -> None:
        """Contents of cached blocks must be kept; those of three always fit."""
        known = [block for block in self.stored if self.content(*block) is not None]
        if known and len(self.cached) < 3 and not self.is_crowded:
            self.cached.add(known[at % len(known)])

    @rule()
    def crowd(self) -> None:
        self.is_crowded = True
        self.cached.clear()
        for number in range(24):
            self.store((b"a" * 32, b"b" * 32)[number % 2], number // 2, 1, 1)

    @rule()
    def evict(self) -> None:
        self.cached.clear()

    @rule(fingerprint=SPACES, name=st.sampled_from(["m", "org/m", "ü"]))
    def name(self, fingerprint: bytes, name: str) -> None:
        known = self.names.setdefault(fingerprint, [])
        self.book.add_name(fingerprint, name)
        known += [name] * (name not in known)

    @rule(count=st.sampled_from([1, 60]))
    def name_of_others(self, count: int) -> None:
        """A full ring must drop names of key spaces that the server no longer has."""
        for _ in range(count):
            self.others.append(len(self.others).to_bytes(32, "big"))
            self.book.add_name(self.others[-1], "n" * 200)
        named = sum(map(len, map(self.book.names, self.others)))
        assert 0 < named <= RING_BYTES // 200

    @rule(is_killed=st.booleans())
    def restart(self, is_killed: bool) -> None:
        before = {block: self.content(*block) is None for block in self.stored}
        if not is_killed:
            self.book.close()
        self.book = self.opened()
        assert before == {block: self.content(*block) is None for block in self.stored}

    @rule(at=st.one_of(st.integers(8, 31), st.integers(START, START + RING_BYTES - 1)))
    def damage(self, at: int) -> None:
        """Afterwards contents may be unknown or of an earlier store, but never wrong."""
        path = Path(self.folder.name, "contents")
        self.book.close()
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"\xff")
        self.cached.clear()
        self.book = self.opened()
        self.names = {one: self.book.names(one) for one in self.names}
        for block, version in self.stored.items():
            if (found := self.content(*block)) is not None:
                self.stored[block] = int(found.content.token_ids[0]) // 1000
            assert self.stored[block] <= version

    def content(self, fingerprint: bytes, number: int) -> StoredEvent | None:
        return content_of(self.book, fingerprint, number)

    @invariant()
    def agrees(self) -> None:
        for (fingerprint, number), version in self.stored.items():
            found = self.content(fingerprint, number)
            if found is None:
                assert (fingerprint, number) not in self.cached, "a cached block is forgotten"
                continue
            assert plain(found) == plain(run_of(version, number, 1))
            assert self.book.find(fingerprint, 1, [NAMES[number]]) == ([], [0])
        for fingerprint, names in self.names.items():
            assert sorted(self.book.names(fingerprint)) == sorted(names)

    @invariant()
    def yields_each_known_block_once(self) -> None:
        found: list[tuple[bytes, int]] = []
        deepest: dict[bytes, int] = {}
        for known in self.book.runs():
            first = known.run().depth
            assert first >= deepest.get(known.fingerprint, 0), "a block comes before its parent"
            deepest[known.fingerprint] = first
            found += [(known.fingerprint, first + at) for at in np.flatnonzero(known.is_newest)]
        known_blocks = [block for block in self.stored if self.content(*block) is not None]
        assert sorted(found) == sorted(known_blocks)
        assert self.book.num_blocks == len(found)
        self.book.check_invariants()


TestBook = Book.TestCase


def test_thread_and_askers_write_the_same_queue(tmp_path: Path) -> None:
    book = Contents(tmp_path / "contents", 1 << 20, lambda *_: np.zeros(0, np.bool_))
    space = b"a" * 32
    for version in range(1, 400):
        book.keep(space, run_of(version, version % 12, 1))
        if version % 7 == 0:
            # The read then comes just before or during the thread's write.
            time.sleep(contents.GATHER_S / 5)
            assert content_of(book, space, version % 12) is not None
    assert book.is_alive()
    book.close()
    again = Contents(tmp_path / "contents", 1 << 20, lambda *_: np.zeros(0, np.bool_))
    assert again.num_blocks == 12
    again.close()


def test_ring_that_cant_grow_keeps_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "GROWTH_BYTES", RING_BYTES)
    for num_steps in (0, 1):
        path = tmp_path / str(num_steps)
        book = Contents(path, 4 * RING_BYTES, lambda *_: np.zeros(1, np.bool_))
        if num_steps:
            book.keep(b"a" * 32, run_of(1, 0, 1))
            assert book.num_blocks == 1
        with monkeypatch.context() as full:
            full.setattr(contents.os, "posix_fallocate", failing)
            for version in range(100):
                book.keep(b"a" * 32, run_of(version, version % 12, 1))
            assert 0 < book.num_blocks <= 12 if num_steps else not book.num_blocks
            assert path.stat().st_size == START + num_steps * RING_BYTES
        book.close()


def test_a_damaged_header_costs_the_contents_only(tmp_path: Path) -> None:
    path, size = tmp_path / "contents", contents.GROWTH_BYTES
    header = contents.HEADER.pack(contents.MAGIC, size, size - 4, size + 16)
    path.write_bytes(header.ljust(START + size, b"\0"))
    Contents(path, size, lambda *_: np.zeros(0, np.bool_)).close()


def failing(*arguments: Any) -> None:
    raise OSError(errno.ENOSPC, "no room")
