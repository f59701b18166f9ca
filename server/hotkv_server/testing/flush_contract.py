"""The checks of flushes that every tier that nodes share (`SharedTier`) must pass: after the answer
to a flush, no node finds a block that was stored before the flush.

A check gets a `SharedStore`, which makes nodes that share the store under test. Checks use the key
space NAME, which must have no generation (number that each flush raises) at first. Flushes during a
read are not checked here, because a test of them depends on the protocol of the tier's store. The
tests of each tier check such flushes with `FaultProxy`.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from hotkv_server.testing.tier_contract import SLOT_BYTES, WAIT_S, Bench, content, hash_of
from hotkv_server.tiers.protocol import (
    NO_GENERATION,
    RAISES,
    Blocks,
    Generations,
    Read,
    Write,
    begun,
)

T = TypeVar("T")
NAME, OTHER = "00ff" * 8, "ee" * 16
SPOILED = (b"x", b"-4", b"1.5", b"9" * 30)
READ_AT = 32
"""Number of the first arena slot into which `read` reads blocks."""

Node = Callable[..., "contextlib.AbstractContextManager[Bench]"]
"""A function that returns a context manager, which makes a node (a tier over the store). Its
argument `on_generation` is called with (fingerprint, generation) if a call expects another
generation (number that each flush raises) than the store has."""


@dataclass(frozen=True)
class SharedStore:
    """A store under test, which several nodes share.

    node: makes a node that uses the store: returns a context manager that yields a `Bench`, which
        calls the node's tier. The keyword argument `on_generation` is passed to the tier.
    lose: deletes the generation (number that each flush raises) of the key space NAME from the
        store.
    spoil: replaces the generation of NAME with bytes that are no generation; None if that is
        impossible.
    """

    node: Node
    lose: Callable[[], object]
    spoil: Callable[[bytes], object] | None = None


# ------------------------------------------------------------------------------------------- Calls


def answer(call: Callable[[Callable[[T], None]], None]) -> T:
    """Makes a call that answers by a callback. Waits for the answer and returns it.

    call: makes the call, given the callback that receives the answer.
    """
    done, is_done = list[T](), threading.Event()

    def on_done(value: T) -> None:
        done.append(value)
        is_done.set()

    call(on_done)
    assert is_done.wait(WAIT_S), "the call did not end"
    return done[0]


def generation(tier: Any, name: str = NAME) -> int | None:
    """Reads the generation (number that each flush raises) of a key space (a model in a
    configuration) from the tier's store. Returns None if the store does not answer."""
    shown: Any = answer(lambda done: tier.generations([name], time.monotonic() + WAIT_S, done))
    return None if shown is None else shown.generations.get(name)


def flush(tier: Any, name: str = NAME, floor: int = 0, *, is_retry: bool = False) -> int | None:
    """Flushes a key space (a model in a configuration) in the store. Returns the new generation
    (number that each flush raises), which is above `floor`. Returns None if the store does not
    answer."""
    return answer(lambda done: tier.raise_generation(name, floor, done, is_retry))


def keys_of(at: int, count: int) -> list[bytes]:
    """Returns the keys of `count` blocks of the key space NAME in the generation `at` (number that
    each flush raises)."""
    prefix = b"hotkv/1/%b/%d/0/" % (NAME.encode(), at)
    return [prefix + hash_of(number) for number in range(count)]


def blocks_of(keys: Sequence[bytes], first_slot: int, generations: Generations) -> Blocks:
    """Returns the `Blocks` argument of a tier's call, for blocks with these keys in consecutive
    slots (places in the arena) from `first_slot` on.

    generations: by fingerprint, the generation (number that each flush raises) that the call
        expects; empty: the generation is not checked.
    """
    slots = np.arange(first_slot, first_slot + len(keys), dtype=np.int64) * SLOT_BYTES
    return Blocks(keys, slots, np.full(len(keys), SLOT_BYTES, np.int64), generations=generations)


def write(bench: Bench, keys: Sequence[bytes]) -> None:
    """Writes blocks under these keys to the tier. The first block has the content number 0, the
    second block number 1, and so on."""
    bench.fill(range(len(keys)), range(len(keys)))
    codes, _ = bench.answer(blocks_of(keys, 0, {}))
    assert (codes == Write.STORED).all(), codes.tolist()


def read(tier: Any, keys: Sequence[bytes], generations: Generations) -> list[int]:
    """Reads blocks from the tier into the slots (places in the arena) from READ_AT on. Returns the
    result of each block, a value of `Read`.

    generations: by fingerprint, the generation (number that each flush raises) that the read
        expects.
    """
    blocks, until_s = blocks_of(keys, READ_AT, generations), time.monotonic() + WAIT_S
    return answer(lambda done: tier.read(blocks, until_s, lambda codes: done(codes.tolist())))


def probe(tier: Any, keys: Sequence[bytes], generations: Generations) -> list[int]:
    """Asks the tier whether it has these blocks. Returns the answer for each block: FOUND, ABSENT
    or FAILED (values of `Read`)."""
    until_s = time.monotonic() + WAIT_S
    return answer(
        lambda done: tier.probe(keys, until_s, lambda codes: done(codes.tolist()), generations)
    )


# ------------------------------------------------------------------------------------------- Checks


def check_generations(store: SharedStore) -> None:
    """Asks two nodes for the generation (number that each flush raises) of a key space that has
    none yet, then flushes the key space on both. Checks that both nodes get the same first
    generation, which
    is computed from the current time, and that each flush raises the generation: also above a given
    number (`floor`), and after the store has lost the generation."""
    with store.node() as one, store.node() as other:
        before = begun(time.time_ns() // 1000)
        first = generation(one.tier)
        assert first and before <= first < begun(time.time_ns() // 1000) + RAISES
        assert generation(other.tier) == generation(one.tier) == first
        second, third = flush(other.tier), flush(one.tier)
        assert second and third and first < second < third == generation(other.tier)
        known = third + (1 << 40)
        above = flush(one.tier, floor=known)
        assert above and above > known and generation(other.tier) == above
        # If the key space has no generation (number that each flush raises), a flush makes a
        # generation.
        store.lose()
        raised = flush(one.tier)
        assert raised and raised > third and generation(other.tier) == raised


def check_races(store: SharedStore) -> None:
    """Two nodes ask at the same time for the generation (number that each flush raises) of a key
    space that has none yet, then both flush it several times at once. Checks that they get the same
    first generation, and that each flush makes another generation."""
    with store.node() as one, store.node() as other:
        tiers: list[Any] = [one.tier, other.tier]
        with _many() as (begin, shown):
            for tier in tiers * 3:
                tier.generations([NAME], time.monotonic() + WAIT_S, begin())
        (first,) = {answered.generations[NAME] for answered in shown}
        with _many() as (begin, raised):
            for tier in tiers * 4:
                tier.raise_generation(NAME, 0, begin())
        # Each flush made a new generation, so all generations differ.
        assert len({first, *raised}) == 9
        assert generation(one.tier) == generation(other.tier) == max(raised)


def check_reads(store: SharedStore) -> None:
    """Writes blocks on a node, and flushes them on another node. Checks that the first node finds
    the blocks before the flush, but not after it, and then reports the new generation (number that
    each flush raises). Also checks that it finds blocks that it writes in the new generation."""
    told: list[tuple[str, int]] = []
    with (
        store.node() as one,
        store.node(on_generation=lambda name, at: told.append((name, at))) as other,
    ):
        now = generation(one.tier)
        assert now
        keys = keys_of(now, 3)
        write(other, keys)
        found = read(other.tier, [*keys, b"hotkv/1/none"], {NAME: now})
        assert found == [Read.FOUND] * 3 + [Read.ABSENT]
        for at in range(3):
            assert np.array_equal(other.slot(READ_AT + at), content(at))
        assert probe(other.tier, keys, {NAME: now}) == [Read.FOUND] * 3
        # A flush of another key space has no effect.
        assert flush(one.tier, OTHER)
        assert read(other.tier, keys, {NAME: now}) == [Read.FOUND] * 3
        assert read(other.tier, keys, {NAME: now, OTHER: now}) == [Read.ABSENT] * 3
        told.clear()
        raised = flush(one.tier)
        assert raised
        for ask in (read, probe):
            assert ask(other.tier, keys, {NAME: now}) == [Read.ABSENT] * 3
        assert told == [(NAME, raised)] * 2
        keys = keys_of(raised, 2)
        write(other, keys)
        for ask in (read, probe):
            assert ask(other.tier, keys, {NAME: raised}) == [Read.FOUND] * 2


def check_lost(store: SharedStore) -> None:
    """Deletes the generation (number that each flush raises) of a key space (a model in a
    configuration) from the store, or replaces it by bytes that are no number. Checks that no node
    then finds the key space's blocks, and that other key spaces are not affected."""
    told: list[tuple[str, int]] = []
    with (
        store.node() as one,
        store.node(on_generation=lambda name, at: told.append((name, at))) as other,
    ):
        now = generation(one.tier)
        assert now
        keys = keys_of(now, 2)
        write(other, keys)
        store.lose()
        assert read(other.tier, keys, {NAME: now}) == [Read.ABSENT] * 2
        assert read(other.tier, keys, {NAME: NO_GENERATION}) == [Read.ABSENT] * 2
        assert told == [(NAME, NO_GENERATION)] * 2
        again = generation(one.tier)
        assert again and again > now
        for value in SPOILED if store.spoil else ():
            store.spoil(value)  # type: ignore[misc]
            assert read(other.tier, keys, {NAME: now}) == [Read.FAILED] * 2, value
            # Other key spaces are not affected.
            tier: Any = one.tier
            until_s = time.monotonic() + WAIT_S
            shown: Any = answer(partial(tier.generations, [NAME, OTHER], until_s))
            assert shown and shown.generations.keys() == {OTHER}, value
            assert read(other.tier, keys, {}) == [Read.FOUND] * 2, value
        store.lose()


def check_closed(store: SharedStore) -> None:
    """Closes a tier. Checks that it then answers None to a flush and to a request for a generation
    (number that each flush raises)."""
    with store.node() as one:
        one.tier.close()
        assert generation(one.tier) is None and flush(one.tier) is None


def check_flushes(store: SharedStore) -> None:
    """Runs all checks of flushes (deletions of all blocks of a key space) on a store. Raises
    AssertionError if a tier breaks a rule."""
    for check in (check_generations, check_races, check_reads, check_lost, check_closed):
        check(store)
        store.lose()


@contextlib.contextmanager
def _many() -> "Any":
    """Yields a function that makes callbacks, and the list of the arguments with which these
    callbacks were called. At the end of the `with` block, waits until all callbacks have been
    called."""
    changed, answers, num_begun = threading.Condition(), list[Any](), [0]

    def on_done(value: Any) -> None:
        with changed:
            answers.append(value)
            changed.notify_all()

    def begin() -> Callable[[Any], None]:
        num_begun[0] += 1
        return on_done

    yield begin, answers
    with changed:
        assert changed.wait_for(lambda: len(answers) == num_begun[0], WAIT_S), "a call did not end"
