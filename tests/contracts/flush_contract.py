"""The checks of flushes that every `SharedTier` must pass: after the answer to a flush, no node
finds a block stored before it.

A check gets a `SharedStore`, and uses the key space NAME, without a generation at first. Flushes
during a read depend on the store's protocol: each tier's tests check them with `FaultProxy`.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from hotkv_server.tiers.protocol import (
    NO_GENERATION,
    RAISES,
    Generations,
    Read,
    SharedBlocks,
    Write,
    begun,
)
from tests.contracts.tier_contract import (
    SLOT_BYTES,
    WAIT_S,
    Bench,
    content,
    hash_of,
    shared_blocks,
)

T = TypeVar("T")
NAME, OTHER = "00ff" * 8, "ee" * 16
SPOILED = (b"x", b"-4", b"1.5", b"9" * 30)
READ_AT = 32
"""First slot that `read` reads into."""

Node = Callable[..., "contextlib.AbstractContextManager[Bench]"]
"""Makes a context with a tier over the store. `on_generation` is called with (fingerprint,
generation) if the store has another than a call expects."""


@dataclass(frozen=True)
class SharedStore:
    """A store under test, used by several nodes.

    node: its keyword `on_generation` goes to the tier.
    lose: deletes NAME's generation from the store.
    spoil: replaces it with bytes that are none; None if that is impossible.
    """

    node: Node
    lose: Callable[[], object]
    spoil: Callable[[bytes], object] | None = None


# ------------------------------------------------------------------------------------------- Calls


def answer(call: Callable[[Callable[[T], None]], None]) -> T:
    """Calls and waits for the callback's value."""
    done, is_done = list[T](), threading.Event()

    def on_done(value: T) -> None:
        done.append(value)
        is_done.set()

    call(on_done)
    assert is_done.wait(WAIT_S), "the call did not end"
    return done[0]


def generation(tier: Any, name: str = NAME) -> int | None:
    """None if the store does not answer."""
    shown: Any = answer(lambda done: tier.generations([name], time.monotonic() + WAIT_S, done))
    return None if shown is None else shown.generations.get(name)


def flush(tier: Any, name: str = NAME, floor: int = 0, *, is_retry: bool = False) -> int | None:
    """New generation, above `floor`; None if the store does not answer."""
    return answer(lambda done: tier.raise_generation(name, floor, done, is_retry))


def keys_of(at: int, count: int) -> list[bytes]:
    """In generation `at`."""
    prefix = b"hotkv/1/%b/%d/0/" % (NAME.encode(), at)
    return [prefix + hash_of(number) for number in range(count)]


def blocks_of(keys: Sequence[bytes], first_slot: int, generations: Generations) -> SharedBlocks:
    """In consecutive slots. `generations`: expected; empty: not checked."""
    slots = np.arange(first_slot, first_slot + len(keys), dtype=np.int64) * SLOT_BYTES
    return shared_blocks(keys, slots, np.full(len(keys), SLOT_BYTES, np.int64), generations)


def write(bench: Bench, keys: Sequence[bytes]) -> None:
    """Content numbers count from 0."""
    bench.fill(range(len(keys)), range(len(keys)))
    codes, _ = bench.answer(blocks_of(keys, 0, {}))
    assert (codes == Write.STORED).all(), codes.tolist()


def read(tier: Any, keys: Sequence[bytes], generations: Generations) -> list[int]:
    """Values of `Read`, into slots from READ_AT on."""
    blocks, until_s = blocks_of(keys, READ_AT, generations), time.monotonic() + WAIT_S
    return answer(lambda done: tier.read(blocks, until_s, lambda codes: done(codes.tolist())))


def probe(tier: Any, keys: Sequence[bytes], generations: Generations) -> list[int]:
    """FOUND, ABSENT or FAILED."""
    until_s = time.monotonic() + WAIT_S
    return answer(
        lambda done: tier.probe(keys, until_s, lambda codes: done(codes.tolist()), generations)
    )


# ------------------------------------------------------------------------------------------- Checks


def check_generations(store: SharedStore) -> None:
    """Two nodes get one first generation, from the clock; each flush raises it, also above
    `floor`, and after the store has lost it."""
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
        # A flush makes a generation where there is none.
        store.lose()
        raised = flush(one.tier)
        assert raised and raised > third and generation(other.tier) == raised


def check_races(store: SharedStore) -> None:
    """Nodes that ask at once get one generation; flushes at once make one each."""
    with store.node() as one, store.node() as other:
        tiers: list[Any] = [one.tier, other.tier]
        with _many() as (begin, shown):
            for tier in tiers * 3:
                tier.generations([NAME], time.monotonic() + WAIT_S, begin())
        (first,) = {answered.generations[NAME] for answered in shown}
        with _many() as (begin, raised):
            for tier in tiers * 4:
                tier.raise_generation(NAME, 0, begin())
        assert len({first, *raised}) == 9
        assert generation(one.tier) == generation(other.tier) == max(raised)


def check_reads(store: SharedStore) -> None:
    """Blocks are found before another node's flush, not after it; then the new generation is
    reported, and what is written in it is found."""
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
    """Without its generation, or with bytes that are no number, a key space has no blocks;
    others are not affected."""
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
            tier: Any = one.tier
            until_s = time.monotonic() + WAIT_S
            shown: Any = answer(partial(tier.generations, [NAME, OTHER], until_s))
            assert shown and shown.generations.keys() == {OTHER}, value
            assert read(other.tier, keys, {}) == [Read.FOUND] * 2, value
        store.lose()


def check_closed(store: SharedStore) -> None:
    """A closed tier answers None."""
    with store.node() as one:
        one.tier.close()
        assert generation(one.tier) is None and flush(one.tier) is None


def check_flushes(store: SharedStore) -> None:
    for check in (check_generations, check_races, check_reads, check_lost, check_closed):
        check(store)
        store.lose()


@contextlib.contextmanager
def _many() -> "Any":
    """Yields a maker of callbacks and their arguments so far; waits for all callbacks at the
    end."""
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
