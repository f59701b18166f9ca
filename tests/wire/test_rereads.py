"""Tests readers of the block table whose bucket changes between two reads of its sequence
number. Kernels run as Python with hooks in `load32` and `reload32`, so timing does not matter."""

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hotkv_proto import native, table
from hotkv_proto.table import (
    SLOT_ALIGN,
    Words,
    hash_prefixes,
    hash_words,
    probe_reference,
)
from hotkv_server.cache.table.index import BlockIndex
from tests.core.support import crafted_hash, make_table

SALT = 3
NUM_BUCKETS = 2
TAG, OTHER_TAG = 7, 8
BLOCK = crafted_hash(0, NUM_BUCKETS, TAG, 1, SALT, 16)
OTHER = crafted_hash(0, NUM_BUCKETS, OTHER_TAG, 1, SALT, 16)


class Scene:
    """A writer replaces `BLOCK` by `OTHER` in two halves.

    half: the new entry word, with the old tag.
    rest: the new tag.
    """

    def __init__(self) -> None:
        index = BlockIndex(make_table(8, NUM_BUCKETS))
        index.add_key_space(2, [SALT])
        words, places = hash_words(BLOCK, 16), np.zeros(1, np.int64)
        entries = index.insert(2, 0, words, places, SLOT_ALIGN, places, 1)
        index.publish(entries, index.mixed(entries), np.zeros(1, np.uint64))
        self.entry, self.reads = int(entries[0]), 0
        self.buckets: Words = index.table.buckets
        self.records: Words = index.table.records
        self.way = int(np.flatnonzero(self.buckets[0, table.ENTRIES :] == self.entry)[0])
        # The record of the block that comes into the bucket.
        self.other_entry = self.entry + 1
        self.records[self.other_entry] = self.records[self.entry]
        self.records[self.other_entry, table.W_OFFSET] = 99

    def half(self) -> None:
        self.buckets[0, table.SEQ] += 1
        self.buckets[0, table.ENTRIES + self.way] = self.other_entry

    def rest(self) -> None:
        self.buckets[0, table.TAGS + self.way] = OTHER_TAG
        self.records[self.other_entry, :4] = hash_words(OTHER, 16)[0, :4]
        self.buckets[0, table.SEQ] += 1

    def step(self) -> None:
        self.reads += 1
        if self.reads == 1:
            self.half()
        elif self.reads == 2:
            self.rest()


class Watched(np.ndarray[Any, Any]):
    after: Callable[[], None] = staticmethod(lambda: None)

    def __getitem__(self, at: Any) -> Any:
        value = np.asarray(self)[at]
        value = value.copy() if isinstance(value, np.ndarray) else value
        self.after()
        return value


def watched(array: Words, after: Callable[[], None]) -> Any:
    view = array.view(Watched)
    view.after = after  # type: ignore[method-assign]
    return view


def as_python(name: str, scene: Scene) -> Callable[..., None]:
    """A kernel as Python. The writer acts after its first read of a sequence number, and before
    the second."""
    kernels: Any = native.load("hotkv_proto.table_reading")

    def load32(array: Words, row: int, column: int) -> np.uint32:
        value = array[row, column]
        if scene.reads == 0:
            scene.step()
        return value

    def reload32(array: Words, row: int, column: int) -> np.uint32:
        if scene.reads == 1:
            scene.step()
        return array[row, column]

    def source(name: str) -> Callable[..., Any]:
        return types.FunctionType(getattr(kernels, name).py_func.__code__, names)

    names = {**vars(kernels), "load32": load32, "reload32": reload32}
    names["prefetch"] = lambda array, row: None
    names |= {inner: source(inner) for inner in ("mix", "home_bucket", "_same_key")}
    return source(name)


def probed(how: str, scene: Scene) -> int:
    prefixes = hash_prefixes(BLOCK, 16)
    if how == "reference":
        # The halves of the change come after the first and the second read.
        return int(probe_reference(watched(scene.buckets, scene.step), prefixes, SALT)[0])
    out = np.empty(1, np.uint32)
    with np.errstate(over="ignore"):
        as_python("probe", scene)(scene.buckets, prefixes, np.uint64(SALT), out)
    return int(out[0])


def found(how: str, scene: Scene) -> int:
    """The record's number; 0: not found. `how` is ignored."""
    words, out = hash_words(BLOCK, 16), np.empty(1, np.uint32)
    find, where = as_python("find", scene), (np.uint64(SALT), np.uint32(2), np.uint32(0))
    with np.errstate(over="ignore"):
        find(scene.buckets, scene.records, words, *where, out)
    return int(out[0])


COMPILED = pytest.mark.skipif(not native.available(), reason="needs numba")
SEARCHES = [
    pytest.param(probed, "kernel", marks=COMPILED, id="probe"),
    pytest.param(found, "kernel", marks=COMPILED, id="find"),
    pytest.param(probed, "reference", id="reference"),
]


@pytest.mark.parametrize(("search", "how"), SEARCHES)
def test_reader_looks_again_after_bucket_change(
    search: Callable[[str, Scene], int], how: str
) -> None:
    scene = Scene()
    assert search(how, scene) == 0 and scene.reads >= 2


@pytest.mark.parametrize(("search", "how"), SEARCHES)
def test_a_bucket_that_stays_is_believed(search: Callable[[str, Scene], int], how: str) -> None:
    scene = Scene()
    scene.reads = 2
    assert search(how, scene) == scene.entry
    scene.records = scene.records[: scene.entry]
    if search is found:
        assert search(how, scene) == 0, "an entry without a record"
