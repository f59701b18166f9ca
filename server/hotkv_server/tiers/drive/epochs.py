"""Executes the decisions of the book of flushes: asks stores for epochs, has them raised, flushes
key spaces here, saves the book.

Always true: a flush belongs to the node. Callers wait until it is done, and it continues if they
leave. One task decides (`tiers.book.epochs`). At most one action of each kind is under way: a
question and a raise for each store, one flush, one write. A write delays only moves to the disk
and, for a bounded time, the answers of flushes. Runs on the event loop; tiers answer on threads.

A store counts as away if it has a known problem or its answer is overdue. The overdue time counts
only while this process runs: after it was stopped, it asks stores again before it uses old answers.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from hotkv_proto.blocks import Flushed
from hotkv_server.cache.core import CacheCore
from hotkv_server.memory.clerk import Clerk
from hotkv_server.tiers.book.epochs import NO_EPOCH, TELL_S, EpochBook, Raise, Ticket
from hotkv_server.tiers.drive.epoch_notes import EpochNotes, text_of
from hotkv_server.tiers.drive.tasks import TierTasks, future, on_loop
from hotkv_server.tiers.protocol import Epochs as EpochsOf
from hotkv_server.tiers.protocol import SharedTier, Shown

log = logging.getLogger(__name__)

Flush = Callable[[int], Awaitable[int]]
"""Flushes a key space in this node alone; returns the number of blocks."""

TICK_S = 0.05
IDLE_TURN_S = 1.0
"""Time between two looks at key spaces that are not in use."""
ASK_S = 2.0
"""Longest wait for the answer to a question for epochs."""
SERVE_WAIT_S = 1.0
"""Longest wait of a hit in host memory until a store confirms its epoch."""
MEET_S = 1.0
"""Longest wait of a new session for stores."""
LATE_TICKS = 20
"""A store is away if its answer is overdue for so many ticks."""
GAP_S = 0.5
"""A tick that comes so late suggests that this process was stopped."""
DEAF_TICKS = 30
"""For so many ticks after that, stores do not count as away."""
SAVE_AGAIN_S = 1.0
NOTES = "disk"
"""Name reported as a pending tier of a flush that can't be written down."""


class EpochRelay:
    """Passes on to the book that a tier has met another epoch. The tier gets it before the loop
    exists."""

    def __init__(self) -> None:
        self.hear: Callable[[str, int], None] = lambda fingerprint, epoch: None

    def __call__(self, fingerprint: str, epoch: int) -> None:
        self.hear(fingerprint, epoch)


@dataclass(slots=True)
class _Caller:
    """A caller that waits for a flush."""

    ticket: Ticket
    done: "asyncio.Future[Flushed]"
    num_blocks: int = 0


class _Store:
    """The state of a shared tier in this module."""

    def __init__(self, tier: SharedTier, relay: EpochRelay) -> None:
        self.tier = tier
        self.relay = relay
        self.name = tier.facts().name
        self.is_away = self.is_raising = False
        # The tick at which the present question was sent.
        self.asked_tick: int | None = None


class Epochs:
    """Executes decisions; see the module. `stores`: each shared tier with its `on_epoch`."""

    def __init__(
        self,
        core: CacheCore,
        stores: Sequence[tuple[SharedTier, EpochRelay]] = (),
        notes: EpochNotes | None = None,
    ) -> None:
        self._core = core
        self._stores = {one.name: one for one in (_Store(*pair) for pair in stores)}
        self._notes = notes or EpochNotes()
        self.book: EpochBook = self._notes.read(list(self._stores))
        self._callers: list[_Caller] = []
        self._ticks = self._deaf_until = 0
        self._ticked_s = now_s()
        self._is_flushing = self._is_saving = False
        self._save_at_s = 0.0
        self._is_nudged = False
        self._idle_at_s = 0.0
        self._clerk = Clerk("epochs")
        self._turned: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"Epochs({self.book!r}, {len(self._callers)} flushes asked for)"

    def start(self, tasks: TierTasks, flush: Flush) -> None:
        """Starts to follow the flushes of other nodes, and to raise the stores' epochs for flushes
        of an earlier server."""
        self._tasks, self._flush = tasks, flush
        loop = asyncio.get_running_loop()

        def hear(fingerprint: str, epoch: int) -> None:
            try:
                loop.call_soon_threadsafe(self._look_at, fingerprint)
            except RuntimeError:
                # The loop has ended.
                return

        for store in self._stores.values():
            store.relay.hear = hear
        for fingerprint, record in self.book.records.items():
            for name in [name for name in self._stores if record.stores[name].is_untold]:
                log.warning(
                    "tier=%s is told now of a flush of fingerprint=%s before the last start",
                    name,
                    fingerprint,
                )
        tasks.health.watch("the threads of epochs", self._clerk.is_alive)
        tasks.spawn(self._run())

    def discard(self) -> None:
        """Removes the notes of a server that leaves no blocks, unless a store must still raise its
        epoch. May block."""
        self._notes.discard(self.book)

    # Flushes

    async def flush(self, key_space_id: int) -> Flushed:
        """Flushes a key space here and in shared tiers, so that its earlier blocks are no longer
        found.

        Takes CONFIRMED_S, because other nodes may use the last answer of a store for that time. If
        a store does not answer within TELL_S, this server or the next raises its epoch as soon as
        the store answers.
        """
        ticket = self.book.flush(self.fingerprint(key_space_id), now_s())
        caller = _Caller(ticket, future())
        self._callers.append(caller)
        self._nudge()
        self._tasks.spawn(self._answer(caller))
        return await asyncio.shield(caller.done)

    async def _answer(self, caller: _Caller) -> None:
        ticket, ended_s = caller.ticket, 0.0
        while True:
            pending = self.book.pending(ticket, now_s())
            if self._tasks.is_closing:
                pending = list(self._stores)
            if pending is not None:
                ended_s = ended_s or now_s()
                if self.book.is_saved(ticket):
                    break
                if now_s() >= ended_s + TELL_S or self._tasks.is_closing:
                    pending.append(NOTES)
                    break
            await self._turn(TICK_S)
        self._callers.remove(caller)
        if pending:
            log.warning(
                "flush of fingerprint=%s is not in tiers=%s yet, so blocks of before may be found "
                "there; they are told as soon as they answer",
                ticket.fingerprint,
                ",".join(pending),
            )
        if not caller.done.done():
            caller.done.set_result(Flushed(caller.num_blocks, pending))

    # Permission to serve

    def get(self, store: str, key_space_id: int) -> int:
        """Returns the epoch of blocks in the store; NO_EPOCH if they may not be read or written
        now."""
        return self.book.epoch(self.fingerprint(key_space_id), store)

    def prefix(self, store: str, key_space_id: int) -> bytes:
        """Returns the beginning of the keys for the key space's blocks in the store."""
        fingerprint = self.fingerprint(key_space_id).encode()
        return b"hotkv/1/%s/%d" % (fingerprint, self.get(store, key_space_id))

    def expected(self, store: str, key_space_id: int) -> EpochsOf:
        """Returns the epochs that the store must still have after blocks were read."""
        return {self.fingerprint(key_space_id): self.get(store, key_space_id)}

    def disk_prefix(self, key_space_id: int) -> bytes:
        """Returns the prefix of keys in the seals of the key space's blocks on the disk."""
        fingerprint = self.fingerprint(key_space_id)
        local = self.book.local(fingerprint)
        # Without a number: the seals of earlier servers, which did not number flushes.
        return b"hotkv/1/" + fingerprint.encode() + (b"/%d" % local if local else b"")

    @property
    def are_seals_saved(self) -> bool:
        """Whether all seal numbers of the disk are written down."""
        return self.book.are_seals_saved

    def is_confirmed(self, store: str, key_space_id: int) -> bool:
        """Returns whether the store has confirmed lately that its blocks of the key space are newer
        than all flushes."""
        fingerprint = self.fingerprint(key_space_id)
        has_epoch = self.book.epoch(fingerprint, store) != NO_EPOCH
        return has_epoch and self.book.is_fresh(fingerprint, store, now_s())

    def are_all_confirmed(self, key_space_id: int) -> bool:
        """Returns whether all stores have confirmed lately that the key space's blocks on this
        node's disk are newer than all flushes."""
        fingerprint, at_s = self.fingerprint(key_space_id), now_s()
        return all(self.book.is_fresh(fingerprint, name, at_s) for name in self._stores)

    def may_serve(self, key_space_id: int) -> bool:
        """Returns whether hits in host memory may be granted now. Stores that are away are
        ignored."""
        fingerprint, at_s = self.fingerprint(key_space_id), now_s()
        if not self._stores:
            return True
        self.book.use(fingerprint, at_s)
        return not self.book.is_outdated(fingerprint) and all(
            store.is_away or self.book.is_fresh(fingerprint, name, at_s)
            for name, store in self._stores.items()
        )

    def must_ask(self, key_space_id: int) -> bool:
        """Returns whether a reachable store must still confirm the epoch of the key space."""
        fingerprint, at_s = self.fingerprint(key_space_id), now_s()
        return any(
            not store.is_away and not self.book.is_fresh(fingerprint, name, at_s)
            for name, store in self._stores.items()
        )

    async def wait_to_serve(self, key_space_id: int) -> bool:
        """Returns `may_serve`, after waiting up to SERVE_WAIT_S for stores to confirm."""
        until_s = now_s() + SERVE_WAIT_S
        while not self.may_serve(key_space_id):
            if not await self._ask_soon(until_s) or key_space_id not in self._core.key_spaces:
                return False
        return True

    async def meet(self, key_space_id: int) -> None:
        """Waits up to MEET_S until stores say which epoch the key space has. Blocks that are stored
        earlier are not vouched for."""
        await self.confirm_all(key_space_id, time.monotonic() + MEET_S)

    async def confirm(self, store: str, key_space_id: int, until_s: float) -> bool:
        """Returns `is_confirmed`, after asking the store if necessary. `until_s`: of
        time.monotonic."""
        until_s += now_s() - time.monotonic()
        while key_space_id in self._core.key_spaces:
            if self.is_confirmed(store, key_space_id):
                self.book.use(self.fingerprint(key_space_id), now_s())
                return True
            self.book.use(self.fingerprint(key_space_id), now_s())
            if self._stores[store].is_away or not await self._ask_soon(until_s):
                return False
        return False

    async def confirm_all(self, key_space_id: int, until_s: float) -> None:
        """Waits for `are_all_confirmed`. `until_s`: of time.monotonic."""
        until_s += now_s() - time.monotonic()
        while key_space_id in self._core.key_spaces and self.must_ask(key_space_id):
            self.book.use(self.fingerprint(key_space_id), now_s())
            if not await self._ask_soon(until_s):
                return

    async def settle(self, key_space_id: int, until_s: float) -> None:
        """Waits as `confirm_all` does, but also for stores that are away, unless the tier reports a
        problem. A store that has just started is trusted only after some seconds. For callers with
        patience."""
        until_s += now_s() - time.monotonic()
        fingerprint = self.fingerprint(key_space_id)
        while key_space_id in self._core.key_spaces and any(
            not store.tier.problem() and not self.book.is_fresh(fingerprint, name, now_s())
            for name, store in self._stores.items()
        ):
            self.book.use(fingerprint, now_s())
            if not await self._ask_soon(until_s):
                return

    async def _ask_soon(self, until_s: float) -> bool:
        """Waits for the next turn. Returns False if the time is up."""
        left_s = until_s - now_s()
        if left_s <= 0 or self._tasks.is_closing:
            return False
        self._nudge()
        await self._turn(left_s)
        return True

    def fingerprint(self, key_space_id: int) -> str:
        """Returns the name of a key space in stores."""
        return self._core.key_space(key_space_id).fingerprint.hex()

    # The task

    async def _run(self) -> None:
        async for _ in self._tasks.turns("the book of flushes", TICK_S):
            self._work()

    def _nudge(self) -> None:
        """Wakes the task at once, before the next tick."""
        if not self._is_nudged:
            self._is_nudged = True
            asyncio.get_running_loop().call_soon(self._work)

    def _work(self) -> None:
        """Begins all actions that the book says are due."""
        self._is_nudged = False
        if self._tasks.is_closing:
            return
        at_s = now_s()
        self._tick(at_s)
        idle: list[str] = []
        if at_s >= self._idle_at_s:
            self._idle_at_s = at_s + IDLE_TURN_S
            known = {self.fingerprint(number): number for number in self._core.key_spaces}
            self.book.rest(known.keys(), at_s)
            idle = [name for name, number in known.items() if self._has_blocks(number)]
        for store in self._stores.values():
            if store.asked_tick is None and (wanted := self.book.due(store.name, idle, at_s)):
                store.asked_tick = self._ticks
                self._tasks.spawn(self._ask(store, wanted, at_s))
            if not store.is_raising and (one := self.book.begin_raise(store.name, at_s)):
                store.is_raising = True
                self._tasks.spawn(self._raise(store, one))
        if not self._is_flushing and (fingerprint := self.book.begin_flush(at_s)):
            self._is_flushing = True
            self._tasks.spawn(self._flush_here(fingerprint))
        is_unsaved = self.book.saved < self.book.revision
        if is_unsaved and not self._is_saving and at_s >= self._save_at_s:
            self._is_saving = True
            self._tasks.spawn(self._save())

    def _tick(self, at_s: float) -> None:
        """Counts the time in which this process runs, and checks which stores are away."""
        if at_s >= self._ticked_s + GAP_S:
            self._deaf_until = self._ticks + DEAF_TICKS
            for store in self._stores.values():
                store.is_away = False
                store.asked_tick = None if store.asked_tick is None else self._ticks
        elif at_s < self._ticked_s + TICK_S:
            return
        self._ticked_s = at_s
        self._ticks += 1
        if self._ticks < self._deaf_until:
            return
        for store in self._stores.values():
            is_late = store.asked_tick is not None and self._ticks >= store.asked_tick + LATE_TICKS
            if not store.is_away and (is_late or store.tier.problem()):
                store.is_away = True
                self._wake()

    async def _ask(self, store: _Store, fingerprints: list[str], sent_s: float) -> None:
        ended: asyncio.Future[tuple[Shown | None]] = future()
        store.tier.epochs(fingerprints, time.monotonic() + ASK_S, on_loop(ended))
        (shown,) = await ended
        store.asked_tick = None
        if shown is not None:
            # A store that has just started from an old copy still counts as away.
            store.is_away = any(0 < one < shown.restored_below for one in shown.epochs.values())
            has_blocks = {name for name in shown.epochs if self._has_blocks(self._number(name))}
            self.book.shown(store.name, shown.epochs, shown.restored_below, sent_s, has_blocks)
        self._wake()

    async def _raise(self, store: _Store, wanted: Raise) -> None:
        ended: asyncio.Future[tuple[int | None]] = future()
        store.tier.raise_epoch(wanted.fingerprint, wanted.floor, on_loop(ended))
        (epoch,) = await ended
        store.is_raising = False
        if epoch is not None:
            log.info(
                "tier=%s has a new epoch of fingerprint=%s: %d",
                store.name,
                wanted.fingerprint,
                epoch,
            )
        self.book.raised(store.name, wanted.fingerprint, epoch, now_s())
        self._wake()

    async def _flush_here(self, fingerprint: str) -> None:
        """Flushes a key space in this node."""
        is_done = False
        try:
            number = self._number(fingerprint)
            is_asked = any(one.ticket.fingerprint == fingerprint for one in self._callers)
            is_wanted = number and (is_asked or self._has_blocks(number))
            num_blocks = await self._flush(number) if is_wanted else 0
            for caller in self._callers:
                caller.num_blocks += num_blocks * (caller.ticket.fingerprint == fingerprint)
            is_done = True
        finally:
            self._is_flushing = False
            if is_done:
                self.book.flushed(fingerprint, now_s())
            else:
                self.book.broke(fingerprint)
            self._wake()

    async def _save(self) -> None:
        revision, text = self.book.revision, text_of(self.book)
        try:
            await asyncio.wrap_future(self._clerk.do(lambda: self._notes.write(text)))
            self.book.saved = revision
        except OSError as error:
            self._save_at_s = now_s() + SAVE_AGAIN_S
            log.error("epochs not written down, so the next server may know of no flush: %s", error)
        finally:
            self._is_saving = False
        self._wake()

    def _look_at(self, fingerprint: str) -> None:
        """Asks the stores at once, because a tier has met another epoch."""
        self.book.doubt(fingerprint, now_s())
        self._nudge()

    def _wake(self) -> None:
        """Wakes all that wait for a change."""
        self._nudge()
        if self._turned is not None and not self._turned.done():
            self._turned.set_result(None)

    async def _turn(self, wait_s: float) -> None:
        """Waits for a change, or until the time is up."""
        if self._turned is None or self._turned.done():
            self._turned = future()
        await asyncio.wait([self._turned], timeout=wait_s)

    def _number(self, fingerprint: str) -> int:
        """Returns the key space's number here; 0 if it is not known here."""
        return self._core.catalog.number(bytes.fromhex(fingerprint))

    def _has_blocks(self, number: int) -> bool:
        return bool(number) and self._core.catalog.has_blocks(number)


def now_s() -> float:
    """Returns seconds of a clock that also counts while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
