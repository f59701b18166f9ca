"""Tests `GenerationBook`: a node that reaches a store must never serve a block of before an
answered flush. The state machine has three nodes and a store that answers late, goes down, loses
its generations, or is restored from a copy. For a while nodes distrust it then; in this time the
node that knows the latest generation reaches it."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hotkv_server.tiers.book import generations as generation_book
from hotkv_server.tiers.book.generations import (
    ASK_EVERY_S,
    CALM_S,
    CONFIRMED_S,
    IDLE_EVERY_S,
    NO_GENERATION,
    RAISE_WAIT_S,
    RETRY_S,
    SPARE_S,
    USED_S,
    GenerationBook,
    GenerationStanding,
    Raise,
    Record,
    Ticket,
)

FP = "aa"
GRACE_S = 5.0
TURN_S = 0.1
NUM_NODES = 3


@dataclass
class Store:
    """A naive store.

    copies: backups from which it may be restored.
    blocks: (generation, moment of the store).
    """

    generation: int = 0
    clock: int = 0
    blocks: set[tuple[int, int]] = field(default_factory=set)
    copies: list[tuple[int, frozenset[tuple[int, int]]]] = field(default_factory=list)
    is_up: bool = True
    takes_raises: bool = True
    trusted_at_s: float = 0.0
    restored_below: int = 0

    def shown(self, now_s: float) -> tuple[int, int]:
        self.generation = self.generation or self.tick()
        return self.generation, self.restored_below if now_s < self.trusted_at_s else 0

    def raised(self, floor: int) -> int:
        self.generation = max(self.generation + 1, floor + 1, self.tick())
        return self.generation

    def tick(self) -> int:
        """Generations are such times."""
        self.clock += 10
        return self.clock


@dataclass
class Node:
    """A node's book, and its blocks: the moments of their stores.

    calls: [kind, argument, answer]; None until the store has executed the call.
    """

    book: GenerationBook
    blocks: set[int] = field(default_factory=set)
    flushing: set[int] | None = None
    calls: list[list[object]] = field(default_factory=list)
    is_asking: bool = False
    tickets: list[tuple[Ticket, int]] = field(default_factory=list)
    saved: GenerationBook | None = None
    is_stopped: bool = False
    is_cut: bool = False


def kept(book: GenerationBook) -> GenerationBook:
    """The next server's book has only the saved records."""
    records = {
        name: Record(
            one.local,
            {
                s: GenerationStanding(t.generation, t.is_verified, t.is_unraised)
                for s, t in one.stores.items()
            },
        )
        for name, one in book.records.items()
    }
    return GenerationBook(book.stores, records, book.base, book.last)


class Flushes(RuleBasedStateMachine):
    """Moments grow with each stored block and each flush.

    flushed: of the latest flush that was answered and confirmed. Nothing older may be served.
    knower: after a restore, the node with the latest generation; else None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.moment = self.flushed = 0
        self.store = Store()
        self.nodes = [Node(GenerationBook(("store",))) for _ in range(NUM_NODES)]
        self.knower: Node | None = None

    numbers = st.integers(0, NUM_NODES - 1)

    @rule(seed=st.integers(0, 1 << 30), turns=st.integers(1, 30), haste=st.floats(0.3, 1.0))
    def run(self, seed: int, turns: int, haste: float) -> None:
        """Some turns, in which nodes and store do each thing that they can with probability
        `haste`."""
        dice = random.Random(seed)
        for _ in range(turns):
            self.now_s += TURN_S
            self.store.is_up = self.store.is_up or dice.random() < 0.03
            self.store.takes_raises |= dice.random() < 0.03
            for node in self.nodes:
                node.is_cut = node.is_cut and dice.random() > 0.03
                node.is_stopped = node.is_stopped and dice.random() > 0.03
            for node in dice.sample(self.nodes, NUM_NODES):
                self.store_works(node, dice, haste)
                if not node.is_stopped:
                    self.node_works(node, dice, haste)

    def store_works(self, node: Node, dice: random.Random, haste: float) -> None:
        for call in node.calls:
            if call[-1] is None and self.store.is_up and not node.is_cut:
                if dice.random() > haste:
                    return
                what, argument, _ = call
                if what == "ask":
                    call[-1] = self.store.shown(self.now_s)
                else:
                    assert isinstance(argument, int)
                    call[-1] = self.store.takes_raises and self.store.raised(argument)

    def node_works(self, node: Node, dice: random.Random, haste: float) -> None:
        book, is_away = node.book, node.is_cut or not self.store.is_up
        while node.calls and (node.calls[0][-1] is not None or is_away):
            if dice.random() > haste:
                break
            what, argument, answer = node.calls.pop(0)
            # An answer on its way may be lost too.
            answer = None if is_away and dice.random() < 0.5 else answer
            if what == "raise":
                book.raised("store", FP, answer or None, self.now_s)  # type: ignore[arg-type]
                continue
            node.is_asking = False
            if answer is not None:
                generation, below = answer  # type: ignore[misc]
                has_blocks = {FP} if node.blocks else ()
                book.shown("store", {FP: generation}, below, argument, has_blocks)  # type: ignore[arg-type]
        if dice.random() < 0.7:
            book.use(FP, self.now_s)
        if not node.is_asking and book.due("store", [FP], self.now_s):
            node.is_asking = True
            node.calls.append(["ask", self.now_s, None])
        if wanted := book.begin_raise("store", self.now_s):
            node.calls.append(["raise", wanted.floor, None])
        if node.flushing is not None and dice.random() < haste:
            node.blocks -= node.flushing
            node.flushing = None
            book.flushed(FP, self.now_s)
        elif node.flushing is None and book.begin_flush(self.now_s):
            node.flushing = set(node.blocks)
        if dice.random() < haste:
            book.saved = book.revision
            node.saved = kept(book)
        self.answer(node)
        if dice.random() < 0.3:
            self.moment += 1
            node.blocks.add(self.moment)
        generation = book.generation(FP, "store")
        if generation and not is_away and dice.random() < 0.5:
            self.store.blocks |= {(generation, block) for block in node.blocks}
        self.load(node)

    def load(self, node: Node) -> None:
        if not node.book.is_fresh(FP, "store", self.now_s) or node.book.is_outdated(FP):
            return
        served = set(node.blocks)
        generation = node.book.generation(FP, "store")
        if (
            not node.is_cut
            and self.store.is_up
            and generation
            and generation == self.store.generation
        ):
            found = {block for at, block in self.store.blocks if at == generation}
            served |= found
            node.blocks |= found
        assert not served or min(served) > self.flushed, "a block of before a flush is served"

    def answer(self, node: Node) -> None:
        for ticket, moment in list(node.tickets):
            pending = node.book.pending(ticket, self.now_s)
            if pending is None or not node.book.is_saved(ticket):
                continue
            node.tickets.remove((ticket, moment))
            assert not node.blocks or min(node.blocks) > moment, "a flush here has left blocks"
            if not pending:
                self.flushed = max(self.flushed, moment)

    @rule(
        number=numbers,
        waits=st.booleans(),
        seed=st.integers(0, 1 << 30),
        turns=st.integers(0, 40),
        haste=st.floats(0.3, 1.0),
    )
    def flush(self, number: int, waits: bool, seed: int, turns: int, haste: float) -> None:
        node = self.nodes[number]
        if not node.is_stopped:
            self.moment += 1
            ticket = node.book.flush(FP, self.now_s)
            node.tickets += [(ticket, self.moment)] * waits
            self.run(seed, turns, haste)

    @rule(number=numbers)
    def stop_or_go_on(self, number: int) -> None:
        node = self.nodes[number]
        node.is_stopped = not node.is_stopped and node is not self.knower

    @rule(number=numbers)
    def cut_or_heal(self, number: int) -> None:
        node = self.nodes[number]
        node.is_cut = not node.is_cut and node is not self.knower

    @rule(number=numbers)
    def kill(self, number: int) -> None:
        old = self.nodes[number]
        book = kept(old.saved) if old.saved else GenerationBook(("store",))
        new = self.nodes[number] = Node(book, old.blocks, saved=old.saved)
        if old is self.knower:
            self.knower = new

    @rule()
    def store_goes_or_comes(self) -> None:
        self.store.is_up = not self.store.is_up or self.knower is not None

    @rule()
    def store_refuses_raises(self) -> None:
        self.store.takes_raises = False

    @rule()
    def copy_is_made(self) -> None:
        self.store.copies.append((self.store.generation, frozenset(self.store.blocks)))

    @precondition(lambda self: self.store.copies)
    @rule(data=st.data(), seed=st.integers(0, 1 << 30))
    def store_comes_back_old(self, data: st.DataObject, seed: int) -> None:
        """Until it is trusted again, `knower` has no faults, so that it can raise the
        generation."""
        store = self.store
        generation, blocks = data.draw(st.sampled_from(store.copies))
        store.generation, store.blocks = generation, set(blocks)
        store.is_up, store.restored_below = True, store.tick()
        store.trusted_at_s = self.now_s + GRACE_S
        for node in self.nodes:
            for call in node.calls:
                call[-1] = call[-1] if call[-1] is not None else ("lost",)
            node.calls = [call for call in node.calls if call[-1] != ("lost",)]
            node.is_asking = any(call[0] == "ask" for call in node.calls)
            for standing in [node.book.standing(FP, "store")]:
                is_sent = any(call[0] == "raise" for call in node.calls)
                if standing.is_raising and not is_sent:
                    node.book.raised("store", FP, None, self.now_s)
        self.knower = max(self.nodes, key=lambda one: one.book.standing(FP, "store").generation)
        self.knower.is_stopped = self.knower.is_cut = False
        self.run(seed, int(GRACE_S / TURN_S) + 1, 0.9)
        self.knower = None

    @rule()
    def store_loses_all(self) -> None:
        self.store.generation = 0
        self.store.blocks.clear()

    def teardown(self) -> None:
        """Without faults, all flushes are answered, and all agree with the store."""
        self.store.is_up = self.store.takes_raises = True
        for node in self.nodes:
            node.is_cut = node.is_stopped = False
        turns = int((2 * GRACE_S + 2 * RETRY_S + 2 * CONFIRMED_S + RAISE_WAIT_S) / TURN_S)
        self.run(0, turns, 1.0)
        for node in self.nodes:
            assert not node.tickets, "a flush is never answered"
            assert node.book.is_fresh(FP, "store", self.now_s) and not node.book.is_outdated(FP)
            assert node.book.generation(FP, "store") == self.store.generation
            assert node.book.are_seals_saved and node.flushing is None

    @invariant()
    def books_hold(self) -> None:
        for node in self.nodes:
            node.book.check_invariants()


TestFlushes = Flushes.TestCase
TestFlushes.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


class Shown(GenerationBook):
    """A book with one store whose generation it knows."""

    def __init__(self, generation: int = 7) -> None:
        super().__init__(("store",))
        self.use(FP, 0.0)
        self.shows(generation, 0.0)

    def shows(
        self, generation: int, now_s: float, below: int = 0, blocks: tuple[str, ...] = ()
    ) -> None:
        """Asks the store.

        below: nonzero if the store has just restarted; lower generations are not trusted.
        blocks: key spaces of which the node has some.
        """
        assert self.due("store", (), now_s) == [FP]
        self.shown("store", {FP: generation}, below, now_s, blocks)

    def raises(self, now_s: float) -> int:
        """The number that the new generation must exceed; 0: no raise is needed now."""
        wanted = self.begin_raise("store", now_s)
        return wanted.floor if wanted else 0

    def flushes(self, now_s: float) -> None:
        assert self.begin_flush(now_s) == FP
        self.flushed(FP, now_s)

    def state(self, now_s: float) -> tuple[int, bool, bool]:
        """(Generation of the node's blocks, whether it was confirmed in the last CONFIRMED_S,
        whether it is outdated)."""
        is_fresh = self.is_fresh(FP, "store", now_s)
        return self.generation(FP, "store"), is_fresh, self.is_outdated(FP)


def test_flush_waits_until_others_have_asked() -> None:
    book = Shown()
    revision = book.revision
    ticket = book.flush(FP, 10.0)
    assert book.revision > revision, "a flush that is not written down is lost with the server"
    assert book.begin_flush(10.0) == "", "the store may still be told first"
    assert book.raises(10.0) == 7
    assert not book.raises(10.0), "one raise at a time"
    book.raised("store", FP, 9, 10.1)
    assert book.begin_flush(10.1) == FP and book.generation(FP, "store") == NO_GENERATION
    book.flushed(FP, 10.2)
    assert book.generation(FP, "store") == 9
    assert book.pending(ticket, 10.1 + CONFIRMED_S - 0.01) is None
    book.shows(9, 10.3)
    assert book.pending(ticket, 10.1 + CONFIRMED_S) is None, "the store may have restarted since"
    book.shows(9, 11.0)
    assert book.pending(ticket, 10.1 + CONFIRMED_S) == []
    assert not book.is_saved(ticket)
    book.saved = book.revision
    assert book.is_saved(ticket) and book.are_seals_saved


def test_flush_lost_again_by_the_store_pends() -> None:
    book = Shown()
    ticket = book.flush(FP, 10.0)
    assert book.raises(10.0)
    book.raised("store", FP, 9, 10.1)
    book.flushes(10.1)
    # The store was restored from a copy.
    book.shows(7, 11.0, blocks=(FP,))
    assert book.pending(ticket, 10.1 + CONFIRMED_S) is None
    assert book.pending(ticket, 10.1 + CONFIRMED_S + SPARE_S) == ["store"]
    assert book.raises(11.1) == 9
    # The store refuses the raise.
    book.raised("store", FP, None, 11.2)
    revision = book.revision
    book.shows(7, 11.5, blocks=(FP,))
    assert not book.raises(11.6) and book.revision == revision


def test_later_requests_delay_no_flush_of_hung_store() -> None:
    book = Shown()
    book.flush(FP, 10.0)
    assert book.raises(10.0)
    book.flush(FP, 10.0 + RAISE_WAIT_S / 2)
    assert book.begin_flush(10.0 + RAISE_WAIT_S - 0.01) == ""
    assert book.begin_flush(10.0 + RAISE_WAIT_S) == FP
    book.flush(FP, 20.0)
    book.flushed(FP, 20.0)
    book.flush(FP, 20.0 + RAISE_WAIT_S / 2)
    assert book.begin_flush(20.0 + RAISE_WAIT_S - 0.01) == "", "the store may still be told first"
    assert book.begin_flush(20.0 + RAISE_WAIT_S) == FP


def test_raises_that_fail_slowly_starve_no_key_space() -> None:
    book = GenerationBook(("store",))
    names = ["aa", "bb", "cc"]
    for name in names:
        book.flush(name, 10.0)
    now_s, sent = 10.0, []
    for _ in range(6):
        wanted = book.begin_raise("store", now_s)
        assert wanted and wanted.is_retry == (wanted.fingerprint in sent)
        sent.append(wanted.fingerprint)
        now_s += 1.2 * RETRY_S
        book.raised("store", wanted.fingerprint, None, now_s)
    assert sent == names * 2
    book.flush("aa", now_s)
    assert book.begin_raise("store", now_s + RETRY_S) == Raise("aa", NO_GENERATION, False)


def test_failing_flush_starves_no_key_space() -> None:
    book = GenerationBook()
    for name in ("aa", "bb"):
        book.flush(name, 0.0)
    for name in ("aa", "bb", "aa"):
        assert book.begin_flush(0.0) == name
        book.broke(name)


def test_only_key_spaces_in_use_are_asked_often() -> None:
    book = GenerationBook(("store",))
    idle = [f"{number:04x}" for number in range(200)]
    book.use(FP, 100.0)
    first = book.due("store", idle, 100.0)
    assert first[0] == FP and len(first) == 1 + generation_book.MAX_IDLE
    assert book.due("store", (), 100.0 + ASK_EVERY_S / 2) == []
    assert book.due("store", (), 100.0 + ASK_EVERY_S) == [FP]
    asked = set(first)
    for turn in range(4):
        asked |= set(book.due("store", idle, 101.0 + turn))
    assert asked == {FP, *idle}, "some are never asked for"
    assert not set(book.due("store", idle, 106.0)) & set(idle)
    assert set(book.due("store", idle, 101.0 + IDLE_EVERY_S)) & set(idle)
    book.rest(set(idle), 101.0 + USED_S + IDLE_EVERY_S)
    assert book.due("store", (), 200.0) == []
    # The records name a store that the settings no longer have.
    book = GenerationBook(("store",), {FP: Record(stores={"removed": GenerationStanding()})})
    book.flush(FP, 300.0)
    assert book.begin_raise("store", 300.0)
    book.raised("store", FP, 9, 300.0)
    assert book.begin_flush(300.0) == FP
    book.flushed(FP, 300.0)
    book.rest((), 300.0 + USED_S)
    assert book.due("store", (), 400.0) == []
    assert book.records[FP].stores["removed"].is_unraised


@pytest.mark.parametrize("has_blocks", [False, True])
def test_seals_change_whenever_a_generation_is_settled_on(has_blocks: bool) -> None:
    """Seals are part of the disk's checksums: older blocks are unreadable even if the power
    fails before their records are deleted."""
    book = Shown()
    before = book.local(FP)
    book.saved = book.revision
    book.shows(9, 5.0, blocks=(FP,) if has_blocks else ())
    if has_blocks:
        assert book.is_outdated(FP)
        book.flushes(5.0)
    assert book.local(FP) > before and not book.are_seals_saved


def test_records_are_bounded_and_seals_never_return(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generation_book, "MAX_RECORDS", 30)
    book = GenerationBook(())
    names = [f"{number:06x}" for number in range(40)]
    for name in names:
        book.flush(name, 0.0)
        assert book.begin_flush(RAISE_WAIT_S) == name
        book.flushed(name, RAISE_WAIT_S)
    highest = book.local(names[-1])
    book.saved = book.revision
    for _ in range(2):
        book.rest({*names[:5], "never flushed"}, 1000.0)
    assert not book.are_seals_saved, "the next server could not read the blocks of new key spaces"
    assert set(book.records) == {*names[:5], "never flushed"}
    assert book.local(names[-1]) >= highest and book.local(names[0]) == 1
    assert not book.local("never flushed"), "its blocks on the disk could not be read any more"
    assert book.local("new") >= highest


def test_answers_in_between_wait_for_their_turn() -> None:
    book = Shown()
    assert book.due("store", (), 9.9) == [FP]
    book.flush(FP, 10.0)
    assert book.raises(10.0)
    later = book.flush(FP, 10.05)
    book.raised("store", FP, 9, 10.1)
    assert book.begin_flush(10.1) == "", "the store may still be told of the later one"
    # This was asked before the raise, so it changes nothing.
    book.shown("store", {FP: 7}, 0, 9.9, (FP,))
    assert book.raises(10.1) == 9
    book.flushes(10.05 + RAISE_WAIT_S)
    assert book.pending(later, 11.1) == ["store"]
    book = Shown()
    book.shows(8, 5.0, blocks=(FP,))
    assert book.begin_flush(5.0) == FP
    book.shows(9, 6.0, blocks=(FP,))
    book.flushed(FP, 6.1)
    assert book.state(6.1) == (NO_GENERATION, False, True), "it was shown during the flush"
    book.flushes(6.1)
    assert book.generation(FP, "store") == 9
    # Blocks here may be older than the flush that raised it.
    two = GenerationBook(("other", "store"))
    two.shown("store", {FP: 7}, 0, 1.0, (FP,))
    assert two.is_outdated(FP)
    # Flushed blocks may have been copied from the late store to the other.
    for answer in (8, None):
        two.flush(FP, 10.0)
        assert two.begin_raise("other", 10.0) and two.begin_raise("store", 10.0)
        two.raised("other", FP, 9, 10.1)
        two.raised("store", FP, answer, 10.1)
        assert not two.begin_raise("other", 10.2)
    for book in (kept(two), two):
        assert book.begin_raise("store", 20.0) and not book.begin_raise("other", 20.0)
        book.raised("store", FP, 9, 20.0)
        assert book.begin_raise("other", 20.0) and not book.begin_raise("store", 20.0)
        book.raised("other", FP, 10, 20.0)
        assert not book.begin_raise("store", 30.0) and not book.begin_raise("other", 30.0)
    # Both stores are late at the same time.
    two.flush(FP, 40.0)
    assert two.begin_raise("other", 42.0) and two.begin_raise("store", 42.0)
    two.raised("store", FP, 11, 42.1)
    two.raised("other", FP, 12, 42.1)
    for name in ("other", "store"):
        assert two.begin_raise(name, 42.2)
        two.raised(name, FP, 13, 42.3)
    assert not two.begin_raise("store", 43.0) and not two.begin_raise("other", 43.0)


def test_restored_old_copy_confirms_nothing() -> None:
    book = Shown()
    assert book.is_fresh(FP, "store", 0.1)
    book.shows(7, 5.0, below=8, blocks=(FP,))
    assert not book.is_fresh(FP, "store", 5.0)
    book.doubt(FP, 5.05)
    book.shows(7, 5.05, below=7)
    assert book.is_fresh(FP, "store", 5.05), "this generation the store had when it was copied"
    # A read has found another generation than expected.
    book.doubt(FP, 5.1)
    assert not book.is_fresh(FP, "store", 5.1) and book.due("store", (), 5.1) == [FP]


def test_no_copies_between_stores_during_refused_raise() -> None:
    """The store that refuses may still serve flushed blocks."""
    book = GenerationBook(("other", "store"))
    now_s = 0.0

    def confirm(**generations: int) -> None:
        nonlocal now_s
        now_s += 2 * CALM_S
        for name, generation in generations.items():
            book.shown(name, {FP: generation}, 0, now_s, (FP,))

    confirm(other=7, store=7)
    if book.begin_flush(now_s):
        book.flushed(FP, now_s)
    confirm(other=7, store=7)
    assert book.is_calm(FP)
    book.flush(FP, now_s)
    for name, generation in (("other", 9), ("store", None)):
        assert book.begin_raise(name, now_s)
        book.raised(name, FP, generation, now_s)
    now_s += RAISE_WAIT_S
    assert book.begin_flush(now_s)
    book.flushed(FP, now_s)
    confirm(other=9, store=7)
    assert book.is_fresh(FP, "store", now_s) and not book.is_calm(FP)


def test_no_copies_between_stores_after_a_restart() -> None:
    """The earlier server may have loaded flushed blocks from one store."""
    stores = {
        name: GenerationStanding(generation, True)
        for name, generation in (("other", 9), ("store", 7))
    }
    book = GenerationBook(("other", "store"), {FP: Record(stores=stores)})
    for now_s, is_calm in ((10.0, False), (9.9 + CALM_S, False), (10.1 + CALM_S, True)):
        for name in book.stores:
            book.shown(name, {FP: stores[name].generation}, 0, now_s, (FP,))
            assert book.is_fresh(FP, name, now_s)
        assert book.is_calm(FP) == is_calm


@pytest.mark.parametrize(
    ("later", "lost", "has_missed"),
    [
        ((7, 7), range(0), True),
        ((9, 9), range(0), False),
        ((NO_GENERATION, 11), range(0), False),
        ((9, 9), range(15, 41), False),
    ],
)
def test_store_missed_by_a_flush_is_named_once(
    later: tuple[int, int], lost: range, has_missed: bool
) -> None:
    """Another node, which does not use the second store, has flushed. If that store's generation
    changes later, nothing was

    missed: it was full until then.

    later: the second store's generations.
    lost: turns in which the first store can't be reached.
    """
    book = GenerationBook(("other", "store"))
    found = []
    for turn in range(60):
        book.use(FP, float(turn))
        generations = {
            "other": 9 if turn > 20 else 7,
            "store": 7 if turn < 25 else later[turn // 45],
        }
        for name, generation in generations.items():
            if name == "store" or turn not in lost:
                book.shown(name, {FP: generation}, 0, float(turn), (FP,))
        if book.begin_flush(float(turn)):
            book.flushed(FP, float(turn))
        found += book.missed(float(turn))
    assert found == [(FP, "store")] * has_missed
    # The second store may have flushed blocks.
    assert book.is_calm(FP) != has_missed


def test_second_flush_waits_as_long_for_stores() -> None:
    book = Shown()
    book.flush(FP, 10.0)
    second_s = 10.0 + RAISE_WAIT_S - 0.1
    ticket = book.flush(FP, second_s)
    book.raises(second_s)
    book.flushes(10.0 + RAISE_WAIT_S)
    assert book.pending(ticket, second_s + RAISE_WAIT_S - 0.01) is None
    assert book.pending(ticket, second_s + RAISE_WAIT_S) == ["store"]


def test_a_raise_that_comes_late_is_repeated_elsewhere() -> None:
    for late_s in (-0.01, 0.0):
        book = GenerationBook(("store", "other"))
        book.flush(FP, 10.0)
        for store in book.stores:
            assert book.begin_raise(store, 10.0)
        book.raised("other", FP, 9, 10.1)
        book.raised("store", FP, 9, 10.0 + RAISE_WAIT_S + late_s)
        assert book.standing(FP, "other").is_unraised == (late_s == 0.0)
