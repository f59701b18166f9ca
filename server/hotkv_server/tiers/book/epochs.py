"""Flushes of key spaces, and the epochs under which their blocks lie in stores that nodes share.

There is one record per key space fingerprint. It holds, for each store, the epoch of all blocks on
this node. The book has no clock: its caller reports which epochs the stores show and which flushes
have run here. It decides for which key spaces to ask, raise the epoch, flush, and save the record.
Always true:

- Blocks here are *vouched for* under an epoch only after a flush here that began after a store had
  shown the epoch. So no blocks from before a flush on another node are left when the epoch is
  settled.
- The epoch of a record never falls. A store that shows a lower epoch has lost a flush; the node
  raises the store's epoch above all epochs known here.
- Blocks are served only if their epoch was *confirmed* in the last CONFIRMED_S: the store was asked
  and showed the epoch of the record. The caller of a flush is answered only after a raise is older
  than that. By then every other node has either asked the store again or stopped serving the
  blocks that need its confirmation.
- A flush here stays in the record until the store has raised its epoch. One raise of a key space is
  under way at a time, and covers all flushes before it.
"""

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

CONFIRMED_S = 1.5
"""Time for which an answer of a store is valid."""
ASK_EVERY_S = 0.4
"""Time between two questions for a key space in use."""
USED_S = 10.0
"""Time after the last request for its blocks in which a key space counts as in use."""
IDLE_EVERY_S = 30.0
"""Time between two questions for a key space that is not in use."""
MAX_IDLE = 64
"""Most idle key spaces in one question."""
TELL_S = 1.0
"""Longest wait of a flush for a store. After that the store's epoch is raised later."""
SPARE_S = 0.5
"""Longest wait of a flush, beyond CONFIRMED_S, until the store confirms the raise."""
RETRY_S = 0.5
"""Time between two tries to raise an epoch."""
MAX_RECORDS = 1 << 13
"""Above this number, records of key spaces without blocks here are forgotten."""
NO_EPOCH = 0
"""The epoch of a key space without an epoch in a store. Blocks never pass with it."""
NEVER_S = float("-inf")


@dataclass(slots=True)
class EpochStanding:
    """The state of a key space in a store.

    Saved:
    `epoch`: the highest epoch ever known.
    `is_vouched`: whether all blocks here are of this epoch.
    `is_untold`: whether the store must still raise its epoch because of a flush here.

    Only in this process:
    `target`: the epoch to settle on when the flush number `target_at`, or a later flush, has ended
        here.
    `is_none`: the store has no epoch and no room for one, and all blocks here are newer than the
        loss.
    `asked_s`: when the last question was sent.
    `confirmed_s`: when the last question was sent whose answer matched the settled epoch.
    `raise_s`: when the last raise was sent, or the earliest time for the next.
    `raise_for`: number of flushes that the last raise covers.
    `told`: number of flushes that the store's epoch covers; `told_s`: when it answered.
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
        """Whether the epoch is settled: no flush or raise is pending, so the store's answers can
        confirm it."""
        return self.target is None and not self.is_untold and (self.is_vouched or self.is_none)


@dataclass(slots=True)
class Record:
    """The record of a key space.

    `local`: number of the flush under which its blocks are sealed on this node's disk; written
        down.
    `asked`: number of flushes that were requested.
    `need`, `begun`, `ended`: numbers of the last flush here that is needed, has begun, has ended.
    `ended_s`: when the last flush ended.
    `saved_at`: the revision of the book that includes the last flush.
    `asked_at_s`: when the last flush was requested.
    `used_s`: when blocks were last requested.
    """

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
        """Whether a flush here, or a raise in a store, is still to be done."""
        return self.ended < self.need or any(one.is_untold for one in self.stores.values())


@dataclass(frozen=True, slots=True)
class Ticket:
    """A requested flush: its key space, its number, the flush here that serves it, and the time of
    the request."""

    fingerprint: str
    number: int
    need: int
    asked_s: float


@dataclass(frozen=True, slots=True)
class Raise:
    """Asks for a raise of a key space's epoch in a store to above `floor`."""

    fingerprint: str
    floor: int


class EpochBook:
    """Decides on epochs and flushes; see the module.

    `stores`: names of the stores.
    `base`: seal number (`Record.local`) of key spaces without a record.
    `last`: the highest seal number that was ever used.

    `revision` grows with each change of the state that is saved.
    """

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
        # Key spaces that are in use, or for which something is still to be done.
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
        """Returns the state of a key space in a store."""
        return self._record(fingerprint).stores[store]

    def local(self, fingerprint: str) -> int:
        """Returns the number of the flush under which a key space's blocks are sealed on the
        disk."""
        record = self.records.get(fingerprint)
        return self.base if record is None else record.local

    # Flushes

    def flush(self, fingerprint: str, now_s: float) -> Ticket:
        """Requests a flush: afterwards, older blocks are found neither here nor on other nodes."""
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
        """Returns a key space to flush here now, and counts the flush as begun; empty if no flush
        is due.

        A flush first waits for stores that must raise their epoch, so that it covers the new epoch.
        """
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
        """Gives the key space a new seal number for the disk. Blocks written before don't match it,
        even if a power loss brings them back."""
        self.last += 1
        record.local = self.last
        self.revision += 1
        self._sealed_at = self.revision

    def flushed(self, fingerprint: str, now_s: float) -> None:
        """Ends the flush here: no block from before its begin is left."""
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
        """Notes that the flush here failed and must begin again."""
        record = self._record(fingerprint)
        record.begun = record.ended

    def pending(self, ticket: Ticket, now_s: float) -> list[str] | None:
        """Returns the stores that have not raised their epoch in time; None while the caller of the
        flush must wait. Their epochs are raised later.

        Empty: no node that reaches the stores serves blocks from before the flush."""
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
                # The store may have restarted from a copy without the raise.
                if now_s < max(told_s, record.ended_s) + SPARE_S:
                    return None
                pending.append(name)
        return pending

    def is_saved(self, ticket: Ticket) -> bool:
        """Returns whether the flush is written down."""
        return self.saved >= self._record(ticket.fingerprint).saved_at

    @property
    def are_seals_saved(self) -> bool:
        """Whether all seal numbers of the disk are written down. Without them the next server could
        not read the blocks."""
        return self.saved >= self._sealed_at

    # Questions and raises

    def due(self, store: str, idle: Iterable[str], now_s: float) -> list[str]:
        """Returns the key spaces to ask the store for now, and counts them as asked: those in use,
        and the `idle` key spaces with the oldest answers."""

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
        """Takes in a store's answer to a question that was sent at `sent_s`.

        `restored_below`: see `Shown`.
        `has_blocks`: key spaces that have blocks here.
        """
        for fingerprint, epoch in epochs.items():
            record = self._record(fingerprint)
            standing = record.stores[store]
            if standing.is_untold or standing.is_raising or sent_s < standing.raise_s:
                # The question is older than a raise, whose answer is newer.
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
        """Asks for a flush of the key space here; the epoch is settled when it ends."""
        record = self.records[fingerprint]
        self._active[fingerprint] = None
        record.need += 1
        standing.target, standing.target_at = epoch, record.need
        standing.is_vouched = standing.is_none = False
        self.revision += 1

    def begin_raise(self, store: str, now_s: float) -> Raise | None:
        """Returns the next request to the store to raise an epoch, and counts it as sent; None if
        no such request is due."""
        for fingerprint in self._active:
            record, standing = self._record(fingerprint), self.standing(fingerprint, store)
            if standing.is_untold and not standing.is_raising and now_s >= standing.raise_s:
                standing.is_raising = True
                standing.raise_s, standing.raise_for = now_s, record.asked
                return Raise(fingerprint, max(standing.epoch, standing.target or NO_EPOCH))
        return None

    def raised(self, store: str, fingerprint: str, epoch: int | None, now_s: float) -> None:
        """Takes in the store's new epoch; None if the raise failed or was not answered."""
        record = self._record(fingerprint)
        standing = record.stores[store]
        standing.is_raising = False
        if epoch is None:
            standing.has_failed, standing.raise_s = True, now_s + RETRY_S
            return
        # A later flush is told by another raise.
        standing.is_untold = standing.raise_for < record.asked
        standing.told, standing.told_s = standing.raise_for, now_s
        standing.has_failed = False
        self._aim(fingerprint, standing, epoch)

    # Permission to serve

    def use(self, fingerprint: str, now_s: float) -> None:
        """Notes that blocks of the key space are requested."""
        self._record(fingerprint).used_s = now_s
        self._active[fingerprint] = None

    def epoch(self, fingerprint: str, store: str) -> int:
        """Returns the epoch for reads and writes in the store; NO_EPOCH if they are not allowed."""
        standing = self.standing(fingerprint, store)
        return standing.epoch if standing.is_settled and standing.is_vouched else NO_EPOCH

    def doubt(self, fingerprint: str, now_s: float) -> None:
        """Drops earlier confirmations, because a read has met another epoch than ours."""
        self.use(fingerprint, now_s)
        for standing in self._mine(self._record(fingerprint)):
            standing.confirmed_s = standing.asked_s = NEVER_S

    def is_fresh(self, fingerprint: str, store: str, now_s: float) -> bool:
        """Returns whether the store has confirmed the epoch in the last CONFIRMED_S."""
        return self._is_fresh(self.standing(fingerprint, store), now_s)

    def is_outdated(self, fingerprint: str) -> bool:
        """Returns whether blocks here may be older than a flush that a store has shown."""
        return any(one.target is not None for one in self._mine(self._record(fingerprint)))

    def _is_fresh(self, standing: EpochStanding, now_s: float) -> bool:
        return standing.is_settled and now_s < standing.confirmed_s + CONFIRMED_S

    def _mine(self, record: Record) -> list[EpochStanding]:
        """Returns the states in the present stores. A record may also have stores of earlier
        settings."""
        return [record.stores[name] for name in self.stores]

    # Housekeeping

    def rest(self, known: Collection[str], now_s: float) -> None:
        """Marks key spaces as idle that are no longer in use. Above MAX_RECORDS, also forgets
        finished records of key spaces that are not `known` here."""
        for fingerprint in list(self._active):
            record = self.records[fingerprint]
            if now_s >= record.used_s + USED_S and not record.is_waiting:
                del self._active[fingerprint]
        for fingerprint in list(self.records) if len(self.records) > MAX_RECORDS else ():
            if fingerprint not in known and fingerprint not in self._active:
                record = self.records[fingerprint]
                del self.records[fingerprint]
                # Blocks that a power loss brings back must not match a new record.
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
