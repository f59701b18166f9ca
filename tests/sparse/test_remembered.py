"""Remembered hot sets against a list of all contexts, and their bounds."""

import hashlib
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hotkv.table import Words, hash_words
from hotkv_server.sparse.remembered import (
    ANCHOR_BLOCKS,
    ANCHOR_BYTES,
    CONTEXT_SHARE,
    ENTRY_BYTES,
    SET_BYTES,
    RememberedHotSets,
)

KEY_SPACES = st.sampled_from([1, 2])
GROUPS = st.sampled_from([0, 3])
TURNS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 13)), max_size=4)
"""A context as turns of a conversation: which text, and how many blocks of it."""
SETS = st.dictionaries(
    st.tuples(st.sampled_from([0, 5]), st.sampled_from([0, 1])),
    st.lists(st.integers(0, 60), max_size=8, unique=True),
    max_size=3,
)


def chain(turns: list[tuple[int, int]]) -> Words:
    """Hashes [n, 8], each over all blocks before it."""
    parent, hashes = b"", []
    for text, count in turns:
        for block in range(count):
            parent = hashlib.sha256(parent + bytes([text, block])).digest()
            hashes.append(parent)
    return hash_words(b"".join(hashes), 32)


def shared(one: Words, other: Words) -> int:
    """Leading blocks that two contexts share."""
    count = min(len(one), len(other))
    same = (one[:count] == other[:count]).all(axis=1)
    return count if same.all() else int(np.argmin(same))


@dataclass(eq=False)
class Context:
    """One remembered context; `made` rises with each."""

    key_space: int
    group: int
    hashes: Words
    sets: dict[tuple[int, int], list[int]]
    made: int
    owner: int

    @property
    def weight(self) -> int:
        """As the module's constants say."""
        anchors = -(-len(self.hashes) // ANCHOR_BLOCKS)
        return (
            ENTRY_BYTES
            + ANCHOR_BYTES * anchors
            + sum(SET_BYTES + 4 * len(positions) for positions in self.sets.values())
        )

    def reach(self, hashes: Words) -> int:
        """Blocks of other hashes up to this context's last anchor that both share."""
        count = shared(hashes, self.hashes)
        return count if count == len(self.hashes) else count - count % ANCHOR_BLOCKS

    def has_anchor(self, hashes: Words, count: int) -> bool:
        return self.reach(hashes) >= count and (
            count % ANCHOR_BLOCKS == 0 or len(self.hashes) == count
        )


class RememberedMachine(RuleBasedStateMachine):
    """The model keeps a list, the least recently asked for first, and looks at every context on
    every recall."""

    @initialize(capacity=st.sampled_from([1 << 30, 36_000, 12_000, 6000]))
    def start(self, capacity: int) -> None:
        self.real = RememberedHotSets(capacity)
        self.capacity = capacity
        self.model: list[Context] = []
        self.num_made = 0

    def go_for(self, new: Context) -> None:
        """The least recently asked for of whoever has most goes, until there is room; of equals, of
        the one with the highest number."""
        while new.weight + sum(c.weight for c in self.model) > self.capacity:
            weights = {
                owner: sum(c.weight for c in [*self.model, new] if c.owner == owner)
                for owner in {c.owner for c in self.model}
            }
            most = max(weights, key=lambda owner: (weights[owner], owner))
            self.model.remove(next(c for c in self.model if c.owner == most))

    @rule(key_space=KEY_SPACES, group=GROUPS, turns=TURNS, sets=SETS, owner=st.integers(0, 2))
    def remember(
        self,
        key_space: int,
        group: int,
        turns: list[tuple[int, int]],
        sets: dict[tuple[int, int], list[int]],
        owner: int,
    ) -> None:
        hashes = chain(turns)
        kept = {at: [p for p in positions if p < len(hashes)] for at, positions in sets.items()}
        is_kept = any(kept.values())
        if is_kept:
            old = [
                c
                for c in self.model
                if (c.key_space, c.group, c.hashes.tobytes())
                == (key_space, group, hashes.tobytes())
            ]
            self.num_made += 1
            context = Context(
                key_space,
                group,
                hashes,
                {**(old[0].sets if old else {}), **kept},
                self.num_made,
                owner,
            )
            is_kept = context.weight <= self.capacity // CONTEXT_SHARE
            if is_kept:
                self.model = [c for c in self.model if c not in old]
                self.go_for(context)
                self.model.append(context)
        assert (
            self.real.remember(
                key_space,
                group,
                hashes,
                {at: np.array(p, np.int32) for at, p in sets.items()},
                owner,
            )
            == is_kept
        )

    @rule(key_space=KEY_SPACES, group=GROUPS, turns=TURNS)
    def recall(self, key_space: int, group: int, turns: list[tuple[int, int]]) -> None:
        """The longest known prefix, up to a regular anchor or the end of a remembered context; the
        newest context that has its anchor."""
        hashes = chain(turns)
        mine = [c for c in self.model if (c.key_space, c.group) == (key_space, group)]
        best = max((c.reach(hashes) for c in mine), default=0)
        recalled = self.real.recall(key_space, group, hashes)
        assert recalled.num_blocks == best
        if not best:
            assert not recalled.hot_sets
            return
        newest = max((c for c in mine if c.has_anchor(hashes, best)), key=lambda c: c.made)
        expected = {at: [p for p in positions if p < best] for at, positions in newest.sets.items()}
        assert {at: positions.tolist() for at, positions in recalled.hot_sets.items()} == expected
        self.model.remove(newest)
        self.model.append(newest)

    @rule(key_space=KEY_SPACES)
    def forget(self, key_space: int) -> None:
        left = [c for c in self.model if c.key_space != key_space]
        assert len(list(self.real.forget(key_space))) == len(self.model) - len(left)
        self.model = left

    @invariant()
    def agrees(self) -> None:
        self.real.check_invariants()
        assert (len(self.real), self.real.num_bytes) == (
            len(self.model),
            sum(c.weight for c in self.model),
        )


TestRemembered = RememberedMachine.TestCase


@given(count=st.integers(1, 40), more=st.integers(0, 20), other=st.integers(1, 20))
def test_a_longer_context_over_the_same_prefix_finds_all_of_it(
    count: int, more: int, other: int
) -> None:
    remembered = RememberedHotSets(1 << 20)
    positions = np.arange(count, dtype=np.int32)[::-1]
    assert remembered.remember(1, 0, chain([(0, count)]), {(2, 0): positions})
    longer = remembered.recall(1, 0, chain([(0, count), (1, more)]))
    assert longer.num_blocks == count and longer.hot_sets[2, 0].tolist() == positions.tolist()
    forked = remembered.recall(
        1, 0, np.concatenate([chain([(0, count)])[: count // 2], chain([(2, other)])])
    )
    assert forked.num_blocks == count // 2 // ANCHOR_BLOCKS * ANCHOR_BLOCKS
    assert (
        remembered.recall(2, 0, chain([(0, count)])).num_blocks
        == remembered.recall(1, 1, chain([(0, count)])).num_blocks
        == 0
    )


def test_who_floods_loses_only_what_is_its_own() -> None:
    remembered, hot_sets = RememberedHotSets(100_000), {(0, 0): np.arange(8, dtype=np.int32)}
    mine = [chain([(0, 8 + count)]) for count in range(10)]
    for hashes in mine:
        assert remembered.remember(1, 0, hashes, hot_sets, 1)
    for count in range(500):
        hashes = np.concatenate(
            [chain([(1, 8)])[:7], hash_words(hashlib.sha256(b"%d" % count).digest(), 32)]
        )
        assert remembered.remember(2, 0, hashes, hot_sets, 2)
    assert all(remembered.recall(1, 0, hashes).num_blocks == len(hashes) for hashes in mine)
    remembered.check_invariants()
