"""State machines for a tier below host memory, and for a shared store that forgets blocks at will,
against a naive model of the bytes in all."""

import contextlib

import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bench.policies import POLICIES
from hotkv_proto import table
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.removal import finished
from hotkv_server.cache.room.space import Space
from hotkv_server.cache.values import BoolMask, CoreConfig, HashList, Run
from hotkv_server.tiers.book.books import TierBooks, books_of
from hotkv_server.tiers.book.copies import MAX_TRIES, OLD, Copies
from hotkv_server.tiers.book.moves import Move
from tests.core.support import begin_store, evict, flush, make_key_space, make_table, words_of

SLAB = 4 * SLOT_ALIGN
NUM_HASHES = 12
NUMBERS = st.lists(st.integers(0, NUM_HASHES - 1), min_size=1, max_size=6, unique=True)
GROUPS = st.integers(0, 1)
SPACES = st.integers(1, 2)
Content = tuple[int, int, bytes, int]
"""What a slot or place holds: key space, group, hash, and the number of flushes before."""
GARBAGE: Content = (0, 0, b"", 0)


def encoded_bytes(slot_bytes: int) -> int:
    """Bytes of a compressed block in the tier. For SLOT_ALIGN bytes, they are more than the slot
    has."""
    return {1: 2, 2: 1, 3: 2}[slot_bytes // SLOT_ALIGN] * SLOT_ALIGN


class LowerMachine(RuleBasedStateMachine):
    """An arena of six slabs, and a tier of one, three or nine."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        sizes=st.sampled_from([(SLOT_ALIGN, 2 * SLOT_ALIGN), (3 * SLOT_ALIGN, SLOT_ALIGN)]),
        places=st.sampled_from([1, 3, 9]),
        capacity=st.sampled_from([3, 40]),
        encodes=st.booleans(),
    )
    def start(
        self, policy: str, sizes: tuple[int, int], places: int, capacity: int, encodes: bool
    ) -> None:
        below = Space(make_table(capacity), places * SLAB, SLAB, POLICIES[policy](capacity))
        by = encoded_bytes if encodes else None
        config = CoreConfig(6 * SLAB, SLAB, 40, lease_ttl_s=10.0)
        self.sizes, self.encodes = sizes, encodes
        self.core = CacheCore(config, make_table(40), POLICIES[policy](40))
        self.books = TierBooks(self.core, below, encoded_bytes=by)
        assert self.books.lower is not None
        self.lower = self.books.lower
        self.sessions = {
            number: self.core.open_session(
                "e", "worker", make_key_space(f"m{number}", *sizes), 0.0
            ).number
            for number in (1, 2)
        }
        self.slots: dict[int, Content] = {}
        self.places: dict[int, Content] = {}
        self.forms: dict[int, bool] = {}
        self.num_flushes = {1: 0, 2: 0}
        self.moves: list[tuple[Move, list[Content], list[int]]] = []
        self.waiting: list[Move] = []
        self.leases: list[tuple[str, int]] = []
        self.now_s, self.num_calls = 1.0, 0

    # Host memory

    @rule(space=SPACES, group=GROUPS, numbers=NUMBERS, depth=st.integers(0, 2))
    def store(self, space: int, group: int, numbers: list[int], depth: int) -> None:
        self.num_calls += 1
        self.now_s += 1.0
        name, session = f"store {self.num_calls}", self.sessions[space]
        runs = [Run(group, words_of(numbers), depth=depth)]
        slots = begin_store(self.core, session, name, name, runs, 0, 0.0, self.now_s)
        for run in slots:
            for position, offset in zip(run.positions.tolist(), run.offsets.tolist(), strict=True):
                self.slots[offset] = self.content(space, group, numbers[position])
        self.core.end_store(session, name, True, self.now_s)

    @rule(space=SPACES, group=GROUPS, numbers=NUMBERS)
    def lease(self, space: int, group: int, numbers: list[int]) -> None:
        self.num_calls += 1
        lists = [HashList(group, words_of(numbers))]
        name = f"lease {self.num_calls}"
        self.core.acquire(self.sessions[space], name, lists, 10.0, self.now_s)
        self.leases.append((name, self.sessions[space]))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name, session = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        assert self.core.release(session, name)

    @rule(space=SPACES, group=GROUPS, numbers=NUMBERS)
    def evict(self, space: int, group: int, numbers: list[int]) -> None:
        evict(self.core, space, group, words_of(numbers))

    # Moves

    @rule(data=st.data(), count=st.integers(1, 8))
    def begin_down(self, data: st.DataObject, count: int) -> None:
        ready = self.core.space.index.ready_blocks()
        some = ready[data.draw(st.permutations(range(len(ready))))[:count]]
        self.now_s += 1.0
        for move in self.lower.down.begin(some.astype(np.uint32)):
            self.goes_down(move)

    def goes_down(self, move: Move, *, is_plain: bool = False) -> None:
        offsets = self.core.space.index.offsets(move.entries).tolist()
        places = self.lower.space.index.offsets(move.places).tolist()
        is_encoded = self.is_encoded(move)
        assert not is_plain or not is_encoded.any(), "what can't be encoded was to be again"
        # While the copy runs, the tier's places may contain anything.
        self.places.update(dict.fromkeys(places, GARBAGE))
        self.forms.update(zip(places, is_encoded.tolist(), strict=True))
        self.moves.append((move, [self.slots[offset] for offset in offsets], offsets))

    def is_encoded(self, move: Move) -> BoolMask:
        """Mask of the blocks that are compressed in the tier. Checks all sizes."""
        groups = self.core.space.index.keys(move.entries)[1]
        slots = np.array(self.sizes, np.int64)[groups]
        places = self.lower.space.index.slot_bytes(move.places)
        assert np.array_equal(self.core.space.index.slot_bytes(move.entries), slots)
        allowed = [{size, min(size, encoded_bytes(size))} for size in slots.tolist()]
        for place, sizes in zip(places.tolist(), allowed, strict=True):
            assert place in sizes and (self.encodes or place == max(sizes))
        smaller: BoolMask = places < slots
        return smaller

    @rule(space=SPACES, group=GROUPS, numbers=NUMBERS)
    def lie_below_only(self, space: int, group: int, numbers: list[int]) -> None:
        """Stores, demotes and evicts blocks, so that later steps can promote them."""
        self.store(space, group, numbers, 0)
        words = self.core.space.index.find(space, group, words_of(numbers))
        ready = np.unique(words[table.is_ready(words)])
        for move in self.lower.down.begin(ready):
            offsets = self.core.space.index.offsets(move.entries).tolist()
            places = self.lower.space.index.offsets(move.places).tolist()
            self.places.update(zip(places, [self.slots[offset] for offset in offsets], strict=True))
            self.forms.update(zip(places, self.is_encoded(move).tolist(), strict=True))
            all_of = np.ones(len(move), np.bool_)
            self.lower.down.end(move, all_of, np.full(len(move), 7, np.uint64), self.now_s)
        evict(self.core, space, group, words_of(numbers))

    @rule(space=SPACES, group=GROUPS, numbers=NUMBERS)
    def begin_up(self, space: int, group: int, numbers: list[int]) -> None:
        self.move_up(space, HashList(group, words_of(numbers)))

    @precondition(lambda self: len(self.lower.space.index.ready_blocks()))
    @rule(data=st.data())
    def begin_up_what_lies_below(self, data: st.DataObject) -> None:
        ready = self.lower.space.index.ready_blocks()
        some = ready[[data.draw(st.integers(0, len(ready) - 1))]]
        spaces, groups, words = self.lower.space.index.keys(some)
        self.move_up(int(spaces[0]), HashList(int(groups[0]), words))

    def move_up(self, space: int, listed: HashList) -> None:
        (wanted,) = self.lower.up.wanted(space, [listed])
        self.now_s += 1.0
        move = self.lower.up.begin(space, [listed], self.now_s)
        if move is None:
            return
        assert len(move) <= len(wanted)
        assert self.books.arrivals.is_coming(space, listed.group_index, listed.hashes).sum() >= len(
            move
        )
        offsets = self.core.space.index.offsets(move.entries).tolist()
        self.slots.update(dict.fromkeys(offsets, GARBAGE))
        places = self.lower.space.index.offsets(move.places).tolist()
        forms = [self.forms[place] for place in places]
        assert self.is_encoded(move).tolist() == forms, "a block would be read in another form"
        self.moves.append((move, [], offsets))

    @precondition(lambda self: self.moves)
    @rule(data=st.data(), fails=st.sampled_from(["none", "some", "all"]))
    def end_move(self, data: st.DataObject, fails: str) -> None:
        at = data.draw(st.integers(0, len(self.moves) - 1))
        move, contents, offsets = self.moves.pop(at)
        works = np.array(
            [fails == "none" or (fails == "some" and data.draw(st.booleans())) for _ in offsets]
        )
        places = self.lower.space.index.offsets(move.places).tolist()
        self.now_s += 1.0
        if not move.is_up:
            for offset, content in zip(offsets, contents, strict=True):
                assert self.slots[offset] == content, "a slot changed while the tier read it"
            can_fit = np.array([data.draw(st.booleans()) for _ in offsets], np.bool_)
            unfit = self.is_encoded(move) & ~can_fit
            works = works.astype(np.bool_) & ~unfit
            for place, content, good in zip(places, contents, works.tolist(), strict=True):
                if good:
                    self.places[place] = content
            seals = np.full(len(offsets), 7, np.uint64)
            entries, is_void = move.entries, move.is_void
            again = self.lower.down.end(move, works, seals, self.now_s, unfit)
            is_there = self.core.space.index.is_ready(entries)
            assert np.array_equal(again, entries[unfit & ~is_void & is_there])
            for plain in self.lower.down.begin(again, is_plain=True):
                self.goes_down(plain, is_plain=True)
            return
        if len(move.forsaken):
            none = np.zeros(len(offsets), np.bool_)
            self.lower.up.end(move, works.astype(np.bool_), none, None, self.now_s)
            assert not len(move.kept), "a block that nobody waited for became ready"
            self.waiting.append(move)
            return
        entries = self.core.space.index.keys(move.entries)
        keys = [
            (int(space), int(group), words.tobytes())
            for space, group, words in zip(*entries, strict=True)
        ]
        holds = np.array([self.places[p][:3] == k for p, k in zip(places, keys, strict=True)])
        found = works & holds
        for offset, place, good in zip(offsets, places, found.tolist(), strict=True):
            if good:
                self.slots[offset] = self.places[place]
        self.lower.up.end(move, found.astype(np.bool_), ~holds, None, self.now_s)
        self.waiting.append(move)
        for space, group, words in [k for k, good in zip(keys, holds, strict=True) if not good]:
            hashes = np.frombuffer(words, np.uint32).reshape(1, 8)
            assert not self.lower.up.find(space, HashList(group, hashes))[0], (
                "a lost block is there"
            )

    @precondition(lambda self: any(move.is_up for move, _, _ in self.moves))
    @rule(data=st.data())
    def hang(self, data: st.DataObject) -> None:
        """The hung tier may still write to its slots, so lookups must not find the blocks."""
        up = [move for move, _, _ in self.moves if move.is_up and len(move.entries)]
        if up:
            move = data.draw(st.sampled_from(range(len(up))).map(up.__getitem__))
            spaces, groups, words = self.core.space.index.keys(move.entries)
            self.books.arrivals.forsake(move)
            for space, group, one in zip(spaces, groups, words, strict=True):
                found = self.core.space.index.find(int(space), int(group), one.reshape(1, 8))
                assert not found[0], "a block that a hung tier was to bring in is still reserved"

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        move = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        self.books.arrivals.release(move)

    @precondition(lambda self: len(self.lower.space.index.ready_blocks()))
    @rule(data=st.data(), is_read=st.booleans())
    def lose(self, data: st.DataObject, is_read: bool) -> None:
        ready = self.lower.space.index.ready_blocks()
        one = ready[[data.draw(st.integers(0, len(ready) - 1))]]
        self.places[int(self.lower.space.index.offsets(one)[0])] = GARBAGE
        if is_read:
            spaces, groups, words = self.lower.space.index.keys(one)
            self.move_up(int(spaces[0]), HashList(int(groups[0]), words))

    # Flush

    @precondition(lambda self: len(self.lower.space.index.ready_blocks()))
    @rule(data=st.data())
    def flush_while_it_moves_up(self, data: st.DataObject) -> None:
        self.begin_up_what_lies_below(data)
        if self.moves:
            self.flush(self.moves[-1][0].key_space_id, data)

    @rule(space=SPACES, data=st.data())
    def flush(self, space: int, data: st.DataObject) -> None:
        """During the flush, no move of the key space may begin, and those under way are void."""
        parts = self.core.flush(space)
        next(parts, None)
        with self.books.stopped(space):
            pass
        self.begin_down(data, 8)
        self.begin_up(space, 0, [0, 1, 2])
        assert not any(
            move.key_space_id == space and not move.is_void.all() for move, *_ in self.moves
        )
        self.num_flushes[space] += 1
        for _ in parts:
            pass
        for group in (0, 1):
            assert not self.core.space.index.find(space, group, words_of(range(NUM_HASHES))).any()
        assert not len(self.lower.space.index.ready_blocks(space))

    # Invariants

    def content(self, space: int, group: int, number: int) -> Content:
        return space, group, words_of([number])[0].tobytes(), self.num_flushes[space]

    @invariant()
    def what_is_found_is_what_was_stored(self) -> None:
        self.core.take_effects()
        for index, contents in (
            (self.core.space.index, self.slots),
            (self.lower.space.index, self.places),
        ):
            ready = index.ready_blocks()
            for entry, offset in zip(ready, index.offsets(ready).tolist(), strict=True):
                spaces, groups, words = index.keys(np.array([entry], np.uint32))
                space, group = int(spaces[0]), int(groups[0])
                expected = (space, group, words[0].tobytes(), self.num_flushes[space])
                found = contents[offset]
                if index is self.core.space.index:
                    assert found == expected, "a slot has other bytes than its block"
                else:
                    assert found in (expected, GARBAGE), "a place was given to another block"

    @invariant()
    def books_agree(self) -> None:
        self.core.check_invariants()

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        while self.moves:
            move, *_ = self.moves.pop()
            none = np.zeros(len(move.is_void), np.bool_)
            if move.is_up:
                self.lower.up.end(move, none, none, None, self.now_s)
                self.waiting.append(move)
            else:
                self.lower.down.end(move, none, np.zeros(len(move), np.uint64), self.now_s)
        for move in self.waiting:
            self.books.arrivals.release(move)
        for name, session in self.leases:
            self.core.release(session, name)
        self.core.check_invariants()
        for index in (self.core.space.index, self.lower.space.index):
            assert not index.pins.any() and (index.states() != table.STATE_RESERVED).all()
        assert flush(self.core, 1) >= 0 and flush(self.core, 2) >= 0
        assert not self.core.space.used_bytes() and not self.lower.space.used_bytes()


# A shared store beside the tier


class SharedMachine(LowerMachine):
    """`remote` is the store, with numbers of flushes in place of generations."""

    def __init__(self) -> None:
        super().__init__()
        self.remote: set[Content] = set()
        self.going: list[tuple[Move, list[Content], list[int]]] = []
        self.coming: list[tuple[Move, int]] = []
        self.lanes: dict[int, int] = {}
        self._copies: Copies | None = None

    @property
    def _tiers(self) -> TierBooks:
        try:
            return books_of(self.core)
        except LookupError:
            return TierBooks(self.core)

    @property
    def copies(self) -> Copies:
        if self._copies is None:
            self._copies = Copies(self._tiers.moves)
            self._tiers.copies.append(self._copies)
        return self._copies

    @precondition(lambda self: self.copies.num_waiting)
    @rule(num_bytes=st.integers(0, 1 << 16), is_flushed=st.booleans(), data=st.data())
    def begin_out(self, num_bytes: int, is_flushed: bool, data: st.DataObject) -> None:
        """`is_flushed`: a flush of the first block's key space runs."""
        lanes = [lane for lane, waiting in enumerate(self.copies.lanes) if len(waiting)]
        lane = data.draw(st.sampled_from(lanes))
        taken = finished(self.copies.take(num_bytes, lane))
        key_spaces = self.core.space.index.key_spaces(taken).tolist()
        flushed = key_spaces[0] if is_flushed and key_spaces else 0
        held, before = np.array(key_spaces) == flushed, len(self.copies.lanes[lane])
        with self._tiers.stopped(flushed) if flushed else contextlib.nullcontext():
            moves = self.copies.begin(taken, lane)
        assert sum(map(len, moves)) == (~held).sum()
        assert len(self.copies.lanes[lane]) == before + held.sum()
        for move in moves:
            self.lanes[move.number] = lane
            offsets = self.core.space.index.offsets(move.entries).tolist()
            self.going.append((move, [self.slots[offset] for offset in offsets], offsets))

    @precondition(lambda self: self.going)
    @rule(data=st.data())
    def end_out(self, data: st.DataObject) -> None:
        move, contents, offsets = self.going.pop(data.draw(st.integers(0, len(self.going) - 1)))
        for offset, content in zip(offsets, contents, strict=True):
            assert self.slots[offset] == content, "a slot changed while the tier read it"
            if data.draw(st.booleans()):
                self.remote.add(content)
        failed = np.array([data.draw(st.booleans()) for _ in range(len(move))], np.bool_)
        may_go = failed & ~move.is_void & self.core.space.index.is_ready(move.entries)
        lane = max(OLD, self.lanes.pop(move.number)) + 1
        before = list(map(len, self.copies.lanes))
        num_given_up = self.copies.end(move, failed)
        if lane > OLD + MAX_TRIES:
            assert num_given_up == may_go.sum()
        else:
            assert not num_given_up
            before[lane] += may_go.sum()
        assert list(map(len, self.copies.lanes)) == before

    @rule(space=SPACES)
    def offer_old(self, space: int) -> None:
        self.copies.add_old(self.core.space.index.ready_blocks(space))

    @rule(space=SPACES, group=GROUPS, numbers=NUMBERS)
    def begin_in(self, space: int, group: int, numbers: list[int]) -> None:
        listed, record = HashList(group, words_of(numbers)), self.core.catalog.record(space)
        (absent,) = self._tiers.arrivals.absent(space, [listed])
        there = [at for at in absent if self.content(space, group, numbers[at]) in self.remote]
        move = self._tiers.arrivals.begin(
            space, [listed], [np.array(there, np.int64)], lambda one: record.shape(one).slot_bytes
        )
        if move is not None:
            assert len(move) <= len(there) and not len(move.places)
            offsets = self.core.space.index.offsets(move.entries).tolist()
            self.slots.update(dict.fromkeys(offsets, GARBAGE))
            self.coming.append((move, self.num_flushes[space]))

    @rule(space=SPACES, group=GROUPS, numbers=NUMBERS, data=st.data())
    def share_and_fetch(
        self, space: int, group: int, numbers: list[int], data: st.DataObject
    ) -> None:
        """Puts blocks into the store as another node would, and fetches them."""
        self.remote |= {self.content(space, group, number) for number in numbers}
        self.begin_in(space, group, numbers)

    @precondition(lambda self: self.coming)
    @rule(data=st.data())
    def end_in(self, data: st.DataObject) -> None:
        move, generation = self.coming.pop(data.draw(st.integers(0, len(self.coming) - 1)))
        offsets = self.core.space.index.offsets(move.entries).tolist()
        keys = zip(*self.core.space.index.keys(move.entries), strict=True)
        found = np.zeros(len(move), np.bool_)
        for at, (space, group, words) in enumerate(keys):
            content = (int(space), int(group), words.tobytes(), generation)
            if content in self.remote and data.draw(st.booleans()):
                self.slots[offsets[at]] = content
                found[at] = True
        self.now_s += 1.0
        came = self._tiers.arrivals.end(move, found, None, self.now_s)
        assert len(came) == int(found.sum())
        self.waiting.append(move)

    @rule(keep=st.booleans())
    def forget(self, keep: bool) -> None:
        self.remote = {content for at, content in enumerate(sorted(self.remote)) if keep and at % 2}

    def teardown(self) -> None:
        for move, _ in self.coming:
            self._tiers.arrivals.end(move, np.zeros(len(move), np.bool_), None, self.now_s)
            self.waiting.append(move)
        for move, *_ in self.going:
            self.copies.end(move)
        super().teardown()
