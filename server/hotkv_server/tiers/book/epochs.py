"""Flushes of key spaces, and the epochs under which their blocks lie in stores that nodes share.

One record per key space, by its fingerprint, says of each store which epoch all blocks here are of.
The book decides and has no clock: it is told what stores show and what has been flushed here, and
says what to ask, to raise, to flush and to write down. Always true:

- Blocks here become *vouched for* under an epoch only by a flush here that began after a store had
  shown it. So no block of before a flush elsewhere is left when its epoch is settled on.
- The epoch of a record never falls. A store that shows a lower one has lost a flush: it is told to
  raise it above all that was known here.
- What is served was *confirmed* at most CONFIRMED_S ago: the store was asked and showed the epoch
  of the record. A flush is told to its caller only when a raise is older than that, so every node
  has asked since, or serves nothing that it must confirm.
- A flush here that a store was not told of stays noted, and the store is told once, however many
  flushes there were: one raise of a key space is under way at a time.
"""

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

CONFIRMED_S = 1.5
"""How long an answer of a store counts."""
ASK_EVERY_S = 0.4
"""Between two questions for a key space that is in use."""
USED_S = 10.0
"""A key space is in use for so long after its blocks were last asked for."""
IDLE_EVERY_S = 30.0
"""Between two questions for a key space that is not in use."""
MAX_IDLE = 64
"""Key spaces that are not in use and are asked for in one question."""
TELL_S = 1.0
"""How long a flush waits for a store; it is told later else."""
SPARE_S = 0.5
"""How long a flush waits beyond CONFIRMED_S for the store to confirm what it was told."""
RETRY_S = 0.5
"""Between two tries to raise an epoch."""
MAX_RECORDS = 1 << 13
"""Records are forgotten beyond this many, if no block of their key space is here."""
NO_EPOCH = 0
"""The epoch of a key space that has none in a store. No block passes with it."""
NEVER_S = float("-inf")


@dataclass(slots=True)
class EpochStanding:
    """One key space in one store.

    Written down: `epoch`: the highest that was ever known; `is_vouched`: all blocks here are of it;
    `is_untold`: the store must raise it. Of this process: `target`: an epoch that is settled on
    when a flush here has ended that began as number `target_at` or later; `is_none`: the store has
    no epoch and no room for one, and all blocks here are of after it was lost; `confirmed_s`: when
    the question was sent to which the store answered with what is settled; `asked_s`: when the last
    question was sent; `raise_s`: when the last raise was sent, or may be again; `raise_for`: the
    number of flushes asked for by then; `told`: the number that the store was told of, `told_s`
    when it had answered.
    """

    epoch: int = NO_EPOCH
    is_vouched: bool = False
    is_untold: bool = False
    target: int | None = None
    target_at: int = 0
    is_none: bool = False
    confirmed_s: float = NEVER_S
    asked_s: float = NEVER_S
    is_raising: bool = False
    has_failed: bool = False
    raise_s: float = NEVER_S
    raise_for: int = 0
    told: int = 0
    told_s: float = NEVER_S

    @property
    def is_settled(self) -> bool:
        """Whether nothing is to be done before what the store shows may be confirmed."""
        return self.target is None and not self.is_untold and (self.is_vouched or self.is_none)


@dataclass(slots=True)
class Record:
    """One key space. `local`: the number of the flush here under which its blocks are sealed on
    this node's disk, written down. `asked`: flushes that were asked for; `need`, `begun`, `ended`:
    numbers of flushes here that are wanted, have begun and have ended, the last one at `ended_s`;
    `saved_at`: the revision of the book that has it; `asked_at_s`: when the last flush was asked
    for; `used_s`: when blocks were."""

    local: int = 0
    stores: dict[str, EpochStanding] = field(default_factory=dict)
    asked: int = 0
    need: int = 0
    begun: int = 0
    ended: int = 0
    saved_at: int = 0
    ended_s: float = NEVER_S
    asked_at_s: float = NEVER_S
    used_s: float = NEVER_S

    @property
    def is_waiting(self) -> bool:
        """Whether a flush here, or a store, has something to do."""
        return self.ended < self.need or any(one.is_untold for one in self.stores.values())


@dataclass(frozen=True, slots=True)
class Ticket:
    """A flush that was asked for: its key space, its number, the flush here that does it, and when
    it was asked for."""

    fingerprint: str
    number: int
    need: int
    asked_s: float


@dataclass(frozen=True, slots=True)
class Raise:
    """The epoch of a key space is to be raised in a store, above `floor`."""

    fingerprint: str
    floor: int


class EpochBook:
    """See the module. `stores`: names of the stores that are asked. `base`: `local` of key spaces
    without a record; `last`: the highest `local` of all that were. `revision` changes with all that
    is written down."""

    def __init__(
        self,
        stores: Sequence[str] = (),
        records: Mapping[str, Record] | None = None,
        base: int = 0,
        last: int = 0,
    ) -> None:
        self.stores = tuple(stores)
        self.records = dict(records or {})
        self.base = base
        self.last = max([base, last, *(one.local for one in self.records.values())])
        self.revision = self.saved = self._sealed_at = 0
        # Key spaces that are in use, or of which something is to be done.
        self._active = dict.fromkeys(name for name, one in self.records.items() if one.is_waiting)

    def __repr__(self) -> str:
        untold = sum(s.is_untold for one in self.records.values() for s in one.stores.values())
        return f"EpochBook({len(self.records)} key spaces, {untold} untold)"

    def _record(self, fingerprint: str) -> Record:
        record = self.records.get(fingerprint)
        if record is None:
            record = self.records[fingerprint] = Record(self.base)
        for name in self.stores:
            record.stores.setdefault(name, EpochStanding())
        return record

    def standing(self, fingerprint: str, store: str) -> EpochStanding:
        """What is known of a key space in a store."""
        return self._record(fingerprint).stores[store]

    def local(self, fingerprint: str) -> int:
        """Returns the number of the flush under which a key space's blocks are sealed on the
        disk."""
        record = self.records.get(fingerprint)
        return self.base if record is None else record.local

    # Flushes

    def flush(self, fingerprint: str, now_s: float) -> Ticket:
        """A flush is asked for: nothing of before it may be found again, here and elsewhere."""
        record = self._record(fingerprint)
        record.asked += 1
        record.need += 1
        record.asked_at_s = record.used_s = now_s
        self._active[fingerprint] = None
        for standing in record.stores.values():
            standing.is_untold = True
            standing.has_failed = False
            standing.raise_s = min(standing.raise_s, now_s)
        self.revision += 1
        return Ticket(fingerprint, record.asked, record.need, now_s)

    def begin_flush(self, now_s: float) -> str:
        """Returns the key space that is to be flushed here now, which has begun; empty if there is
        none. Waits for stores that may still be told of the flush: then one does for both."""
        for fingerprint in self._active:
            record = self.records[fingerprint]
            if record.begun >= record.need or record.begun > record.ended:
                continue
            is_held = now_s < record.asked_at_s + TELL_S and any(
                standing.is_untold and not standing.has_failed for standing in self._mine(record)
            )
            if not is_held:
                record.begun = record.need
                self._seal_anew(record)
                return fingerprint
        return ""

    def _seal_anew(self, record: Record) -> None:
        """What is written to the disk from now on has another seal, so what lies there, also on
        pages that were not synced when the power failed, is not of this record."""
        self.last += 1
        record.local = self.last
        self.revision += 1
        self._sealed_at = self.revision

    def flushed(self, fingerprint: str, now_s: float) -> None:
        """The flush here has ended: no block is left that was there when it began."""
        record = self._record(fingerprint)
        record.ended, record.ended_s = record.begun, now_s
        for standing in self._mine(record):
            if standing.target is None or standing.target_at > record.ended:
                continue
            standing.is_none = standing.target == NO_EPOCH
            standing.is_vouched = not standing.is_none
            standing.epoch = max(standing.epoch, standing.target)
            standing.target = None
        self.revision += 1
        record.saved_at = self.revision

    def broke(self, fingerprint: str) -> None:
        """The flush here has not come to its end: it is to begin again."""
        record = self._record(fingerprint)
        record.begun = record.ended

    def pending(self, ticket: Ticket, now_s: float) -> list[str] | None:
        """Returns the stores that the flush could not be told to in time; None while its caller
        must wait. They are told later. Empty: no node that reaches the stores serves a block of
        before."""
        record = self._record(ticket.fingerprint)
        if record.ended < ticket.need:
            return None
        pending = []
        for name in self.stores:
            standing = record.stores[name]
            if standing.told < ticket.number:
                if now_s < ticket.asked_s + TELL_S and not standing.has_failed:
                    return None
                pending.append(name)
            elif now_s < (told_s := standing.told_s + CONFIRMED_S):
                return None
            elif standing.confirmed_s < told_s - CONFIRMED_S / 2:
                # It may have started again without what it was told.
                if now_s < max(told_s, record.ended_s) + SPARE_S:
                    return None
                pending.append(name)
        return pending

    def is_saved(self, ticket: Ticket) -> bool:
        """Returns whether the flush here is written down."""
        return self.saved >= self._record(ticket.fingerprint).saved_at

    @property
    def are_seals_saved(self) -> bool:
        """Whether all that blocks are sealed with on the disk is written down: else the next server
        could not read them."""
        return self.saved >= self._sealed_at

    # What stores are asked and told

    def due(self, store: str, idle: Iterable[str], now_s: float) -> list[str]:
        """Key spaces of which the store is to be asked now, which counts as done: those in use, and
        those of `idle` that were asked for longest ago."""

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
            if not standing.is_untold and not standing.is_raising:
                standing.asked_s = now_s
                wanted.append(fingerprint)
        return wanted

    def shown(
        self,
        store: str,
        epochs: Mapping[str, int],
        restored_below: int,
        sent_s: float,
        has_blocks: Collection[str],
    ) -> None:
        """The store has answered a question that was sent at `sent_s`. `has_blocks`: key spaces of
        which something is here."""
        for fingerprint, epoch in epochs.items():
            record = self._record(fingerprint)
            standing = record.stores[store]
            if standing.is_untold or standing.is_raising or sent_s < standing.raise_s:
                # Of before a raise, whose answer says more.
                continue
            if NO_EPOCH < epoch < standing.epoch:
                standing.is_untold, standing.raise_s = True, NEVER_S
                self._active[fingerprint] = None
                self.revision += 1
            elif epoch == NO_EPOCH:
                if standing.is_none:
                    standing.confirmed_s = sent_s
                elif standing.target != NO_EPOCH:
                    self._aim(fingerprint, standing, epoch)
            elif standing.is_vouched and standing.target is None and epoch == standing.epoch:
                if epoch >= restored_below:
                    standing.confirmed_s = sent_s
            elif fingerprint not in has_blocks and record.begun == record.ended:
                standing.epoch, standing.is_vouched, standing.is_none = epoch, True, False
                standing.target = None
                if epoch >= restored_below:
                    standing.confirmed_s = sent_s
                self._seal_anew(record)
            elif standing.target != epoch:
                self._aim(fingerprint, standing, epoch)

    def _aim(self, fingerprint: str, standing: EpochStanding, epoch: int) -> None:
        """Has the key space flushed here before this epoch is settled on."""
        record = self.records[fingerprint]
        self._active[fingerprint] = None
        record.need += 1
        standing.target, standing.target_at = epoch, record.need
        standing.is_vouched = standing.is_none = False
        self.revision += 1

    def begin_raise(self, store: str, now_s: float) -> Raise | None:
        """Returns an epoch that the store is to raise now, which counts as begun; None if there is
        none."""
        for fingerprint in self._active:
            record, standing = self._record(fingerprint), self.standing(fingerprint, store)
            if standing.is_untold and not standing.is_raising and now_s >= standing.raise_s:
                standing.is_raising = True
                standing.raise_s, standing.raise_for = now_s, record.asked
                return Raise(fingerprint, max(standing.epoch, standing.target or NO_EPOCH))
        return None

    def raised(self, store: str, fingerprint: str, epoch: int | None, now_s: float) -> None:
        """The store has raised the epoch; None if it has not, or not answered."""
        record = self._record(fingerprint)
        standing = record.stores[store]
        standing.is_raising = False
        if epoch is None:
            standing.has_failed, standing.raise_s = True, now_s + RETRY_S
            return
        # A flush that was asked for since is told by another raise.
        standing.is_untold = standing.raise_for < record.asked
        standing.told, standing.told_s = standing.raise_for, now_s
        standing.has_failed = False
        self._aim(fingerprint, standing, epoch)

    # Who may be served

    def use(self, fingerprint: str, now_s: float) -> None:
        """Blocks of the key space are asked for."""
        self._record(fingerprint).used_s = now_s
        self._active[fingerprint] = None

    def epoch(self, fingerprint: str, store: str) -> int:
        """Returns the epoch under which blocks are written to the store and read from it; NO_EPOCH
        if none may be."""
        standing = self.standing(fingerprint, store)
        return standing.epoch if standing.is_settled and standing.is_vouched else NO_EPOCH

    def doubt(self, fingerprint: str, now_s: float) -> None:
        """A read has met another epoch than ours: what was confirmed before does not count."""
        self.use(fingerprint, now_s)
        for standing in self._mine(self._record(fingerprint)):
            standing.confirmed_s = standing.asked_s = NEVER_S

    def is_fresh(self, fingerprint: str, store: str, now_s: float) -> bool:
        """Returns whether the store has confirmed the epoch lately."""
        return self._is_fresh(self.standing(fingerprint, store), now_s)

    def is_outdated(self, fingerprint: str) -> bool:
        """Returns whether blocks that are here may be of before a flush that a store has shown."""
        return any(one.target is not None for one in self._mine(self._record(fingerprint)))

    def _is_fresh(self, standing: EpochStanding, now_s: float) -> bool:
        return standing.is_settled and now_s < standing.confirmed_s + CONFIRMED_S

    def _mine(self, record: Record) -> list[EpochStanding]:
        """Of the stores that are asked; a record may have others, of earlier settings."""
        return [record.stores[name] for name in self.stores]

    # Housekeeping

    def rest(self, known: Collection[str], now_s: float) -> None:
        """Forgets who is no longer in use, and, if there are many, records of key spaces that are
        not `known` here and of which nothing is to be done."""
        for fingerprint in list(self._active):
            record = self.records[fingerprint]
            if now_s >= record.used_s + USED_S and not record.is_waiting:
                del self._active[fingerprint]
        for fingerprint in list(self.records) if len(self.records) > MAX_RECORDS else ():
            if fingerprint not in known and fingerprint not in self._active:
                record = self.records[fingerprint]
                del self.records[fingerprint]
                # Blocks that a power loss brings back must not be those of a new record.
                self.base = max(self.base, record.local)
                self.revision += 1

    def check_invariants(self) -> None:
        """Raises AssertionError if a record contradicts itself."""
        for record in self.records.values():
            assert record.ended <= record.begun <= record.need, "a flush has ended before it began"
            assert record.local <= self.last, "a flush here has a number twice"
            for standing in record.stores.values():
                assert not (standing.is_vouched and standing.is_none), "an epoch and none"
                assert standing.target is None or not standing.is_vouched, (
                    "blocks are vouched for that are to be flushed"
                )
                assert standing.target is None or standing.target_at <= record.need, (
                    "nobody flushes for an epoch"
                )
