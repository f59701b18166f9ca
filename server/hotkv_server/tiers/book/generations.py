"""Decides how flushes of key spaces reach all nodes.

`GenerationBook` knows, per key space and shared store, the generation to which this node's blocks
belong. It has no clock and makes no calls: `drive.flushes` reports to it, and does what it decides.
Always true:

- Blocks are *vouched for* in a generation if this node began a flush after the store had shown it,
  or had no blocks then. So none is older than the flush that began the generation.
- A record's generation never falls. A store that shows a lower one has lost a flush, and must raise
  its own above all that this node knows.
- Blocks are served only if the store *confirmed* their generation in the last CONFIRMED_S; without
  the store, only host memory is served. A flush is answered CONFIRMED_S after the store's raise: by
  then each other node has asked again or stopped serving.
- A flush stays in the record until each store has raised. At most one raise of a key space is
  under way in a store; it covers all flushes asked for before.

What a store's answer, generation g, changes for a key space (`GenerationBook.shown`):

    this node's blocks are             answer          then
    -- the store must still raise --   any             out of date: nothing
    any                                g below theirs  the store must raise above theirs
    verified as without a generation   none            confirmed
    any other                          none            flushed here, then verified so
    verified in g                      g               confirmed
    none, and no flush runs here       g               verified in g and confirmed, without a flush
    any other                          g               flushed here, then verified in g
"""

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

CONFIRMED_S = 1.5
"""A confirmation holds for this time after the question was sent."""
ASK_EVERY_S = 0.4
"""Between two questions for a key space in use."""
USED_S = 10.0
"""A key space is in use for this time after a request for its blocks."""
IDLE_EVERY_S = 30.0
"""Between two questions for an idle key space."""
MAX_IDLE = 64
"""Most idle key spaces in one question."""
RAISE_WAIT_S = 1.0
"""How long a flush waits for a store. After that it is answered as pending, and retried."""
SPARE_S = 0.5
"""How long a flush waits, beyond CONFIRMED_S, for a store to confirm the new generation."""
CALM_S = 5.0
"""Stores raise at different moments, so one may serve old blocks when another has the new
generation. For this time no block is copied from store to store. Longer than RAISE_WAIT_S and
`drive.flushes.ASK_S` together."""
MISSED_S = 5.0
"""A store that shows no new generation this long after another has missed the flush of another
node. Longer than RAISE_WAIT_S."""
RETRY_S = 0.5
"""Between two tries to raise."""
MAX_RECORDS = 1 << 13
"""Above this, idle key spaces that this node no longer knows are forgotten."""
NO_GENERATION = 0
"""The store has none: the key space's blocks are neither read nor written there."""
NEVER_S = float("-inf")


@dataclass(slots=True)
class GenerationStanding:
    """A key space in one shared store. The first three fields are saved. An answer's time is when
    its question was sent.

    `generation`: the highest that this node has adopted.
    `is_verified`: all blocks on this node belong to it.
    `is_unraised`: the store must still raise it: a flush has not reached the store, or is lost.
    `target`: generation or NO_GENERATION to adopt when this node's flush `next_after_flush` has
        ended;
        None: no flush is needed.
    `has_no_generation`: the store can't begin a generation, and this node has flushed since.
    `confirmed_s`: last answer with `generation`.
    `raise_s`: when the last raise was sent; after a failure, when the next may be.
    `raise_for`: `Record.asked` of the last raise; -1: raise once more, as another store was late.
    `acknowledged`: `Record.asked` that the store's generation covers; -1: not even an earlier
        server's.
    `acknowledged_s`: when the store answered that raise.
    `shown_s`: last answer.
    `raised_seen_s`: last answer with a later generation than the adopted one; not the first after
        none.
    `raised_after_s`: the answer before that; the store has raised since.
    `none_seen_s`: last answer without a generation; no node could then read from the store.
    `is_reported`: `GenerationBook.missed` has named the store since `raised_seen_s`.
    """

    generation: int = NO_GENERATION
    is_verified: bool = False
    is_unraised: bool = False
    target: int | None = None
    next_after_flush: int = 0
    has_no_generation: bool = False
    confirmed_s: float = NEVER_S
    asked_s: float = NEVER_S
    is_raising: bool = False
    has_failed: bool = False
    raise_s: float = NEVER_S
    raise_for: int = 0
    acknowledged: int = 0
    acknowledged_s: float = NEVER_S
    shown_s: float = NEVER_S
    raised_seen_s: float = NEVER_S
    raised_after_s: float = NEVER_S
    none_seen_s: float = NEVER_S
    is_reported: bool = False

    @property
    def is_settled(self) -> bool:
        """The store's answers can confirm this node's blocks. A failed raise does not matter to
        them."""
        is_raised = self.has_failed or not self.is_unraised
        return self.target is None and is_raised and (self.is_verified or self.has_no_generation)


@dataclass(slots=True)
class Record:
    """A key space. `need`, `begun` and `ended` number this node's flushes, of which one may serve
    several requests.

    `local`: in the seals of its blocks on the disk. Each flush changes it, so older blocks don't
        match. Saved.
    `stores`: partly saved.
    `asked`: number of flushes asked for.
    `ended_s`: when `ended` ended; for a generation adopted later without a flush, or a record from
        the file, the time of the answer that showed it.
    `saved_at`: first `GenerationBook.revision` with the end of `ended`.
    `asked_at_s`: last request for a flush.
    `waits_s`: first request that has not begun, or NEVER_S.
    `used_s`: last request for blocks.
    """

    local: int = 0
    stores: dict[str, GenerationStanding] = field(default_factory=dict)
    asked: int = 0
    need: int = 0
    begun: int = 0
    ended: int = 0
    saved_at: int = 0
    ended_s: float = NEVER_S
    asked_at_s: float = NEVER_S
    waits_s: float = NEVER_S
    used_s: float = NEVER_S


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request for a flush. `number`: `Record.asked` with it. `need`: this node's flush that
    serves it."""

    fingerprint: str
    number: int
    need: int
    asked_s: float


@dataclass(frozen=True, slots=True)
class Raise:
    """Asks a store for a generation above `floor`, the highest that this node knows there.
    `is_retry`: the last raise for the same flushes failed.
    """

    fingerprint: str
    floor: int
    is_retry: bool


class GenerationBook:
    """See the module.

    `base`: seal number (`Record.local`) without a record.
    `last`: highest seal number ever used.
    `is_saved`: False if the caller must save these arguments.
    `revision`: grows with each change of saved state.
    `saved`: last revision that the caller has saved.
    """

    def __init__(
        self,
        stores: Sequence[str] = (),
        records: Mapping[str, Record] | None = None,
        base: int = 0,
        last: int = 0,
        *,
        is_saved: bool = True,
    ) -> None:
        self.stores = tuple(stores)
        self.records = dict(records or {})
        for record in self.records.values():
            record.stores.update(
                {n: GenerationStanding() for n in stores if n not in record.stores}
            )
            for one in record.stores.values():
                one.acknowledged = -1 if one.is_unraised else 0
        self.base = base
        self.last = max([base, last, *(one.local for one in self.records.values())])
        self.revision = self._sealed_at = int(not is_saved)
        self.saved = 0
        # Key spaces in use, or waiting for a flush or a raise.
        self._active = dict.fromkeys(
            name for name, one in self.records.items() if self._is_waiting(one)
        )

    def __repr__(self) -> str:
        unraised = sum(s.is_unraised for one in self.records.values() for s in one.stores.values())
        return f"GenerationBook({len(self.records)} key spaces, {unraised} unraised)"

    def _record(self, fingerprint: str) -> Record:
        record = self.records.get(fingerprint)
        if record is None:
            stores = {name: GenerationStanding() for name in self.stores}
            record = self.records[fingerprint] = Record(self.base, stores)
        return record

    def standing(self, fingerprint: str, store: str) -> GenerationStanding:
        return self._record(fingerprint).stores[store]

    def local(self, fingerprint: str) -> int:
        record = self.records.get(fingerprint)
        return self.base if record is None else record.local

    # Flushes

    def flush(self, fingerprint: str, now_s: float) -> Ticket:
        """Asks for a flush, on this node and in each store."""
        record = self._record(fingerprint)
        record.asked += 1
        record.need += 1
        record.asked_at_s = record.used_s = now_s
        record.waits_s = now_s if record.waits_s == NEVER_S else record.waits_s
        self._active[fingerprint] = None
        for standing in record.stores.values():
            standing.is_unraised = True
            standing.has_failed = False
            standing.raise_s = min(standing.raise_s, now_s)
        self.revision += 1
        return Ticket(fingerprint, record.asked, record.need, now_s)

    def begin_flush(self, now_s: float) -> str:
        """Fingerprint to flush on this node now, counted as begun, or "".

        A flush waits for the stores' raises, at most RAISE_WAIT_S: begun before an answer, it would
        have to run again.
        """
        for fingerprint in self._active:
            record = self.records[fingerprint]
            if record.begun >= record.need or record.begun > record.ended:
                continue
            is_held = now_s < record.waits_s + RAISE_WAIT_S and any(
                standing.is_unraised and not standing.has_failed for standing in self._mine(record)
            )
            if not is_held:
                record.begun, record.waits_s = record.need, NEVER_S
                self._seal_anew(record)
                return fingerprint
        return ""

    def _seal_anew(self, record: Record) -> None:
        """Invalidates blocks on the disk, even those that a power loss brings back."""
        self.last += 1
        record.local = self.last
        self.revision = self._sealed_at = self.revision + 1

    def flushed(self, fingerprint: str, now_s: float) -> None:
        """A flush here has ended: adopts the generations that waited for it."""
        record = self._record(fingerprint)
        record.ended, record.ended_s = record.begun, now_s
        for standing in self._mine(record):
            if standing.target is None or standing.next_after_flush > record.ended:
                continue
            standing.has_no_generation = standing.target == NO_GENERATION
            standing.is_verified = not standing.has_no_generation
            standing.generation = max(standing.generation, standing.target)
            standing.target = None
        self.revision += 1
        record.saved_at = self.revision

    def broke(self, fingerprint: str) -> None:
        """Reschedules a failed flush behind the others."""
        record = self._record(fingerprint)
        record.begun = record.ended
        self._active.pop(fingerprint, None)
        self._active[fingerprint] = None

    def pending(self, ticket: Ticket, now_s: float) -> list[str] | None:
        """Stores that did not raise or confirm in time; None while the caller must wait. If
        empty, no node that can reach the stores serves blocks older than the request."""
        record = self._record(ticket.fingerprint)
        if record.ended < ticket.need:
            return None
        pending = []
        for name in self.stores:
            standing = record.stores[name]
            if standing.acknowledged < ticket.number:
                if now_s < ticket.asked_s + RAISE_WAIT_S and not standing.has_failed:
                    return None
                pending.append(name)
            elif now_s < (acknowledged_s := standing.acknowledged_s + CONFIRMED_S):
                return None
            elif standing.confirmed_s < acknowledged_s - CONFIRMED_S / 2:
                # Not confirmed: it may have restarted with an old copy of its data.
                if now_s < max(acknowledged_s, record.ended_s) + SPARE_S:
                    return None
                pending.append(name)
        return pending

    def is_saved(self, ticket: Ticket) -> bool:
        """The request's flush has ended here, and the key space's latest is in the file."""
        record = self._record(ticket.fingerprint)
        return record.ended >= ticket.need and self.saved >= record.saved_at

    @property
    def are_seals_saved(self) -> bool:
        """If not, the next server could not read the blocks on the disk."""
        return self.saved >= self._sealed_at

    # Questions and raises

    def due(self, store: str, idle: Iterable[str], now_s: float) -> list[str]:
        """Key spaces to ask the store about now, counted as asked: those in use, and at most
        MAX_IDLE of `idle`, the longest unasked first. Not those that it must still raise, unless
        the last raise failed."""

        def asked_s(fingerprint: str) -> float:
            return self.standing(fingerprint, store).asked_s

        used = [name for name in self._active if now_s >= asked_s(name) + ASK_EVERY_S]
        others = [
            name
            for name in idle
            if name not in self._active and now_s >= asked_s(name) + IDLE_EVERY_S
        ]
        wanted = []
        for fingerprint in used + heapq.nsmallest(MAX_IDLE, others, asked_s):
            standing = self.standing(fingerprint, store)
            if standing.is_unraised == standing.has_failed and not standing.is_raising:
                standing.asked_s = now_s
                wanted.append(fingerprint)
        return wanted

    def shown(
        self,
        store: str,
        generations: Mapping[str, int],
        restored_below: int,
        sent_s: float,
        has_blocks: Collection[str],
    ) -> None:
        """Processes an answer: confirm, adopt, flush here, or raise.

        `generations`: by fingerprint, or NO_GENERATION.
        `restored_below`: see `protocol.Shown`.
        `has_blocks`: key spaces with blocks on this node.
        """
        for fingerprint, generation in generations.items():
            record = self._record(fingerprint)
            standing = record.stores[store]
            is_old = standing.is_unraised or sent_s < standing.raise_s
            if standing.is_raising or (is_old and not standing.has_failed):
                continue
            _note(standing, generation, sent_s)
            is_whole = generation >= restored_below
            if NO_GENERATION < generation < standing.generation:
                self._lost(fingerprint, standing)
            elif generation == NO_GENERATION:
                if standing.has_no_generation:
                    standing.confirmed_s = sent_s
                elif standing.target != NO_GENERATION:
                    self._aim(fingerprint, standing, generation)
            elif standing.is_verified and generation == standing.generation:
                if is_whole:
                    standing.confirmed_s = sent_s
                    if record.ended_s == NEVER_S:
                        # The earlier server may have adopted it just before it ended: CALM_S
                        # begins now.
                        record.ended_s = sent_s
            elif fingerprint not in has_blocks and record.begun == record.ended:
                standing.generation, standing.is_verified = generation, True
                standing.target, standing.has_no_generation = None, False
                record.ended_s = max(record.ended_s, sent_s)
                if is_whole:
                    standing.confirmed_s = sent_s
                self._seal_anew(record)
            elif standing.target != generation:
                self._aim(fingerprint, standing, generation)

    def _lost(self, fingerprint: str, standing: GenerationStanding) -> None:
        """The store has lost a flush."""
        if not standing.is_unraised:
            standing.is_unraised, standing.raise_s = True, NEVER_S
            self._active[fingerprint] = None
            self.revision += 1

    def missed(self, now_s: float) -> list[tuple[str, str]]:
        """(fingerprint, store) of flushes by other nodes that seem to have missed a store. Each
        once, and only of key spaces in use."""
        found = []
        for fingerprint in self._active:
            record = self._record(fingerprint)
            raised_seen_s = max((one.raised_seen_s for one in self._mine(record)), default=NEVER_S)
            if now_s < raised_seen_s + MISSED_S:
                continue
            for name in self._missed(record):
                if self.is_fresh(fingerprint, name, now_s) and not record.stores[name].is_reported:
                    record.stores[name].is_reported = True
                    found.append((fingerprint, name))
        return found

    def _missed(self, record: Record) -> list[str]:
        """Stores that did not raise since MISSED_S before another did: the flushing node can't
        reach or doesn't name them, or the other has lost its generations."""
        raised_s = max((one.raised_after_s for one in self._mine(record)), default=NEVER_S)
        return [
            name
            for name, one in zip(self.stores, self._mine(record), strict=True)
            if max(one.raised_seen_s, one.acknowledged_s, one.none_seen_s) < raised_s - MISSED_S
        ]

    def _aim(self, fingerprint: str, standing: GenerationStanding, generation: int) -> None:
        """Requires a flush here, which adopts `generation`."""
        record = self.records[fingerprint]
        self._active[fingerprint] = None
        record.need += 1
        standing.target, standing.next_after_flush = generation, record.need
        standing.is_verified = standing.has_no_generation = False
        self.revision += 1

    def begin_raise(self, store: str, now_s: float) -> Raise | None:
        """The raise to send now, counted as sent: the longest due, or None."""

        def raise_s(fingerprint: str) -> float:
            standing = self.standing(fingerprint, store)
            is_wanted = standing.is_unraised and not standing.is_raising
            return standing.raise_s if is_wanted else float("inf")

        fingerprint = min(self._active, key=raise_s, default="")
        if not fingerprint or now_s < raise_s(fingerprint):
            return None
        standing = self.standing(fingerprint, store)
        asked = self._record(fingerprint).asked
        is_retry = standing.has_failed and standing.raise_for == asked
        standing.is_raising = True
        standing.raise_s, standing.raise_for = now_s, asked
        return Raise(
            fingerprint, max(standing.generation, standing.target or NO_GENERATION), is_retry
        )

    def raised(self, store: str, fingerprint: str, generation: int | None, now_s: float) -> None:
        """Processes the answer to a raise; NO_GENERATION if there is no room, None if it failed."""
        record = self._record(fingerprint)
        standing = record.stores[store]
        standing.is_raising = False
        if generation is None:
            standing.has_failed, standing.raise_s = True, now_s + RETRY_S
            return
        if standing.acknowledged < standing.raise_for and now_s >= record.asked_at_s + RAISE_WAIT_S:
            # Late: nodes may have copied old blocks from this store to others that had already
            # raised. So all others must raise once more, even if they are raising now.
            for other in self._mine(record):
                if other is not standing:
                    other.is_unraised, other.raise_for = True, -1
        # A flush asked for meanwhile needs one more.
        standing.is_unraised = standing.raise_for < record.asked
        standing.acknowledged, standing.acknowledged_s = (
            max(standing.acknowledged, standing.raise_for),
            now_s,
        )
        standing.has_failed = False
        self._aim(fingerprint, standing, generation)

    # Permission to serve

    def use(self, fingerprint: str, now_s: float) -> None:
        self._record(fingerprint).used_s = now_s
        self._active[fingerprint] = None

    def generation(self, fingerprint: str, store: str) -> int:
        """For reads and writes in the store now, or NO_GENERATION."""
        standing = self.standing(fingerprint, store)
        is_usable = standing.is_settled and standing.is_verified and not standing.is_unraised
        return standing.generation if is_usable else NO_GENERATION

    def doubt(self, fingerprint: str, now_s: float) -> None:
        """A tier has seen an unexpected generation: withdraws confirmations, so the stores are
        asked at once."""
        self.use(fingerprint, now_s)
        for standing in self._mine(self._record(fingerprint)):
            standing.confirmed_s = standing.asked_s = NEVER_S

    def is_fresh(self, fingerprint: str, store: str, now_s: float) -> bool:
        standing = self.standing(fingerprint, store)
        return standing.is_settled and now_s < standing.confirmed_s + CONFIRMED_S

    def is_calm(self, fingerprint: str) -> bool:
        """Blocks of one store may be copied to another: none has missed a flush, and each has
        confirmed CALM_S after this node last adopted a generation."""
        record = self._record(fingerprint)
        if len(self.stores) < 2:
            return True
        return not self._missed(record) and all(
            not one.is_unraised and one.is_settled and one.confirmed_s > record.ended_s + CALM_S
            for one in self._mine(record)
        )

    def is_outdated(self, fingerprint: str) -> bool:
        """This node must still flush for a generation that a store shows."""
        return any(one.target is not None for one in self._mine(self._record(fingerprint)))

    def _mine(self, record: Record) -> list[GenerationStanding]:
        """Only of the present settings' stores."""
        return [record.stores[name] for name in self.stores]

    def _is_waiting(self, record: Record) -> bool:
        return record.ended < record.need or any(one.is_unraised for one in self._mine(record))

    # Housekeeping

    def rest(self, known: Collection[str], now_s: float) -> None:
        """Idles key spaces unused for USED_S without a pending flush, and forgets those above
        MAX_RECORDS that are not `known` to this node."""
        for fingerprint in list(self._active):
            record = self.records[fingerprint]
            if now_s >= record.used_s + USED_S and not self._is_waiting(record):
                del self._active[fingerprint]
        if len(self.records) <= MAX_RECORDS:
            return
        for fingerprint in known:
            # Each needs its seal number in a record before `base` changes.
            self._record(fingerprint)
        for fingerprint in list(self.records):
            record = self.records[fingerprint]
            is_unraised = any(one.is_unraised for one in record.stores.values())
            if fingerprint not in known and fingerprint not in self._active and not is_unraised:
                del self.records[fingerprint]
                # A power loss may bring its old blocks back: a later record needs another seal
                # number.
                self.base = max(self.base, record.local)
                self.revision = self._sealed_at = self.revision + 1

    def check_invariants(self) -> None:
        for record in self.records.values():
            assert record.ended <= record.begun <= record.need, "a flush has ended before it began"
            assert record.local <= self.last, "a flush here has a number twice"
            for standing in record.stores.values():
                assert not (standing.is_verified and standing.has_no_generation), (
                    "a generation and none"
                )
                assert standing.target is None or not standing.is_verified, (
                    "blocks are vouched for that are to be flushed"
                )
                assert standing.target is None or standing.next_after_flush <= record.need, (
                    "nobody flushes for a generation"
                )


def _note(standing: GenerationStanding, generation: int, sent_s: float) -> None:
    """Times of an answer, from which the book tells that a flush has missed a store."""
    has_none = standing.has_no_generation or standing.target == NO_GENERATION
    if generation == NO_GENERATION:
        standing.none_seen_s = sent_s
    elif NO_GENERATION < standing.generation < generation != standing.target and not has_none:
        standing.raised_seen_s, standing.is_reported = sent_s, False
        standing.raised_after_s = sent_s if standing.shown_s == NEVER_S else standing.shown_s
    standing.shown_s = sent_s
