"""Decides how flushes of key spaces reach all nodes. A key space is a model in a configuration;
a flush deletes all its blocks. Each shared store keeps a generation per key space: a number that
every flush raises.

`GenerationBook` has a record for each key space, under the key space's fingerprint. For each store,
the record has the generation to which the key space's blocks on this node belong. `GenerationBook`
has no clock
and makes no calls: its caller (`drive.generations`) reports which generations the stores show and
which flushes have run on this node. `GenerationBook` decides when the caller must ask a store for
generations, raise a generation in a store, flush a key space on this node, or save the records to a
file. Always true:

- The blocks on this node count as blocks of a generation (they are *vouched for*) in two cases:
  this node began to flush the key space after the store had shown the generation, or this node had
  no blocks of the key space when the store showed it. So no vouched block is older than the flush
  that began the generation, whichever node requested that flush.
- The generation of a record never falls. A store that shows a lower generation has lost a flush;
  the node then raises the store's generation above all generations that the node knows.
- Blocks are served only if their generation was *confirmed* in the last CONFIRMED_S: this node
  asked the store for the generation, and the store answered with the generation of the record. (A
  node that can't reach the store still serves blocks from its host memory.) A flush is answered
  only when CONFIRMED_S have passed since the store raised its generation. By then every other node
  has either asked the store again or stopped serving the blocks that need the store's confirmation.
- A flush that was requested on this node stays in the record until each store has raised its
  generation. At most one raise of a key space is under way in a store; it covers all flushes that
  were requested before it.
"""

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

CONFIRMED_S = 1.5
"""Time for which a store's answer confirms a generation (a number that each flush raises). The time
begins when the question is sent to the store."""
ASK_EVERY_S = 0.4
"""Time between two questions to a store for the generation (number that each flush raises) of a key
space in use."""
USED_S = 10.0
"""A key space counts as in use for this time after the last request for its blocks."""
IDLE_EVERY_S = 30.0
"""Time between two questions to a store for the generation (number that each flush raises) of an
idle key space (not in use)."""
MAX_IDLE = 64
"""Most idle key spaces in one question."""
TELL_S = 1.0
"""Longest time that a flush waits for a store to raise the key space's generation (a number that
each flush raises). After this time the flush is answered although the store has not raised the
generation; the store must raise it later."""
SPARE_S = 0.5
"""Longest time that a flush waits, in addition to CONFIRMED_S, for a store to confirm the key
space's new generation (a number that each flush raises)."""
CALM_S = 5.0
"""A flush raises a key space's generation (a number) in every store, but not at the same moment.
After this node has adopted the new generation of one store, another store may still show its old
generation, and serve blocks from before the flush. For this time, no blocks are copied from store
to store (`GenerationBook.is_calm`). It is longer than the longest waits for a store together:
TELL_S, and ASK_S of `drive.generations`."""
MISSED_S = 5.0
"""If a store shows a new generation (a number that each flush raises), and another store shows no
new generation within this time, a flush of another node has missed the other store. This time is
longer than TELL_S."""
RETRY_S = 0.5
"""Time between two tries to raise a generation (a number that each flush raises) in a store."""
MAX_RECORDS = 1 << 13
"""If there are more records than this, `GenerationBook` forgets the records of idle key spaces that
this node no longer knows."""
NO_GENERATION = 0
"""Stands in place of a generation (a number that each flush raises) if the store has no generation
for the key space. The key space's blocks are then neither read from the store nor written to it."""
NEVER_S = float("-inf")


@dataclass(slots=True)
class GenerationStanding:
    """The state of a key space (a model in a configuration) in one shared store.

    The store has a number for the key space, the generation, which each flush of the key space
    (deletion of all its blocks) raises. This node sends two kinds of requests to the store:
    *questions* for the generation, and *raises*, which ask the store to raise the generation for a
    flush.

    Saved in the file with the records of `GenerationBook`:

    `generation`: the highest generation of the store that this node has adopted.
    `is_verified`: True if all blocks of the key space on this node belong to `generation`.
    `is_unraised`: True if the store must still raise its generation: a flush has not reached the
        store yet, or the store has lost it.

    Not saved:

    `target`: a new generation that the store has shown, or NO_GENERATION. This node adopts it as
        `generation` when its own flush with the number `target_at`, or a later flush, has ended.
        None if this node need not flush for the store.
    `is_none`: True if the store has no generation and can't begin one, and this node has flushed
        the key space since the store showed that.
    `asked_s`: when the last question for the generation was sent.
    `confirmed_s`: send time of the question whose answer last confirmed `generation`.
    `is_raising`: True while a raise is under way.
    `has_failed`: True if the last raise failed.
    `raise_s`: when the last raise was sent; after a failure, the earliest time for the next raise.
    `raise_for`: number of flush requests (`Record.asked`) that the last raise covers. -1: this
        store must raise its generation once more, because another store has raised its generation
        late.
    `acknowledged`: number of flush requests that the store's generation covers; -1: it does not
        even cover the request that an earlier server has saved.
    `acknowledged_s`: when the store answered the raise that covers these requests.
    `shown_s`: send time of the last question that the store answered with a generation, or by
        saying that it has no generation.
    `changed_s`: send time of the last question that the store answered with a later generation than
        this node had adopted. The first generation after the store had no generation does not
        count.
    `unchanged_s`: the value that `shown_s` had before the answer of `changed_s`; the same as
        `changed_s` if that was the first answer. The store has raised the generation after this
        time.
    `emptied_s`: send time of the last question that the store answered by saying that it has no
        generation. At that time no node could read blocks from the store.
    `is_reported`: True if `GenerationBook.missed` has returned the store since `changed_s` was last
        set.
    """

    generation: int = NO_GENERATION
    is_verified: bool = False
    is_unraised: bool = False
    target: int | None = None
    target_at: int = 0
    is_none: bool = False
    confirmed_s: float = NEVER_S
    asked_s: float = NEVER_S
    is_raising: bool = False
    has_failed: bool = False
    raise_s: float = NEVER_S
    raise_for: int = 0
    acknowledged: int = 0
    acknowledged_s: float = NEVER_S
    shown_s: float = NEVER_S
    changed_s: float = NEVER_S
    unchanged_s: float = NEVER_S
    emptied_s: float = NEVER_S
    is_reported: bool = False

    @property
    def is_settled(self) -> bool:
        """True if the store's answers can confirm that no block on this node is older than a flush
        (deletion of all blocks of the key space). The store has a number for the key space, the
        generation, which each flush raises. There are two conditions:

        - all blocks on this node belong to `generation` (`is_verified`), or the store has no
          generation (`is_none`);
        - no flush on this node is pending, and no raise (a request to the store to raise its
          generation). A raise that has failed does not count, because it concerns only older blocks
          in the store.
        """
        is_raised = self.has_failed or not self.is_unraised
        return self.target is None and is_raised and (self.is_verified or self.is_none)


@dataclass(slots=True)
class Record:
    """The record of a key space (a model in a configuration). Requests for a flush (deletion of
    all blocks of the key space) and the flushes that this node runs are counted separately, because
    one flush may serve several requests. The flushes on this node are numbered; `need`, `begun` and
    `ended` are such numbers.

    `local`: the seal number: a number that is part of the seals (checksums) of the key space's
        blocks on this node's disk. Each flush changes it, so the seals of older blocks don't match.
        Saved in the file.
    `stores`: the state in each store, by the store's name. Partly saved.
    `asked`: number of flushes that callers have requested.
    `need`: the latest flush on this node that is required.
    `begun`: the latest flush on this node that has begun.
    `ended`: the latest flush on this node that has ended.
    `ended_s`: when the flush `ended` ended. If this node has later adopted a generation (a number
        that each flush raises) without a flush: when it sent the question whose answer showed the
        generation.
        For a record from the file: when this node sent the first question whose answer confirmed an
        generation.
    `saved_at`: the first `GenerationBook.revision` that includes the end of the flush `ended`.
    `asked_at_s`: when a caller last requested a flush.
    `waits_s`: when a caller requested the first flush that has not begun on this node; NEVER_S if
        all requested flushes have begun.
    `used_s`: when blocks were last requested.
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
    """A request for a flush (deletion of all blocks of a key space). With the ticket, the caller
    asks later whether the flush is done (`GenerationBook.pending`, `GenerationBook.is_saved`).

    `number`: number of the request, which is the value of `Record.asked` after the request.
    `need`: number of the flush of this node that serves the request (`Record.need`).
    `asked_s`: time of the request.
    """

    fingerprint: str
    number: int
    need: int
    asked_s: float


@dataclass(frozen=True, slots=True)
class Raise:
    """A request to a store: raise a key space's generation (a number that each flush raises) above
    `floor`, the highest generation of this key space (a model in a configuration) in this store
    that this node knows.

    `is_retry`: True if the last raise for the same flushes has failed.
    """

    fingerprint: str
    floor: int
    is_retry: bool


class GenerationBook:
    """Decides when stores must raise key spaces' generations (numbers that each flush raises), and
    when this node must flush a key space; see the module.

    `stores`: names of the shared stores in the settings.
    `records`: the records that an earlier server saved, by fingerprint; None: no records.
    `base`: seal number (see `Record.local`) of key spaces without a record.
    `last`: the highest seal number that was ever used.
    `is_saved`: False if these arguments are not completely saved, so that the caller must save
        them.
    `revision`: number of the present state; each change of saved state increases it.
    `saved`: the last revision that the caller has saved.
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
            # Add the stores that the record lacks: the server that saved it may have had other
            # settings.
            record.stores.update(
                {n: GenerationStanding() for n in stores if n not in record.stores}
            )
            for one in record.stores.values():
                one.acknowledged = -1 if one.is_unraised else 0
        self.base = base
        self.last = max([base, last, *(one.local for one in self.records.values())])
        self.revision = self._sealed_at = int(not is_saved)
        self.saved = 0
        # Key spaces that are in use, or that still wait for a flush, or for a store to raise their
        # generation (a number that each flush raises).
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
        """Returns what is known of a key space (a model in a configuration) in a store: its
        generation there (a number that each flush raises), and the flushes that the store still
        lacks."""
        return self._record(fingerprint).stores[store]

    def local(self, fingerprint: str) -> int:
        """Returns the seal number of the key space (`Record.local`): the number that is part of the
        seals (checksums) of its blocks on the disk."""
        record = self.records.get(fingerprint)
        return self.base if record is None else record.local

    # Flushes

    def flush(self, fingerprint: str, now_s: float) -> Ticket:
        """Requests a flush of a key space: a deletion of all its blocks, on this node and in each
        store. A store is flushed by raising its generation (a number in the keys of blocks).
        Returns a ticket. With the ticket, `pending` and `is_saved` report whether the flush is
        done."""
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
        """Returns the fingerprint of a key space that the caller must now flush on this node
        (delete all its blocks), and counts the flush as begun. Returns "" if no flush is due.

        A requested flush is due as soon as each shared store has raised the key space's generation
        (a number that each flush raises), or has failed to raise it. It is due TELL_S after the
        first waiting request at the latest. It is not due at once, because a flush that begins
        before a store's answer must run again: this node adopts the store's new generation only
        after a flush that begins after the answer.
        """
        for fingerprint in self._active:
            record = self.records[fingerprint]
            if record.begun >= record.need or record.begun > record.ended:
                continue
            is_held = now_s < record.waits_s + TELL_S and any(
                standing.is_unraised and not standing.has_failed for standing in self._mine(record)
            )
            if not is_held:
                record.begun, record.waits_s = record.need, NEVER_S
                self._seal_anew(record)
                return fingerprint
        return ""

    def _seal_anew(self, record: Record) -> None:
        """Gives the key space (a model in a configuration) a new seal number (`Record.local`),
        which is part of the checksums of its blocks on the disk. The blocks already on the disk
        don't match the new number, even if a power loss brings their records back."""
        self.last += 1
        record.local = self.last
        self.revision = self._sealed_at = self.revision + 1

    def flushed(self, fingerprint: str, now_s: float) -> None:
        """Records that the flush of a key space (a model in a configuration) on this node has
        ended: all blocks that were on this node when the flush began are removed. This node now
        adopts the stores' new generations (numbers that each flush raises) that had to wait for
        this flush (`GenerationStanding.target`)."""
        record = self._record(fingerprint)
        record.ended, record.ended_s = record.begun, now_s
        for standing in self._mine(record):
            if standing.target is None or standing.target_at > record.ended:
                continue
            standing.is_none = standing.target == NO_GENERATION
            standing.is_verified = not standing.is_none
            standing.generation = max(standing.generation, standing.target)
            standing.target = None
        self.revision += 1
        record.saved_at = self.revision

    def broke(self, fingerprint: str) -> None:
        """Records that the flush of a key space (a model in a configuration) on this node (the
        deletion of its blocks) has failed. This flush must run again, after the due flushes of
        other key spaces."""
        record = self._record(fingerprint)
        record.begun = record.ended
        self._active.pop(fingerprint, None)
        self._active[fingerprint] = None

    def pending(self, ticket: Ticket, now_s: float) -> list[str] | None:
        """Returns the stores in which a requested flush (deletion of all blocks of a key space) is
        not confirmed. Returns None while the caller that requested the flush must still wait.

        The result has two kinds of stores:

        - stores that did not raise the generation (a number that each flush raises) in time. The
          server asks them again later to raise it;
        - stores that raised the generation, but did not confirm the new generation in time.

        If the result is empty, no node that can reach the stores serves blocks that are older than
        the request for the flush.

        `ticket`: the result of `flush`.
        """
        record = self._record(ticket.fingerprint)
        if record.ended < ticket.need:
            return None
        pending = []
        for name in self.stores:
            standing = record.stores[name]
            if standing.acknowledged < ticket.number:
                if now_s < ticket.asked_s + TELL_S and not standing.has_failed:
                    return None
                pending.append(name)
            elif now_s < (acknowledged_s := standing.acknowledged_s + CONFIRMED_S):
                return None
            elif standing.confirmed_s < acknowledged_s - CONFIRMED_S / 2:
                # The store has raised its generation (a number that each flush raises), but has not
                # confirmed the new generation yet. It may have restarted since, with an old copy of
                # its data.
                if now_s < max(acknowledged_s, record.ended_s) + SPARE_S:
                    return None
                pending.append(name)
        return pending

    def is_saved(self, ticket: Ticket) -> bool:
        """Returns True if the flush (deletion of all blocks of the key space) that serves the
        request has ended on this node, and the file records the end of the key space's latest flush
        on this node."""
        record = self._record(ticket.fingerprint)
        return record.ended >= ticket.need and self.saved >= record.saved_at

    @property
    def are_seals_saved(self) -> bool:
        """True if the saved file has the seal numbers (`Record.local`) of all key spaces (each is
        a model in a configuration), which are part of the checksums of blocks on the disk.
        Without these numbers the next server could not read the blocks on the disk."""
        return self.saved >= self._sealed_at

    # Questions and raises

    def due(self, store: str, idle: Iterable[str], now_s: float) -> list[str]:
        """Returns the key spaces for whose generations (numbers that each flush raises) the caller
        must now ask the store. Counts these questions as sent.

        A key space in use is due ASK_EVERY_S after the last question for it, a key space in `idle`
        after IDLE_EVERY_S. A call returns at most MAX_IDLE idle key spaces, first the key spaces
        whose last question is oldest. Leaves out key spaces whose generation the store must still
        raise, unless the last raise failed.

        `idle`: idle key spaces (not in use) for which the caller would ask too.
        """

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
        """Processes a store's answer to a question for generations (numbers that each flush
        raises). The
        answer has one of four results for each key space: the generation is confirmed; this node
        adopts a new generation; this node must flush the key space (delete all its blocks); or the
        store must raise its generation.

        `generations`: by fingerprint, the store's generation of each key space, or NO_GENERATION.
        `restored_below`: nonzero if the store has just restarted; generations below this number may
            come from an old copy of its data.
        `sent_s`: when the question was sent.
        `has_blocks`: the key spaces in `generations` that have blocks on this node.
        """
        for fingerprint, generation in generations.items():
            record = self._record(fingerprint)
            standing = record.stores[store]
            is_old = standing.is_unraised or sent_s < standing.raise_s
            if standing.is_raising or (is_old and not standing.has_failed):
                # The question was sent before this node asked the store to raise the generation (a
                # number that each flush raises), so the answer may be out of date.
                continue
            has_none = standing.is_none or standing.target == NO_GENERATION
            if generation == NO_GENERATION:
                standing.emptied_s = sent_s
            elif (
                NO_GENERATION < standing.generation < generation != standing.target and not has_none
            ):
                standing.changed_s, standing.is_reported = sent_s, False
                standing.unchanged_s = sent_s if standing.shown_s == NEVER_S else standing.shown_s
            standing.shown_s = sent_s
            if NO_GENERATION < generation < standing.generation:
                if not standing.is_unraised:
                    standing.is_unraised, standing.raise_s = True, NEVER_S
                    self._active[fingerprint] = None
                    self.revision += 1
            elif generation == NO_GENERATION:
                if standing.is_none:
                    standing.confirmed_s = sent_s
                elif standing.target != NO_GENERATION:
                    self._aim(fingerprint, standing, generation)
            elif (
                standing.is_verified
                and standing.target is None
                and generation == standing.generation
            ):
                if generation >= restored_below:
                    standing.confirmed_s = sent_s
                    if record.ended_s == NEVER_S:
                        # `record` comes from the file. The earlier server may have adopted this
                        # generation (a number that each flush raises) just before it ended, so the
                        # time CALM_S (see `is_calm`) begins now.
                        record.ended_s = sent_s
            elif fingerprint not in has_blocks and record.begun == record.ended:
                standing.generation, standing.is_verified, standing.is_none = (
                    generation,
                    True,
                    False,
                )
                standing.target = None
                record.ended_s = max(record.ended_s, sent_s)
                if generation >= restored_below:
                    standing.confirmed_s = sent_s
                self._seal_anew(record)
            elif standing.target != generation:
                self._aim(fingerprint, standing, generation)

    def missed(self, now_s: float) -> list[tuple[str, str]]:
        """Finds flushes (deletions of all blocks of a key space) by other nodes that seem not to
        have reached one of the stores (`_missed`). Examines only key spaces in use. Returns each
        case once, as a pair: the fingerprint of the key space (a model in a configuration) and the
        name of the store."""
        found = []
        for fingerprint in self._active:
            record = self._record(fingerprint)
            changed_s = max((one.changed_s for one in self._mine(record)), default=NEVER_S)
            if now_s < changed_s + MISSED_S:
                continue
            for name in self._missed(record):
                if self.is_fresh(fingerprint, name, now_s) and not record.stores[name].is_reported:
                    record.stores[name].is_reported = True
                    found.append((fingerprint, name))
        return found

    def _missed(self, record: Record) -> list[str]:
        """Returns the stores that seem to have missed a flush (deletion of all blocks of the key
        space). A store seems to have missed a flush if another store has raised its generation
        (number that each flush raises), but this store has not raised its generation since then,
        nor in the MISSED_S before. Possible reasons: the node that flushed can't reach these
        stores, its settings do not name them, or the other store has lost its generations."""
        raised_s = max((one.unchanged_s for one in self._mine(record)), default=NEVER_S)
        return [
            name
            for name, one in zip(self.stores, self._mine(record), strict=True)
            if max(one.changed_s, one.acknowledged_s, one.emptied_s) < raised_s - MISSED_S
        ]

    def _aim(self, fingerprint: str, standing: GenerationStanding, generation: int) -> None:
        """Requires this node to flush the key space (delete all its blocks), because a store has
        shown a new generation (a number that each flush raises). When the flush has ended, this
        node adopts `generation` as the key space's generation in that store. `standing`: what is
        known of the key space in that store."""
        record = self.records[fingerprint]
        self._active[fingerprint] = None
        record.need += 1
        standing.target, standing.target_at = generation, record.need
        standing.is_verified = standing.is_none = False
        self.revision += 1

    def begin_raise(self, store: str, now_s: float) -> Raise | None:
        """Returns the raise (a request to a store to raise the generation of a key space) that the
        caller must now send to the store, and counts it as sent. If several raises are due, returns
        the raise that was due first. Returns None if no raise is due."""

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
        """Processes the store's answer to a raise, a request to raise a key space's generation (a
        number that each flush raises). `generation`: the new generation; NO_GENERATION if the store
        has no room for it; None if the raise failed or the store did not answer."""
        record = self._record(fingerprint)
        standing = record.stores[store]
        standing.is_raising = False
        if generation is None:
            standing.has_failed, standing.raise_s = True, now_s + RETRY_S
            return
        if standing.acknowledged < standing.raise_for and now_s >= record.asked_at_s + TELL_S:
            # This store has raised its generation (a number that each flush raises) late. Before
            # that, nodes may have copied old blocks from it to other stores that had raised their
            # generations already. So all other stores must raise their generations once more, even
            # if they are raising them now.
            for other in self._mine(record):
                if other is not standing:
                    other.is_unraised, other.raise_for = True, -1
        # If a flush was requested after this request to the store was sent, the store must raise
        # its generation (a number that each flush raises) once more.
        standing.is_unraised = standing.raise_for < record.asked
        standing.acknowledged, standing.acknowledged_s = (
            max(standing.acknowledged, standing.raise_for),
            now_s,
        )
        standing.has_failed = False
        self._aim(fingerprint, standing, generation)

    # Permission to serve

    def use(self, fingerprint: str, now_s: float) -> None:
        """Records that a client has requested blocks of the key space (a model in a
        configuration). The key space then counts as in use."""
        self._record(fingerprint).used_s = now_s
        self._active[fingerprint] = None

    def generation(self, fingerprint: str, store: str) -> int:
        """Returns the generation (a number that each flush raises) under which the key space's
        blocks in the store may be read and written. Returns NO_GENERATION if they may not be read
        or written now."""
        standing = self.standing(fingerprint, store)
        is_usable = standing.is_settled and standing.is_verified and not standing.is_unraised
        return standing.generation if is_usable else NO_GENERATION

    def doubt(self, fingerprint: str, now_s: float) -> None:
        """Withdraws the stores' confirmations of the key space's generations (numbers that each
        flush raises). Called when a call of a tier has seen another generation than this node
        expected. Afterwards `due` returns the key space (a model in a configuration) at once, so
        that the stores are asked again."""
        self.use(fingerprint, now_s)
        for standing in self._mine(self._record(fingerprint)):
            standing.confirmed_s = standing.asked_s = NEVER_S

    def is_fresh(self, fingerprint: str, store: str, now_s: float) -> bool:
        """Returns True if in the last CONFIRMED_S the store has confirmed the generation (number
        that each flush raises) to which the blocks on this node belong."""
        standing = self.standing(fingerprint, store)
        return standing.is_settled and now_s < standing.confirmed_s + CONFIRMED_S

    def is_calm(self, fingerprint: str) -> bool:
        """Returns True if blocks that may come from one store may be copied to another store. There
        are two conditions:

        - each store has confirmed its generation, in answer to a question that was sent at least
          CALM_S after this node last adopted a generation;
        - no store has missed a flush (deletion of all blocks of the key space, see `missed`).

        The reason: a flush does not raise the generations of all stores at the same moment. Until
        its generation is raised, a store may still serve blocks from before the flush.
        """
        record = self._record(fingerprint)
        if len(self.stores) < 2:
            return True
        return not self._missed(record) and all(
            not one.is_unraised and one.is_settled and one.confirmed_s > record.ended_s + CALM_S
            for one in self._mine(record)
        )

    def is_outdated(self, fingerprint: str) -> bool:
        """Returns True if a store has shown a new generation (a number that each flush raises) and
        this node has not yet flushed the key space (deleted all its blocks). The blocks on this
        node may then be older than the flush that began the new generation."""
        return any(one.target is not None for one in self._mine(self._record(fingerprint)))

    def _mine(self, record: Record) -> list[GenerationStanding]:
        """Returns the states of a key space (a model in a configuration) in the stores that the
        present settings name. `record` may also have states in stores that earlier settings named.
        """
        return [record.stores[name] for name in self.stores]

    def _is_waiting(self, record: Record) -> bool:
        """Returns True while a flush (deletion of all blocks of the key space) is not complete: it
        has not ended on this node, or a store of the present settings must still raise its
        generation (a number that each flush raises)."""
        return record.ended < record.need or any(one.is_unraised for one in self._mine(record))

    # Housekeeping

    def rest(self, known: Collection[str], now_s: float) -> None:
        """Marks each key space (a model in a configuration) as idle that was not used for USED_S,
        unless a flush of it is pending, on this node or in a store. If there are more than
        MAX_RECORDS records, also forgets the records of idle key spaces that are not in `known`.

        `known`: the fingerprints of all key spaces of this node.
        """
        for fingerprint in list(self._active):
            record = self.records[fingerprint]
            if now_s >= record.used_s + USED_S and not self._is_waiting(record):
                del self._active[fingerprint]
        if len(self.records) <= MAX_RECORDS:
            return
        for fingerprint in known:
            # Make records for all key spaces of this node, because a record has the key space's
            # seal number, which is a part of the checksums of its blocks on the disk.
            self._record(fingerprint)
        for fingerprint in list(self.records):
            record = self.records[fingerprint]
            is_unraised = any(one.is_unraised for one in record.stores.values())
            if fingerprint not in known and fingerprint not in self._active and not is_unraised:
                del self.records[fingerprint]
                # A power loss may bring old blocks of the key space back to the disk. They must not
                # become valid again: their seal number, a part of their checksums, must differ
                # from that of a later record.
                self.base = max(self.base, record.local)
                self.revision = self._sealed_at = self.revision + 1

    def check_invariants(self) -> None:
        """Raises AssertionError if the record of a key space contradicts itself."""
        for record in self.records.values():
            assert record.ended <= record.begun <= record.need, "a flush has ended before it began"
            assert record.local <= self.last, "a flush here has a number twice"
            for standing in record.stores.values():
                assert not (standing.is_verified and standing.is_none), "a generation and none"
                assert standing.target is None or not standing.is_verified, (
                    "blocks are vouched for that are to be flushed"
                )
                assert standing.target is None or standing.target_at <= record.need, (
                    "nobody flushes for a generation"
                )
