"""Carries out flushes in all tiers, as `GenerationBook` decides: asks stores, raises generations,
flushes key spaces here, saves the book.

Always true: a flush goes on if its caller is cancelled. At most one question and one raise per
store, one flush here and one write of the book are under way. A slow write delays only moves to the
disk and, for a bounded time, answers to flushes.

A store is *away* if its tier reports a problem, two questions in a row failed, an answer is
overdue, or it has restarted and may show an old copy of its data. Only time in which this
process runs counts: after a stop of GAP_S, no store is away, and all are asked again.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hotkv_proto.blocks import Flushed
from hotkv_server.cache.core import CacheCore
from hotkv_server.memory.clerk import Clerk
from hotkv_server.node.capability import LocalFlush
from hotkv_server.tiers.book.generations import (
    NO_GENERATION,
    RAISE_WAIT_S,
    GenerationBook,
    Raise,
    Ticket,
)
from hotkv_server.tiers.drive.generation_notes import GenerationNotes, text_of
from hotkv_server.tiers.drive.tasks import TierTasks, future, on_loop
from hotkv_server.tiers.protocol import Generations as GenerationsOf
from hotkv_server.tiers.protocol import SharedTier, Shown

log = logging.getLogger(__name__)

TICK_S = 0.05
IDLE_TURN_S = 1.0
"""Between two turns that also look at idle key spaces."""
ASK_S = 2.0
"""Longest wait for an answer to a question."""
SERVE_WAIT_S = 1.0
"""Longest wait of a hit in host memory for confirmations."""
NEW_SESSION_WAIT_S = 1.0
"""Longest wait of a new session for confirmations."""
LATE_TICKS = 20
"""A store without an answer for so many ticks is away."""
GAP_S = 0.5
"""Ticks this far apart mean that the process was stopped."""
DEAF_TICKS = 30
"""After a stop, no store is marked as away for so many ticks."""
AGAIN_S = 1.0
"""Pause after a failed write of the book or a failed flush here."""
NOTES = "disk"
"""Reported as a pending tier if the book could not be written in time."""


class GenerationRelay:
    """A tier calls it when the store shows an unexpected generation. Tiers open before
    `FlushDriver.start` connects it; until then calls have no effect."""

    def __init__(self) -> None:
        self.confirm: Callable[[str, int], None] = lambda fingerprint, generation: None

    def __call__(self, fingerprint: str, generation: int) -> None:
        self.confirm(fingerprint, generation)


@dataclass(slots=True)
class _Caller:
    ticket: Ticket
    done: "asyncio.Future[Flushed]"
    num_blocks: int = 0


class _Store:
    def __init__(self, tier: SharedTier, relay: GenerationRelay) -> None:
        self.tier = tier
        self.relay = relay
        self.name = tier.facts().name
        self.is_away = self.is_raising = False
        # Tick at which the question under way was sent.
        self.asked_tick: int | None = None
        # Questions failed since the last answer.
        self.num_failed = 0


class FlushDriver:
    """See the module. `until_s` of public methods is of time.monotonic, all other times are of
    `now_s`.

    `notes`: None: the book ends with the process.
    """

    def __init__(
        self,
        core: CacheCore,
        stores: Sequence[tuple[SharedTier, GenerationRelay]] = (),
        notes: GenerationNotes | None = None,
    ) -> None:
        self._core = core
        self._stores = {one.name: one for one in (_Store(*pair) for pair in stores)}
        self._notes = notes or GenerationNotes()
        self.book: GenerationBook = self._notes.read(list(self._stores))
        self._callers: list[_Caller] = []
        self._ticks = self._deaf_until = 0
        self._ticked_s = now_s()
        self._is_flushing = self._is_saving = False
        self._save_at_s = self._flush_at_s = 0.0
        self._is_nudged = False
        self._idle_at_s = 0.0
        self._clerk = Clerk("generations")
        self._turned: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"FlushDriver({self.book!r}, {len(self._callers)} flushes asked for)"

    def start(
        self,
        tasks: TierTasks,
        flush: LocalFlush,
        on_flushed: Callable[[int], None] = lambda key_space_id: None,
    ) -> None:
        """Starts the task. Flushes of other nodes are noticed from now on, and raises left by an
        earlier server are sent.

        `flush`: flushes on this node only.
        `on_flushed`: called instead if another node has flushed a key space without blocks here.
        """
        self._tasks, self._flush, self._on_flushed = tasks, flush, on_flushed
        loop = asyncio.get_running_loop()

        def confirm(fingerprint: str, generation: int) -> None:
            try:
                loop.call_soon_threadsafe(self._look_at, fingerprint)
            except RuntimeError:
                # The loop has ended.
                return

        for store in self._stores.values():
            store.relay.confirm = confirm
        for fingerprint, record in self.book.records.items():
            for name in [name for name in self._stores if record.stores[name].is_unraised]:
                log.warning(
                    "tier=%s is told now of a flush of fingerprint=%s before the last start",
                    name,
                    fingerprint,
                )
        tasks.health.watch("the threads of generations", self._clerk.is_alive)
        tasks.spawn(self._run())

    def discard(self) -> None:
        """Removes the book's files, at the end of a server that leaves no blocks; not if a store
        must still raise: the next server does that. Blocking."""
        self._notes.discard(self.book)

    # Flushes

    async def flush(self, key_space_id: int) -> Flushed:
        """Flushes on this node and in shared tiers: no node finds blocks stored before the call.
        Names the tiers where it is still pending. With stores it takes CONFIRMED_S or more,
        because other nodes may use a store's last answer so long."""
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
                if now_s() >= ended_s + RAISE_WAIT_S or self._tasks.is_closing:
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
        caller.done.set_result(Flushed(caller.num_blocks, pending))

    # Permission to serve

    def get(self, store: str, key_space_id: int) -> int:
        """See `GenerationBook.generation`."""
        return self.book.generation(self.fingerprint(key_space_id), store)

    def may_offer(self, store: str, key_space_id: int) -> bool:
        """Blocks that may come from another store may be copied to this one."""
        is_calm = self.book.is_calm(self.fingerprint(key_space_id))
        return is_calm and self.get(store, key_space_id) != NO_GENERATION

    def prefix(self, store: str, key_space_id: int) -> bytes:
        """Prefix of the blocks' keys in the store. It has the generation, so flushed blocks are
        not found."""
        fingerprint = self.fingerprint(key_space_id).encode()
        return b"hotkv/1/%s/%d" % (fingerprint, self.get(store, key_space_id))

    def expected(self, store: str, key_space_id: int) -> GenerationsOf:
        """For `SharedBlocks.generations`: a read compares it with the store's."""
        return {self.fingerprint(key_space_id): self.get(store, key_space_id)}

    def disk_prefix(self, key_space_id: int) -> bytes:
        """Prefix of the blocks' keys on the disk. It has the seal number, so the seals of
        flushed blocks don't match."""
        fingerprint = self.fingerprint(key_space_id)
        local = self.book.local(fingerprint)
        # Earlier versions had no seal numbers.
        return b"hotkv/1/" + fingerprint.encode() + (b"/%d" % local if local else b"")

    @property
    def are_seals_saved(self) -> bool:
        return self.book.are_seals_saved

    def is_confirmed(self, store: str, key_space_id: int) -> bool:
        """The key space's blocks in the store may be read and written."""
        fingerprint = self.fingerprint(key_space_id)
        has_generation = self.book.generation(fingerprint, store) != NO_GENERATION
        return has_generation and self.book.is_fresh(fingerprint, store, now_s())

    def are_all_confirmed(self, key_space_id: int) -> bool:
        """The key space's blocks on this node's disk may be loaded."""
        fingerprint, at_s = self.fingerprint(key_space_id), now_s()
        return all(self.book.is_fresh(fingerprint, name, at_s) for name in self._stores)

    def may_serve(self, key_space_id: int) -> bool:
        """The key space's blocks in host memory may be served: each store that is not away has
        confirmed, and none has shown a generation for which this node must still flush."""
        fingerprint, at_s = self.fingerprint(key_space_id), now_s()
        if not self._stores:
            return True
        self.book.use(fingerprint, at_s)
        return not self.book.is_outdated(fingerprint) and all(
            store.is_away or self.book.is_fresh(fingerprint, name, at_s)
            for name, store in self._stores.items()
        )

    def must_ask(self, key_space_id: int) -> bool:
        """A lookup must first wait for a confirmation."""
        fingerprint, at_s = self.fingerprint(key_space_id), now_s()
        return any(
            not store.is_away and not self.book.is_fresh(fingerprint, name, at_s)
            for name, store in self._stores.items()
        )

    async def wait_to_serve(self, key_space_id: int) -> bool:
        """Waits until `may_serve`; False after SERVE_WAIT_S, or if the key space is removed."""
        until_s = now_s() + SERVE_WAIT_S
        while not self.may_serve(key_space_id):
            if not await self._ask_soon(until_s) or key_space_id not in self._core.key_spaces:
                return False
        return True

    async def confirm_new(self, key_space_id: int) -> None:
        """Waits up to NEW_SESSION_WAIT_S for a new session's key space. Blocks stored before the
        stores have answered would count as older than a flush, and be deleted by the answer."""
        await self.confirm_all(key_space_id, time.monotonic() + NEW_SESSION_WAIT_S)

    async def confirm(self, store: str, key_space_id: int, until_s: float) -> bool:
        """Waits until `is_confirmed`. False if the store is away, has no generation, or has not
        answered by `until_s`."""
        until_s += now_s() - time.monotonic()
        while key_space_id in self._core.key_spaces:
            fingerprint = self.fingerprint(key_space_id)
            self.book.use(fingerprint, now_s())
            if self.book.is_fresh(fingerprint, store, now_s()):
                return self.is_confirmed(store, key_space_id)
            if self._stores[store].is_away or not await self._ask_soon(until_s):
                return False
        return False

    async def confirm_all(self, key_space_id: int, until_s: float) -> None:
        """Waits for confirmations of all stores that are not away, until `until_s`."""
        until_s += now_s() - time.monotonic()
        while key_space_id in self._core.key_spaces and self.must_ask(key_space_id):
            self.book.use(self.fingerprint(key_space_id), now_s())
            if not await self._ask_soon(until_s):
                return

    async def settle(self, key_space_id: int, until_s: float) -> None:
        """Like `confirm_all`, but waits for stores that are away, too, unless their tier reports
        a problem: seconds, if a store has just started. For prefetches."""
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
        """Nudges the task and waits for `_wake`, at most until `until_s` of `now_s`. False if
        that has passed or the node closes."""
        left_s = until_s - now_s()
        if left_s <= 0 or self._tasks.is_closing:
            return False
        self._nudge()
        await self._turn(left_s)
        return True

    def fingerprint(self, key_space_id: int) -> str:
        return self._core.key_space(key_space_id).fingerprint.hex()

    # The task

    async def _run(self) -> None:
        async for _ in self._tasks.turns("the book of flushes", TICK_S):
            self._work()

    def _nudge(self) -> None:
        """Runs `_work` in the loop's next iteration."""
        if not self._is_nudged:
            self._is_nudged = True
            asyncio.get_running_loop().call_soon(self._work)

    def _work(self) -> None:
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
            for name, missed in self.book.missed(at_s):
                log.warning(
                    "another node's flush of fingerprint=%s has not reached tier=%s, which may "
                    "have blocks of before, or another tier lost its generations: give all nodes "
                    "the same tiers, then flush again",
                    name,
                    missed,
                )
        for store in self._stores.values():
            if store.asked_tick is None and (wanted := self.book.due(store.name, idle, at_s)):
                store.asked_tick = self._ticks
                self._tasks.spawn(self._ask(store, wanted, at_s))
            if not store.is_raising and (one := self.book.begin_raise(store.name, at_s)):
                store.is_raising = True
                self._tasks.spawn(self._raise(store, one))
        is_free = not self._is_flushing and at_s >= self._flush_at_s
        if is_free and (fingerprint := self.book.begin_flush(at_s)):
            self._is_flushing = True
            self._tasks.spawn(self._flush_here(fingerprint))
        is_unsaved = self.book.saved < self.book.revision
        if is_unsaved and not self._is_saving and at_s >= self._save_at_s:
            self._is_saving = True
            self._tasks.spawn(self._save())

    def _tick(self, at_s: float) -> None:
        """Marks stores that do not answer as away. After a stop of the process, the waits begin
        anew."""
        if at_s >= self._ticked_s + GAP_S:
            self._deaf_until = self._ticks + DEAF_TICKS
            for store in self._stores.values():
                store.is_away, store.num_failed = False, 0
                store.asked_tick = None if store.asked_tick is None else self._ticks
        elif at_s < self._ticked_s + TICK_S:
            return
        self._ticked_s = at_s
        self._ticks += 1
        if self._ticks < self._deaf_until:
            return
        for store in self._stores.values():
            is_late = store.asked_tick is not None and self._ticks >= store.asked_tick + LATE_TICKS
            if not store.is_away and (is_late or store.num_failed > 1 or store.tier.problem()):
                store.is_away = True
                self._wake()

    async def _ask(self, store: _Store, fingerprints: list[str], sent_s: float) -> None:
        ended: asyncio.Future[tuple[Shown | None]] = future()
        store.tier.generations(fingerprints, time.monotonic() + ASK_S, on_loop(ended))
        (shown,) = await ended
        store.asked_tick = None
        store.num_failed = store.num_failed + 1 if shown is None else 0
        if shown is not None:
            # Restarted, and perhaps an old copy of its data.
            store.is_away = any(
                0 < one < shown.restored_below for one in shown.generations.values()
            )
            has_blocks = {
                name for name in shown.generations if self._has_blocks(self._number(name))
            }
            before = {name: self.book.generation(name, store.name) for name in shown.generations}
            self.book.shown(store.name, shown.generations, shown.restored_below, sent_s, has_blocks)
            for name, generation in before.items():
                if (
                    NO_GENERATION
                    != generation
                    != self.book.generation(name, store.name)
                    != NO_GENERATION
                ):
                    self._on_flushed(self._number(name))
        self._wake()

    async def _raise(self, store: _Store, wanted: Raise) -> None:
        ended: asyncio.Future[tuple[int | None]] = future()
        store.tier.raise_generation(
            wanted.fingerprint, wanted.floor, on_loop(ended), wanted.is_retry
        )
        (generation,) = await ended
        store.is_raising = False
        if generation is not None:
            log.info(
                "new generation tier=%s fingerprint=%s generation=%d",
                store.name,
                wanted.fingerprint,
                generation,
            )
        self.book.raised(store.name, wanted.fingerprint, generation, now_s())
        self._wake()

    async def _flush_here(self, fingerprint: str) -> None:
        """Removes no blocks of an unknown key space. If there are none here and no caller asked,
        only calls `on_flushed`."""
        is_done = False
        try:
            number = self._number(fingerprint)
            is_asked = any(one.ticket.fingerprint == fingerprint for one in self._callers)
            is_wanted = number and (is_asked or self._has_blocks(number))
            num_blocks = await self._flush(number, elsewhere=not is_asked) if is_wanted else 0
            if number and not is_wanted:
                self._on_flushed(number)
            for caller in self._callers:
                caller.num_blocks += num_blocks * (caller.ticket.fingerprint == fingerprint)
            is_done = True
        finally:
            self._is_flushing = False
            if is_done:
                self.book.flushed(fingerprint, now_s())
            else:
                self.book.broke(fingerprint)
                self._flush_at_s = now_s() + AGAIN_S
            self._wake()

    async def _save(self) -> None:
        revision, text = self.book.revision, text_of(self.book)
        try:
            await asyncio.wrap_future(self._clerk.do(lambda: self._notes.write(text)))
            self.book.saved = revision
        except OSError as error:
            self._save_at_s = now_s() + AGAIN_S
            log.error(
                "generations not written down, so the next server may know of no flush: %s", error
            )
        finally:
            self._is_saving = False
        self._wake()

    def _look_at(self, fingerprint: str) -> None:
        self.book.doubt(fingerprint, now_s())
        self._nudge()

    def _wake(self) -> None:
        """Called when an action has ended or a store is marked as away."""
        self._nudge()
        if self._turned is not None and not self._turned.done():
            self._turned.set_result(None)

    async def _turn(self, wait_s: float) -> None:
        """Waits for `_wake`, at most `wait_s`."""
        if self._turned is None or self._turned.done():
            self._turned = future()
        await asyncio.wait([self._turned], timeout=wait_s)

    def _number(self, fingerprint: str) -> int:
        """0 if this node does not know the key space."""
        return self._core.catalog.number(bytes.fromhex(fingerprint))

    def _has_blocks(self, number: int) -> bool:
        return bool(number) and self._core.catalog.has_blocks(number)


def now_s() -> float:
    """CLOCK_BOOTTIME: unlike time.monotonic, it runs while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
