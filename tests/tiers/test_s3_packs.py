"""Tests packs: exactly the packed blocks come back, changed bytes are refused; the index against
a dict."""

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hotkv_server.tiers.s3.index import INDEX_ENTRY_BYTES, PACK_ROWS, PackIndex
from hotkv_server.tiers.s3.packs import (
    MIN_PACK_BYTES,
    Pack,
    Space,
    age_at,
    age_of,
    cut_packs,
    list_bytes,
    new_name,
    packed,
    parsed,
    space_of,
)
from hotkv_server.tiers.seals import seal
from tests.support.memory import allocated_bytes

SPACE = Space("00ff/7")
PACK_BYTES = 16 << 20
MAX_BLOCKS = 1 << 11


def key(number: int, space: str = SPACE) -> bytes:
    return b"hotkv/1/%b/0/%064x" % (space.encode(), number)


def pack_of(
    contents: dict[bytes, bytes], space: Space = SPACE, now_us: int = 10**15, number: int = 1
) -> tuple[Pack, bytearray]:
    name = new_name(now_us, "node", number, len(contents))
    slots = [memoryview(content) for content in contents.values()]
    return packed(space, name, list(contents), slots)


def blocks_in(pack: Pack | None, body: bytes, keys: list[bytes]) -> dict[bytes, bytes]:
    """What a reader finds in `body`. `pack`: its list of blocks; None: refused."""
    if pack is None:
        return {}
    index, found = PackIndex(1 << 10), {}
    index.add(pack)
    for name, place in zip(keys, index.find(keys), strict=True):
        if place is not None:
            begin = int(place.pack.begins[place.row])
            content = body[begin : begin + int(place.pack.num_bytes[place.row])]
            if seal(name, content) == place.pack.seals[place.row]:
                found[name] = content
    return found


@given(st.dictionaries(st.integers(0, 1 << 60).map(key), st.binary(max_size=300), max_size=20))
def test_a_pack_gives_back_what_was_put_in(contents: dict[bytes, bytes]) -> None:
    pack, body = pack_of(contents)
    assert len(body) == list_bytes(pack.name) + sum(map(len, contents.values()))
    front = memoryview(body)[: list_bytes(pack.name)]
    again = parsed(SPACE, pack.name, front)
    assert again is not None and again.path == f"blocks/1/{SPACE}/{pack.name}"
    assert again.seals.tolist() == pack.seals.tolist()
    assert blocks_in(again, bytes(body), [*contents, key(1 << 61)]) == contents
    # In the order of the write: one request reads neighbours.
    ends = (again.begins + again.num_bytes).tolist()
    assert again.begins.tolist() == [list_bytes(pack.name), *ends][: len(contents)]


def test_every_flipped_bit_is_found_out() -> None:
    contents = {key(number): bytes([number]) * 64 for number in range(3)}
    pack, body = pack_of(contents)
    in_front = list_bytes(pack.name)
    for at in range(len(body)):
        for bit in range(8):
            changed = bytearray(body)
            changed[at] ^= 1 << bit
            again = parsed(SPACE, pack.name, memoryview(changed)[:in_front])
            found = blocks_in(again, bytes(changed), list(contents))
            damaged = (at - in_front) // 64
            good = {} if at < in_front else {k: contents[k] for k in contents if k != key(damaged)}
            assert found == good, f"byte {at}, bit {bit}"


def test_list_of_another_place_fails() -> None:
    pack, body = pack_of({key(1): b"x" * 64})
    front = memoryview(body)[: list_bytes(pack.name)]
    assert parsed(SPACE, pack.name, front) is not None
    assert parsed(Space("00ff/8"), pack.name, front) is None
    assert parsed(SPACE, new_name(10**15, "node", 2, 1), front) is None
    assert parsed(SPACE, pack.name, front[:-1]) is None
    assert parsed(SPACE, pack.name, memoryview(b"")) is None
    assert parsed(SPACE, "readme.txt", memoryview(b"")) is None
    assert not blocks_in(parsed(SPACE, pack.name, front), bytes(body), [key(2)])


@given(st.lists(st.integers(0, 2 * 10**15), min_size=2, max_size=9))
def test_names_sort_newest_first(times_us: list[int]) -> None:
    names = sorted(new_name(time_us, "node", 1, 1) for time_us in times_us)
    assert [age_of(name) for name in names] == [age_at(at) for at in sorted(times_us)[::-1]]
    assert all(list_bytes(name) == list_bytes(names[0]) > 0 for name in names)


ZEROS = "0" * 16


@pytest.mark.parametrize(
    "name",
    ["", "x", ZEROS, f"{ZEROS}-n-1-", f"{ZEROS}-N-1-1", f"{ZEROS}-n-1-1/x", f"{ZEROS[1:]}-n-1-1"],
)
def test_other_names_are_no_packs(name: str) -> None:
    assert not list_bytes(name) and list_bytes(f"{ZEROS}-n-1-1")


@pytest.mark.parametrize(
    "name", [b"", b"hotkv/1/ab", b"hotkv/1/a.b/1/x", b"hotkv/2/ab/1/x", b"hotkv/1/ab/x/1/x", b"/"]
)
def test_other_keys_have_no_place(name: bytes) -> None:
    assert space_of(name) is None
    assert space_of(b"hotkv/1/0a/17/3/\xff\x00/") == "0a/17"


@given(
    st.lists(
        st.sampled_from([4096, 65536, MIN_PACK_BYTES - 4096, MIN_PACK_BYTES, PACK_BYTES]),
        max_size=60,
    ),
    st.sampled_from([MIN_PACK_BYTES, PACK_BYTES]),
)
def test_packs_are_all_rows_in_order_and_large(sizes: list[int], pack_bytes: int) -> None:
    num_bytes = np.array(sizes, np.int64)
    parts = list(cut_packs(num_bytes, pack_bytes))
    assert [row for part in parts for row in range(part.start, part.stop)] == [*range(len(sizes))]
    totals = [int(num_bytes[part].sum()) for part in parts]
    assert all(total >= pack_bytes for total in totals[:-1])
    assert len(totals) < 2 or totals[-1] >= MIN_PACK_BYTES
    # Full at `pack_bytes`; the last pack also gets what would be too few for one of their own.
    assert all(total < pack_bytes + max(sizes) + MIN_PACK_BYTES for total in totals)
    assert all(part.stop == after.start for part, after in pairwise(parts))


@pytest.mark.parametrize("blocks_per_pack", [1, 4, 64])
def test_index_needs_only_its_stated_memory(blocks_per_pack: int) -> None:
    index = PackIndex(MAX_BLOCKS)
    tracemalloc.start()
    try:
        for number in range(MAX_BLOCKS // blocks_per_pack):
            blocks = range(blocks_per_pack * number, blocks_per_pack * (number + 1))
            _, body = pack_of(dict.fromkeys(map(key, blocks), b""), SPACE, number, number)
            name = new_name(number, "node", number, blocks_per_pack)
            pack = parsed(SPACE, name, memoryview(bytes(body)))
            assert pack is not None
            index.add(pack)
        del body, pack
        used_bytes = allocated_bytes()
    finally:
        tracemalloc.stop()
    assert used_bytes < 1.2 * MAX_BLOCKS * INDEX_ENTRY_BYTES
    assert used_bytes < 1.2 * index.num_bytes


def rows(pack: Pack) -> int:
    return len(pack) + PACK_ROWS


class IndexAgainstDict(RuleBasedStateMachine):
    """Without room, the newest packs stay."""

    MAX = 36

    def __init__(self) -> None:
        super().__init__()
        self.index = PackIndex(self.MAX)
        self.packs: list[Pack] = []
        self.where: dict[bytes, tuple[Pack, int]] = {}
        self.count = 0

    @rule(
        now_us=st.integers(1, 30),
        numbers=st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True),
        generation=st.integers(1, 2),
    )
    def add(self, now_us: int, numbers: list[int], generation: int) -> None:
        self.count += 1
        space = Space(f"ab/{generation}")
        keys = [key(number, space) for number in numbers]
        pack, _ = pack_of(dict.fromkeys(keys, b"x"), space, now_us, self.count)
        has_room = True
        while self.packs and sum(map(rows, [*self.packs, pack])) > self.MAX:
            # Of equal age, the first added goes first.
            oldest = max(self.packs, key=lambda one: one.age)
            if pack.age >= oldest.age:
                has_room = False
                break
            self.remove(oldest)
        assert self.index.add(pack) == has_room
        if has_room:
            self.packs.append(pack)
            for row, name in enumerate(keys):
                if name not in self.where or self.where[name][0].age >= pack.age:
                    self.where[name] = pack, row
            assert self.index.add(pack) and self.index.has(pack.path)

    @rule()
    def churn(self) -> None:
        """Dropped packs must use no memory."""
        for _ in range(self.MAX * 8):
            self.count += 1
            pack, _ = pack_of({key(99): b"x"}, SPACE, 0, self.count)
            if self.index.add(pack):
                self.index.drop(pack.path)

    @rule(number=st.integers(0, 9), generation=st.integers(1, 2))
    def forget(self, number: int, generation: int) -> None:
        name = key(number, f"ab/{generation}")
        self.index.forget([name])
        self.where.pop(name, None)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if self.packs:
            pack = data.draw(st.sampled_from(self.packs))
            self.index.drop(pack.path)
            self.remove(pack)
            assert not self.index.has(pack.path)
        self.index.drop("blocks/1/none")

    @rule(generation=st.none() | st.integers(1, 2))
    def flush(self, generation: int | None) -> None:
        kept = None if generation is None else Space(f"ab/{generation}")
        self.index.drop_others("a", None)
        self.index.drop_others("ab", kept)
        for pack in [pack for pack in self.packs if pack.space != kept]:
            self.remove(pack)

    def remove(self, pack: Pack) -> None:
        self.packs.remove(pack)
        self.where = {name: at for name, at in self.where.items() if at[0] is not pack}

    @invariant()
    def finds_the_same(self) -> None:
        self.index.check_invariants()
        keys = [key(number, f"ab/{generation}") for number in range(10) for generation in (1, 2)]
        found = [None if at is None else (at.pack, at.row) for at in self.index.find(keys)]
        assert found == [self.where.get(name) for name in keys]
        assert len(self.index) == len(self.where)


TestIndexAgainstDict = IndexAgainstDict.TestCase
