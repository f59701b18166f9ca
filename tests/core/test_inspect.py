"""Answers of `cache.inspect`: they agree with the books, they are copies, and outer parts ask in no
other way.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import hotkv_server
from hotkv_proto.keys import MAX_GROUPS, Representation
from hotkv_proto.table import SLOT_ALIGN, STATE_READY, STATE_RESERVED
from hotkv_server.cache import inspect
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.policies import LRU
from hotkv_server.cache.values import CoreConfig, HashList, Run
from tests.core.support import begin_store, evict, make_key_space, make_table, words_of

SERVER = Path(hotkv_server.__file__).parent
OUTER = [
    *sorted((SERVER / "wire").rglob("*.py")),
    *sorted((SERVER / "told").rglob("*.py")),
]
SLAB = 4 * SLOT_ALIGN


class Cache:
    """One engine on one key space of two groups; four slabs of four slots."""

    def __init__(self) -> None:
        self.core = CacheCore(CoreConfig(4 * SLAB, SLAB, 60), make_table(60), LRU(60))
        kind = Representation(0, "min-max", 1, (SLOT_ALIGN,))
        space = make_key_space("one", SLOT_ALIGN, 2 * SLOT_ALIGN)
        self.session = self.core.open_session("engine", "rank", space, 0.0, (kind,)).number

    def store(self, lease_id: str, run: Run, now_s: float = 1.0, *, ends: bool = True) -> None:
        begin_store(self.core, self.session, lease_id, lease_id, [run], 0, 0.0, now_s)
        if ends:
            self.core.end_store(self.session, lease_id, True, now_s)

    def listed(self) -> list[inspect.BlockFigures]:
        *_, entries = inspect.find_blocks(self.core, 0, 100, 1)
        return inspect.blocks(self.core, entries)


def census(core: CacheCore) -> inspect.Census:
    *_, whole = inspect.census(core)
    return whole


def test_counts_and_tier_are_those_of_the_books() -> None:
    cache = Cache()
    core = cache.core
    cache.store("w", Run(0, words_of([1, 2, 3])))
    cache.store("open", Run(1, words_of([1])), ends=False)
    core.acquire(cache.session, "r", [HashList(0, words_of([1, 2]))], 0.0, 1.0)
    assert inspect.counts(core) == inspect.Counts(1, 2, 1, 0, SLAB)
    assert inspect.leases_of_engines(core) == {"engine": 2}
    assert inspect.limits(core) == inspect.Limits(60, core.config.max_blocks_per_call)
    tier = inspect.tier(core, census(core))
    assert (tier.capacity_bytes, tier.full_capacity_bytes) == (4 * SLAB, 4 * SLAB)
    assert (tier.used_bytes, tier.pinned_bytes) == (5 * SLOT_ALIGN, 2 * SLOT_ALIGN)
    assert (tier.num_blocks, tier.num_free_slabs, tier.representation_bytes) == (3, 2, 0)
    (known,) = inspect.key_spaces(core, census(core))
    assert (known.number, known.num_blocks, known.num_representations) == (1, 3, 0)
    assert inspect.counters(core)["stored_blocks"] == 3


def test_the_key_spaces_with_most_blocks_are_told_in_their_order() -> None:
    cache = Cache()
    others = [
        cache.core.open_session("engine", "rank", make_key_space(name, SLOT_ALIGN, SLOT_ALIGN), 0.0)
        for name in ("two", "three", "four")
    ]
    for session, count in zip(others, (0, 3, 1), strict=True):
        run = Run(0, words_of(range(count)))
        begin_store(cache.core, session.number, f"{count}", f"{count}", [run], 0, 0.0, 1.0)
        cache.core.end_store(session.number, f"{count}", True, 1.0)
    told = inspect.key_spaces(cache.core, census(cache.core), 2)
    assert [(one.number, one.num_blocks) for one in told] == [(3, 3), (4, 1)]
    assert [one.number for one in inspect.key_spaces(cache.core, census(cache.core))] == [
        1,
        2,
        3,
        4,
    ]


def test_a_block_is_told_with_its_parent_and_its_representation() -> None:
    cache = Cache()
    cache.store("w", Run(0, words_of([1, 2]), depth=5), now_s=7.0)
    cache.store("k", Run(MAX_GROUPS, words_of([2])), now_s=7.0)
    cache.store("open", Run(1, words_of([3])), ends=False)
    head, tail, reserved = cache.listed()
    assert head.hash_words.tolist() == words_of([1])[0].tolist() and head.parent_words is None
    assert tail.parent_words is not None and np.array_equal(tail.parent_words, head.hash_words)
    assert (head.depth, tail.depth) == (5, 6)
    assert head.last_used_s == pytest.approx(7.0)
    assert (head.representation_bytes, tail.representation_bytes) == (0, SLOT_ALIGN)
    assert (head.state, reserved.state) == (STATE_READY, STATE_RESERVED)
    assert (reserved.group_index, reserved.slot_bytes) == (1, 2 * SLOT_ALIGN)


def test_blocks_are_found_in_parts_and_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache()
    cache.store("w", Run(0, words_of(range(7))))
    monkeypatch.setattr(inspect, "PART_ENTRIES", 3)
    parts = list(inspect.find_blocks(cache.core, 0, 100, 0))
    assert parts[-1] == [1, 2, 3, 4, 5, 6, 7]
    assert all(part == parts[-1][: len(part)] for part in parts)
    assert list(inspect.find_blocks(cache.core, 0, 4, 1))[-1] == [1, 2, 3, 4]
    assert list(inspect.find_blocks(cache.core, 5, 100, 1))[-1] == [5, 6, 7]
    assert list(inspect.find_blocks(cache.core, 0, 100, 2))[-1] == []


def test_an_answer_stays_as_it_is() -> None:
    cache = Cache()
    cache.store("w", Run(0, words_of([1, 2])))
    blocks = cache.listed()
    hashes = [block.hash_words.tolist() for block in blocks]
    prompt = inspect.prompt_blocks(cache.core, 1, 0, words_of([1, 2, 3]))
    counters = inspect.counters(cache.core)
    assert evict(cache.core, 1, 0, words_of([1, 2])) == (2, 0)
    cache.store("other", Run(0, words_of([8, 9])))
    assert [block.hash_words.tolist() for block in blocks] == hashes
    assert (prompt.words != 0).tolist() == [True, True, False] and not prompt.evicted.any()
    assert counters["stored_blocks"] == 2
    later = inspect.prompt_blocks(cache.core, 1, 0, words_of([1, 2, 3]))
    assert not later.words.any() and later.evicted.tolist() == [True, True, False]
    assert inspect.blocks(cache.core, [30]) == []


def test_a_story_is_told_of_any_number() -> None:
    cache = Cache()
    cache.store("w", Run(0, words_of([1])))
    index = cache.core.space.index
    assert inspect.story(index, 1).startswith("entry=1 state=ready key_space=1 group=0 hash=")
    assert "state=free" in inspect.story(index, 2)
    assert inspect.story(index, 61) == "entry=61 is none of the 60"


def reaches(source: str) -> Iterator[str]:
    """Expressions that reach into the core: `x.core.y` with y no part of its public face, or
    `x.core` under a name of its own, by which that could be done."""
    face = {name for name in vars(CacheCore) if not name.startswith("_")}
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Attribute(attr="core" | "_core")):
                if node.attr not in face:
                    yield ast.unparse(node)
            case ast.Attribute(value=ast.Attribute(value=ast.Attribute(attr="core" | "_core"))):
                yield ast.unparse(node)
            case (
                ast.Assign(value=ast.Attribute(attr="core" | "_core"))
                | ast.NamedExpr(value=ast.Attribute(attr="core" | "_core"))
            ):
                yield ast.unparse(node)


@pytest.mark.parametrize("path", OUTER, ids=lambda path: path.name)
def test_no_outer_part_reaches_into_the_books(path: Path) -> None:
    assert list(reaches(path.read_text())) == []
