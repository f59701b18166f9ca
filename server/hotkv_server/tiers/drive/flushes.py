"""Executes flushes in all tiers. A flush deletes all blocks of a key space (a model in a
configuration). A generation is a number that a shared store keeps for each key space, and that
every flush raises. `GenerationBook` (`tiers.book.generations`), the record of generations and
flushes, decides which actions are due. This module executes them: it asks the stores of shared
tiers for generations, raises generations in stores, flushes key spaces on this node, and saves the
`GenerationBook`.

Always true: a flush continues if the caller that waits for it is cancelled. One task asks the
`GenerationBook` for due actions. At most one action of each kind is under way: one question and one
raise for each store, one flush of this node, one write of the `GenerationBook`. A slow write of the
`GenerationBook` delays only moves to the disk and, for a bounded time, the answers to flushes.

A store counts as *away* in four cases: its tier reports a problem; two questions in a row have
failed; its answer to a question is overdue; or it has just restarted and shows a generation that
may come from an old copy of its data. The delay of an answer counts only the time in which this
process runs. If the process was stopped for GAP_S or longer, all stores stop counting as away, and
are asked again.

Runs on the event loop; tiers call `on_done` on their own threads.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hotkv_proto.blocks import Flushed
from hotkv_server.cache.core import CacheCore
from hotkv_server.memory.clerk import Clerk
from hotkv_server.node.capability import FlushHere
from hotkv_server.tiers.book.generations import NO_GENERATION, TELL_S, GenerationBook, Raise, Ticket
from hotkv_server.tiers.drive.generation_notes import GenerationNotes, text_of
from hotkv_server.tiers.drive.tasks import TierTasks, future, on_loop
from hotkv_server.tiers.protocol import Generations as GenerationsOf
from hotkv_server.tiers.protocol import SharedTier, Shown

log = logging.getLogger(__name__)

TICK_S = 0.05
"""Time between two turns (ticks) of the task that asks the `GenerationBook` for due actions."""
IDLE_TURN_S = 1.0
"""Time between two turns in which the task also considers idle key spaces."""
ASK_S = 2.0
"""Longest wait for a store's answer to a question for generations (numbers that each flush
raises)."""
SERVE_WAIT_S = 1.0
"""Longest time that a hit in host memory waits for the stores to confirm the key space's
generations (numbers that each flush raises)."""
MEET_S = 1.0
"""Longest time that a new session waits for the stores to confirm its key space's generations
(numbers that each flush raises)."""
LATE_TICKS = 20
"""A store counts as away (calls no longer wait for it) if it has not answered a question for this
number of ticks (turns of the task, see TICK_S)."""
GAP_S = 0.5
"""If two ticks (turns of the task, see TICK_S) are at least this far apart, the process is assumed
to have been stopped between them."""
DEAF_TICKS = 30
"""After a stop of the process (see GAP_S), no store begins to count as away (as not answering) for
this number of ticks (turns of the task, see TICK_S)."""
AGAIN_S = 1.0
"""Wait after a failed write of the `GenerationBook` or a failed flush on this node, before the next
try."""
NOTES = "disk"
"""The tier name that a flush reports as pending if the `GenerationBook` could not be written to its
files in time."""


class GenerationRelay:
    """An object that a tier calls when the store has another generation (a number that each flush
    raises) than the tier expected. The relay passes the call on to `FlushDriver`.

    A tier gets its relay when it is opened, before `FlushDriver` exists. `FlushDriver.start`
    connects the relay; until then calls of the relay have no effect.

    `confirm`: the function to which calls are passed, with the fingerprint of the key space and the
        store's generation.
    """

    def __init__(self) -> None:
        self.confirm: Callable[[str, int], None] = lambda fingerprint, generation: None

    def __call__(self, fingerprint: str, generation: int) -> None:
        self.confirm(fingerprint, generation)


@dataclass(slots=True)
class _Caller:
    """A caller that waits for a flush (deletion of all blocks of a key space) to be done.

    `done`: gets the result of the flush.
    `num_blocks`: number of blocks that were removed on this node.
    """

    ticket: Ticket
    done: "asyncio.Future[Flushed]"
    num_blocks: int = 0


class _Store:
    """The state of a shared tier's store in `FlushDriver`.

    `is_away`: True while the store counts as away, for example because it does not answer; see the
        module.
    `is_raising`: True while a raise (a request to raise a generation, the number that each flush
        raises) is under way.
    """

    def __init__(self, tier: SharedTier, relay: GenerationRelay) -> None:
        self.tier = tier
        self.relay = relay
        self.name = tier.facts().name
        self.is_away = self.is_raising = False
        # The tick (turn of the task, see TICK_S) at which the question under way was sent; None
        # without a question.
        self.asked_tick: int | None = None
        # Number of questions to the store that have failed since its last answer.
        self.num_failed = 0


class FlushDriver:
    """Executes flushes (deletions of all blocks of a key space), and decides which blocks may be
    served: the stores must have confirmed the blocks' generations (numbers that each flush raises).
    See the module.

    `stores`: each shared tier, with its `GenerationRelay`, through which it reports that the store
        has another generation than expected.
    `notes`: files in which `book` (the record of generations and flushes) outlives the server;
        None: `book` is lost when the process ends.
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
        flush: FlushHere,
        on_flushed: Callable[[int], None] = lambda key_space_id: None,
    ) -> None:
        """Starts the task that executes the due actions (see the module). From now on, this node
        notices flushes (deletions of all blocks of a key space) that other nodes run. If an earlier
        server could not raise a store's generation (a number that each flush raises), the task
        raises it now.

        `tasks`: runs the task.
        `flush`: flushes a key space on this node only.
        `on_flushed`: called in place of `flush` if another node has flushed a key space of which
            this node has no block. Gets the key space.
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
        """Removes the files with the `GenerationBook` (record of generations and flushes). Leaves
        them if a store must still raise a generation (a number that each flush raises), because the
        next server must do that. Called at the end of a server that leaves no blocks to the next
        server. Blocks the calling thread."""
        self._notes.discard(self.book)

    # Flushes

    async def flush(self, key_space_id: int) -> Flushed:
        """Flushes a key space (a model in a configuration) on this node and in shared tiers, so
        that no node finds blocks that were stored before the call. Returns the number of blocks
        removed on this node, and the names of the tiers in which the flush is not effective yet.

        If there are stores and they answer, this takes at least CONFIRMED_S, because other nodes
        may use the last answer of a store for that time. If a store does not answer within TELL_S,
        the flush ends without this store. This server or the next server then raises the store's
        generation (the number that each flush raises) as soon as the store answers.
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
        caller.done.set_result(Flushed(caller.num_blocks, pending))

    # Permission to serve

    def get(self, store: str, key_space_id: int) -> int:
        """Returns the generation (a number that each flush raises) under which the key space's
        blocks in the store may be read and written. Returns NO_GENERATION if they may not be read
        or written now."""
        return self.book.generation(self.fingerprint(key_space_id), store)

    def may_offer(self, store: str, key_space_id: int) -> bool:
        """Returns True if blocks of the key space (a model in a configuration) may be copied to
        the store, even blocks that may come from another store. This needs two conditions: the
        store has a generation for the key space; and no flush (deletion of all blocks of the key
        space) has reached one store but not yet another (`GenerationBook.is_calm`)."""
        is_calm = self.book.is_calm(self.fingerprint(key_space_id))
        return is_calm and self.get(store, key_space_id) != NO_GENERATION

    def prefix(self, store: str, key_space_id: int) -> bytes:
        """Returns the prefix of the keys of the key space's blocks in the store. The prefix
        contains the generation, a number that each flush raises, so blocks from before a flush are
        not found."""
        fingerprint = self.fingerprint(key_space_id).encode()
        return b"hotkv/1/%s/%d" % (fingerprint, self.get(store, key_space_id))

    def expected(self, store: str, key_space_id: int) -> GenerationsOf:
        """Returns the key space's generation (a number that each flush raises) in the form of
        `Blocks.generations`. After a read, the tier compares this generation with the store's
        generation."""
        return {self.fingerprint(key_space_id): self.get(store, key_space_id)}

    def disk_prefix(self, key_space_id: int) -> bytes:
        """Returns the prefix of the keys of the key space's blocks on the disk. The prefix contains
        the seal number (`Record.local`), which each flush changes, so the seals (checksums) of
        flushed blocks don't match."""
        fingerprint = self.fingerprint(key_space_id)
        local = self.book.local(fingerprint)
        # Seal numbers are a part of the checksums on the disk. If the seal number is 0, return
        # the prefix that earlier versions used; they had no seal numbers.
        return b"hotkv/1/" + fingerprint.encode() + (b"/%d" % local if local else b"")

    @property
    def are_seals_saved(self) -> bool:
        """True if the saved `GenerationBook` has all seal numbers (`Record.local`), which are part
        of the checksums of blocks on the disk. Then the next server can read these blocks."""
        return self.book.are_seals_saved

    def is_confirmed(self, store: str, key_space_id: int) -> bool:
        """Returns True if the key space's blocks in the store may be read and written: the store
        has a generation for the key space (a number that each flush raises), and has confirmed this
        generation in the last CONFIRMED_S."""
        fingerprint = self.fingerprint(key_space_id)
        has_generation = self.book.generation(fingerprint, store) != NO_GENERATION
        return has_generation and self.book.is_fresh(fingerprint, store, now_s())

    def are_all_confirmed(self, key_space_id: int) -> bool:
        """Returns True if all stores have confirmed the key space's generations (numbers that each
        flush raises) in the last CONFIRMED_S. Then the key space's blocks on this node's disk are
        newer than all flushes (deletions of all blocks of the key space), so they may be loaded."""
        fingerprint, at_s = self.fingerprint(key_space_id), now_s()
        return all(self.book.is_fresh(fingerprint, name, at_s) for name in self._stores)

    def may_serve(self, key_space_id: int) -> bool:
        """Returns True if the key space's blocks in host memory may be served now. There are two
        conditions. All stores that are not away (see the module) have confirmed the key space's
        generations (numbers that each flush raises) in the last CONFIRMED_S. No store has shown a
        new generation for which this node must still flush the key space (delete all its
        blocks)."""
        fingerprint, at_s = self.fingerprint(key_space_id), now_s()
        if not self._stores:
            return True
        self.book.use(fingerprint, at_s)
        return not self.book.is_outdated(fingerprint) and all(
            store.is_away or self.book.is_fresh(fingerprint, name, at_s)
            for name, store in self._stores.items()
        )

    def must_ask(self, key_space_id: int) -> bool:
        """Returns True if a lookup must first wait for a confirmation: a store that is not away
        (see the module) has not confirmed the key space's generation (a number that each flush
        raises) in the last CONFIRMED_S."""
        fingerprint, at_s = self.fingerprint(key_space_id), now_s()
        return any(
            not store.is_away and not self.book.is_fresh(fingerprint, name, at_s)
            for name, store in self._stores.items()
        )

    async def wait_to_serve(self, key_space_id: int) -> bool:
        """Waits up to SERVE_WAIT_S until `may_serve` is True for the key space (a model in a
        configuration), so that its blocks in host memory may be served. Returns False if that takes
        longer, or if the key space is removed."""
        until_s = now_s() + SERVE_WAIT_S
        while not self.may_serve(key_space_id):
            if not await self._ask_soon(until_s) or key_space_id not in self._core.key_spaces:
                return False
        return True

    async def confirm_new(self, key_space_id: int) -> None:
        """Waits, at most MEET_S, until the stores have confirmed their generations (numbers that
        each flush raises) of a new session's key space. The reason: blocks that the engine stores
        before the stores have answered count as possibly older than a flush, so this node would
        delete them when a store answers."""
        await self.confirm_all(key_space_id, time.monotonic() + MEET_S)

    async def confirm(self, store: str, key_space_id: int, until_s: float) -> bool:
        """Waits until `is_confirmed` is True, and returns True. If the last confirmation is too
        old, asks the store for the key space's generation (a number that each flush raises).
        Returns False if the store is away (for example, does not answer; see the module), has no
        generation, refuses to raise it, or has not answered by `until_s`, a time of
        time.monotonic."""
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
        """Asks the stores for the key space's generations (numbers that each flush raises). Waits
        until all stores have confirmed them, but at most until `until_s`, a time of time.monotonic.
        Does not wait for stores that are away (that do not answer, for example; see the module)."""
        until_s += now_s() - time.monotonic()
        while key_space_id in self._core.key_spaces and self.must_ask(key_space_id):
            self.book.use(self.fingerprint(key_space_id), now_s())
            if not await self._ask_soon(until_s):
                return

    async def settle(self, key_space_id: int, until_s: float) -> None:
        """Asks the stores for the key space's generations (numbers that each flush raises). Waits
        until all stores have confirmed them, but at most until `until_s`, a time of time.monotonic.

        Unlike `confirm_all`, also waits for stores that are away (that do not answer, for example),
        unless their tier reports a problem. If a store has just started, this may take some
        seconds. So this method is meant for prefetches only.
        """
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
        """Makes the task begin the due actions at once. Then waits until an action has ended, or a
        store begins to count as away (`_wake`), and returns True. Waits at most until `until_s`, a
        time of `now_s`. Returns False at once if `until_s` has passed or the node closes."""
        left_s = until_s - now_s()
        if left_s <= 0 or self._tasks.is_closing:
            return False
        self._nudge()
        await self._turn(left_s)
        return True

    def fingerprint(self, key_space_id: int) -> str:
        """Returns the key space's fingerprint in hexadecimal, its name in stores."""
        return self._core.key_space(key_space_id).fingerprint.hex()

    # The task

    async def _run(self) -> None:
        async for _ in self._tasks.turns("the book of flushes", TICK_S):
            self._work()

    def _nudge(self) -> None:
        """Makes the event loop call `_work`, which begins the due actions, in its next iteration,
        without waiting for the task's next tick."""
        if not self._is_nudged:
            self._is_nudged = True
            asyncio.get_running_loop().call_soon(self._work)

    def _work(self) -> None:
        """Asks the `GenerationBook` which actions are due, and begins them: it asks stores for
        generations (numbers that each flush raises) or raises generations, flushes a key space on
        this node, or writes the `GenerationBook` to its file."""
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
        """Counts a tick, and marks the stores that do not answer as away (see the module). Does
        nothing if less than TICK_S has passed since the last tick. If more than GAP_S has passed,
        the process was stopped meanwhile. Then the waits for answers begin anew, and no store is
        marked as away in the next DEAF_TICKS ticks."""
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
            # A store counts as away if it has just restarted and shows a generation (number that
            # each flush raises) that may come from an old copy of its data.
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
                "tier=%s has a new generation of fingerprint=%s: %d",
                store.name,
                wanted.fingerprint,
                generation,
            )
        self.book.raised(store.name, wanted.fingerprint, generation, now_s())
        self._wake()

    async def _flush_here(self, fingerprint: str) -> None:
        """Flushes a key space (a model in a configuration) on this node, and reports the end of
        the flush to the `GenerationBook`. Removes no blocks if this node does not know the key
        space. If the key space has no blocks on this node and no caller has requested the flush,
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
        """Asks the stores at once for the key space's generations (numbers that each flush raises).
        Called if a tier has seen another generation than it expected."""
        self.book.doubt(fingerprint, now_s())
        self._nudge()

    def _wake(self) -> None:
        """Makes the task begin the due actions soon (`_nudge`), and wakes all callers that wait for
        the result of an action (`_turn`). Called when an action has ended, or a store begins to
        count as away (as not answering)."""
        self._nudge()
        if self._turned is not None and not self._turned.done():
            self._turned.set_result(None)

    async def _turn(self, wait_s: float) -> None:
        """Waits until `_wake` is called (an action has ended, or a store begins to count as away),
        at most for `wait_s` seconds."""
        if self._turned is None or self._turned.done():
            self._turned = future()
        await asyncio.wait([self._turned], timeout=wait_s)

    def _number(self, fingerprint: str) -> int:
        """Returns the number (id) of the key space (a model in a configuration) on this node; 0
        if the node does not know it."""
        return self._core.catalog.number(bytes.fromhex(fingerprint))

    def _has_blocks(self, number: int) -> bool:
        return bool(number) and self._core.catalog.has_blocks(number)


def now_s() -> float:
    """Returns the time of CLOCK_BOOTTIME in seconds. Unlike time.monotonic, this clock also runs
    while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
