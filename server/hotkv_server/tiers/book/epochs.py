"""Decides how flushes of key spaces (deletions of all their blocks) reach all nodes. Each shared
store keeps an epoch per key space: a number that every flush raises.

The book has a record for each key space, named by its fingerprint. The record has, for each store,
the epoch of all the key space's blocks on this node. The book has no clock: its caller reports
which epochs the stores show and which flushes have run on this node. The book decides for which key
spaces the caller must ask a store for the epoch, raise the epoch, or flush this node, and when to
save the book. Always true:

- The blocks on this node count as blocks of an epoch (they are *vouched for*) only after a flush on
  this node that began after the store had shown the epoch, or if the node had no blocks then. So
  none of them is older than the flush on another node that began the epoch.
- The epoch of a record never falls. A store that shows a lower epoch has lost a flush; the node
  raises the store's epoch above all epochs known here.
- Blocks are served only if their epoch was *confirmed* in the last CONFIRMED_S: the store was asked
  and showed the epoch of the record. The caller of a flush is answered only after a raise is older
  than that. By then every other node has either asked the store again or stopped serving the
  blocks that need its confirmation.
- A flush that was requested on this node stays in the record until each store has raised its epoch.
  At most one raise of a key space is under way in a store; it covers all flushes before it.
"""

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

CONFIRMED_S = 1.5
"""Time for which a store's answer to a question for epochs (numbers that flushes raise) is
valid."""
ASK_EVERY_S = 0.4
"""Time between two questions to a store for the epoch (number that each flush raises) of a key
space in use."""
USED_S = 10.0
"""Time after the last request for its blocks in which a key space counts as in use."""
IDLE_EVERY_S = 30.0
"""Time between two questions to a store for the epoch (number that each flush raises) of a key
space that is not in use."""
MAX_IDLE = 64
"""Most idle key spaces in one question."""
TELL_S = 1.0
"""Longest wait of a flush until a store has raised the epoch (the number that each flush raises).
If it takes longer, the flush ends, and the epoch is raised later."""
SPARE_S = 0.5
"""Longest wait of a flush, beyond CONFIRMED_S, until the store confirms the new epoch."""
RETRY_S = 0.5
"""Time between two tries to raise an epoch."""
MAX_RECORDS = 1 << 13
"""If there are more records, the book forgets those of idle key spaces that this node no longer
knows."""
NO_EPOCH = 0
"""Stands for "no epoch": the store has no epoch (number that each flush raises) for the key space.
Blocks are then neither read nor written."""
NEVER_S = float("-inf")


@dataclass(slots=True)
class EpochStanding:
    """The state of a key space in a store.

    Saved in the file of the book:
    `epoch`: the highest epoch of the store that this node has known.
    `is_vouched`: True if all blocks on this node are of this epoch.
    `is_untold`: True if the store must still raise its epoch for a flush of this node.

    Only in this process:
    `target`: the epoch that becomes `epoch` when flush number `target_at` of this node, or a later
        flush, has ended; None if no such flush is needed.
    `is_none`: True if the store has no epoch and no room for one, and all blocks on this node are
        newer than the loss of the epoch.
    `asked_s`: when the last question for the epoch was sent.
    `confirmed_s`: when the last question was sent whose answer confirmed the settled epoch.
    `is_raising`: True while a raise is under way.
    `has_failed`: True if the last raise failed.
    `raise_s`: when the last raise was sent, or the earliest time for the next raise.
    `raise_for`: number of requested flushes that the last raise covers.
    `told`: number of requested flushes that the store's epoch covers.
    `told_s`: when the store answered the raise for those requests.
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
        """True if neither a flush of this node nor a raise is pending, so that the store's answers
        can confirm the epoch."""
        return self.target is None and not self.is_untold and (self.is_vouched or self.is_none)


@dataclass(slots=True)
class Record:
    """The record of a key space.

    `local`: the number that the seals (check values) of the key space's blocks on this node's disk
        include. Each flush changes it, so older blocks don't match. Saved in the file of the book.
    `stores`: the state in each store, by the store's name. Partly saved.
    `asked`: number of flushes that callers have requested.
    `need`, `begun`, `ended`: flushes of this node are numbered; these are the numbers of the last
        flush that is needed, that has begun, and that has ended.
    `ended_s`: when the last flush of this node ended.
    `saved_at`: the revision of the book that includes the last flush of this node.
    `asked_at_s`: when a caller last requested a flush.
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
        """True if a flush of this node, or a raise in a store, is still to be done."""
        return self.ended < self.need or any(one.is_untold for one in self.stores.values())


@dataclass(frozen=True, slots=True)
class Ticket:
    """A flush that a caller has requested.

    `number`: number of the request; the flush requests of a key space are counted (`Record.asked`).
    `need`: number of the flush of this node that serves the request; the flushes of this node are
        numbered.
    `asked_s`: time of the request.
    """

    fingerprint: str
    number: int
    need: int
    asked_s: float


@dataclass(frozen=True, slots=True)
class Raise:
    """A request to raise a key space's epoch (the number that each flush raises) in a store to a
    number above `floor`."""

    fingerprint: str
    floor: int


class EpochBook:
    """Decides on epochs and flushes; see the module.

    `stores`: names of the shared stores.
    `base`: seal number (`Record.local`) of key spaces without a record.
    `last`: the highest seal number that was ever used.
    `revision`: grows with each change of the state that is saved.
    `saved`: the revision that the caller has saved last.
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
        """Returns the number that the seals of the key space's blocks on the disk include."""
        record = self.records.get(fingerprint)
        return self.base if record is None else record.local

    # Flushes

    def flush(self, fingerprint: str, now_s: float) -> Ticket:
        """Requests a flush, which removes the key space's blocks on this node and makes them
        unfindable for other nodes. Returns the ticket for `pending` and `is_saved`."""
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
        """Returns a key space to flush on this node now, and counts the flush as begun. Returns ""
        if no flush is due.

        First waits up to TELL_S until each shared store has raised the key space's epoch. A new
        epoch needs a flush here that begins after the store has answered; a flush that began
        earlier would have to run again.
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
        """Gives the key space a new seal number for the disk. Blocks that were written before don't
        match the new number, even if a power loss restores their records."""
        self.last += 1
        record.local = self.last
        self.revision += 1
        self._sealed_at = self.revision

    def flushed(self, fingerprint: str, now_s: float) -> None:
        """Records that the flush of this node has ended: no block from before its begin is left."""
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
        """Records that the flush of this node has failed and must begin again."""
        record = self._record(fingerprint)
        record.begun = record.ended

    def pending(self, ticket: Ticket, now_s: float) -> list[str] | None:
        """Returns None while the caller of the flush must wait. Then returns the names of the
        stores that have not raised their epoch, or not confirmed the raise, in time; their epochs
        are raised later.

        If the list is empty, no node that reaches the stores serves blocks from before the
        flush."""
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
        """Returns True if the book's file includes the flush."""
        return self.saved >= self._record(ticket.fingerprint).saved_at

    @property
    def are_seals_saved(self) -> bool:
        """True if the book's file includes all seal numbers of the disk. Without these numbers the
        next server could not read the blocks."""
        return self.saved >= self._sealed_at

    # Questions and raises

    def due(self, store: str, idle: Iterable[str], now_s: float) -> list[str]:
        """Returns the key spaces for whose epochs the caller must ask the store now, and counts
        them as asked. These are key spaces in use, and those of the `idle` key spaces that were
        asked for longest ago, if enough time has passed."""

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
        """Processes a store's answer to a question for epochs that was sent at `sent_s`.

        `epochs`: the epoch of each key space; NO_EPOCH if the store has none and no room for one.
        `restored_below`: epochs below this number are not trusted, because the store has just
            restarted; see `tiers.protocol.Shown`.
        `has_blocks`: key spaces that have blocks on this node.
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
        """Makes a flush of the key space on this node necessary. When the flush has ended, `epoch`
        becomes the epoch of the record."""
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
        """Processes the store's answer to a request to raise the epoch. `epoch`: the new epoch;
        None if the request failed or was not answered."""
        record = self._record(fingerprint)
        standing = record.stores[store]
        standing.is_raising = False
        if epoch is None:
            standing.has_failed, standing.raise_s = True, now_s + RETRY_S
            return
        # A flush that was requested after the raise began needs another raise.
        standing.is_untold = standing.raise_for < record.asked
        standing.told, standing.told_s = standing.raise_for, now_s
        standing.has_failed = False
        self._aim(fingerprint, standing, epoch)

    # Permission to serve

    def use(self, fingerprint: str, now_s: float) -> None:
        """Records that blocks of the key space were requested, so the key space is in use."""
        self._record(fingerprint).used_s = now_s
        self._active[fingerprint] = None

    def epoch(self, fingerprint: str, store: str) -> int:
        """Returns the epoch (number that each flush raises) with which blocks in the store are read
        and written; NO_EPOCH if reads and writes are not allowed."""
        standing = self.standing(fingerprint, store)
        return standing.epoch if standing.is_settled and standing.is_vouched else NO_EPOCH

    def doubt(self, fingerprint: str, now_s: float) -> None:
        """Drops the stores' confirmations of the key space's epoch, because a read has seen another
        epoch than this node expected. The stores are then asked for the epoch at once."""
        self.use(fingerprint, now_s)
        for standing in self._mine(self._record(fingerprint)):
            standing.confirmed_s = standing.asked_s = NEVER_S

    def is_fresh(self, fingerprint: str, store: str, now_s: float) -> bool:
        """Returns True if no flush of this node and no raise of the epoch is pending, and the store
        has confirmed the epoch in the last CONFIRMED_S."""
        return self._is_fresh(self.standing(fingerprint, store), now_s)

    def is_outdated(self, fingerprint: str) -> bool:
        """Returns True if blocks on this node may be older than a flush that a store has shown."""
        return any(one.target is not None for one in self._mine(self._record(fingerprint)))

    def _is_fresh(self, standing: EpochStanding, now_s: float) -> bool:
        return standing.is_settled and now_s < standing.confirmed_s + CONFIRMED_S

    def _mine(self, record: Record) -> list[EpochStanding]:
        """Returns the record's states in the stores of this server. A record may also have stores
        of earlier settings."""
        return [record.stores[name] for name in self.stores]

    # Housekeeping

    def rest(self, known: Collection[str], now_s: float) -> None:
        """Marks key spaces that are no longer in use as idle. If there are more than MAX_RECORDS
        records, also forgets the records of key spaces that are idle and not in `known`, the key
        spaces of this node."""
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
