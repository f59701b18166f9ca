"""The epochs of key spaces in a tier that nodes share: a flush on one node counts on all.

Always true: from the moment in which a flush begins here, until the store has raised the epoch, the
epoch of the key space is not known here, also if the server ends in between; nor while what another
node has flushed is still being flushed here. An epoch is written down before it is known: so the
next server sees that another node has flushed meanwhile. On the event loop only; the tier answers
on threads.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from hotkv_server.core.cache import CacheCore
from hotkv_server.memory.clerk import Clerk
from hotkv_server.memory.epoch_notes import UNSURE, EpochNotes
from hotkv_server.runtime.breaker import Breaker
from hotkv_server.runtime.tier_tasks import TierTasks, future, on_loop
from hotkv_server.tiers.epoch_numbers import may_be_raised
from hotkv_server.tiers.protocol import NO_EPOCH, Epochs, SharedTier

log = logging.getLogger(__name__)

Flush = Callable[[int], Awaitable[int]]
"""Flushes a key space in this node alone."""

POLL_S = 1.0
"""Between two looks at the epochs of the key spaces that sessions have."""
MAX_POLLED = 256
"""Key spaces that are looked at in a turn."""
FLUSH_WAIT_S = 1.0
"""How long a flush waits for the store; it is told later else."""
RETRY_S = 1.0


class EpochRelay:
    """Given to a tier before there is a loop: passes on what it hears of epochs."""

    def __init__(self) -> None:
        self.hear: Callable[[str, int], None] = lambda fingerprint, epoch: None

    def __call__(self, fingerprint: str, epoch: int) -> None:
        self.hear(fingerprint, epoch)


class SharedEpochs:
    """See the module. `relay`: what the tier was given as `on_epoch`. `notes`: of this server and
    the one before it, whose key spaces the core has already."""

    def __init__(
        self,
        core: CacheCore,
        tier: SharedTier,
        breaker: Breaker,
        relay: EpochRelay,
        notes: EpochNotes,
    ) -> None:
        self._core = core
        self._tier = tier
        self._name = tier.facts().name
        self._breaker = breaker
        self._relay = relay
        self._notes = notes
        self._clerk = Clerk(f"epochs-{self._name}")
        self._known: dict[int, int] = {}
        # Flushes of each key space that have begun and not ended, here and in the store, and the
        # epoch that the last one to end has met. By fingerprint: numbers change.
        self._flushing: Counter[str] = Counter()
        self._met: dict[str, int] = {}
        # Who writes down the epoch of a key space before it is known; none since a flush.
        self._learning: dict[str, asyncio.Task[None]] = {}
        self._saving = asyncio.Lock()
        # Under which epoch the blocks lie that an earlier server has left, if that is known.
        noted, restored = notes.epochs(self._name), set(map(self.fingerprint, core.key_spaces))
        self._before = {name: noted[name] for name in restored if name in noted}
        self._unsure = (restored - noted.keys()) | (restored & notes.mixed(self._name))

    def __repr__(self) -> str:
        return f"SharedEpochs({len(self._known)} known, {len(self._flushing)} flushing)"

    def start(self, tasks: TierTasks, flush: Flush) -> None:
        """Begins to follow what other nodes flush, and to tell what an earlier server could not."""
        self._tasks, self._flush = tasks, flush
        loop = asyncio.get_running_loop()

        def hear(fingerprint: str, epoch: int) -> None:
            try:
                loop.call_soon_threadsafe(self._hear, fingerprint, epoch)
            except RuntimeError:
                # The loop has ended.
                return

        self._relay.hear = hear
        for fingerprint in self._notes.untold(self._name):
            log.warning(
                "tier=%s is told now of a flush of fingerprint=%s before the last start",
                self._name,
                fingerprint,
            )
            self._flushing[fingerprint] += 1
            tasks.spawn(self._raise(fingerprint, is_late=True))
        tasks.health.watch("the threads of epochs", self._clerk.is_alive)
        tasks.spawn(self._poll())

    def get(self, key_space_id: int) -> int:
        """The epoch of a key space; NO_EPOCH if it is not known."""
        return self._known.get(key_space_id, NO_EPOCH)

    def covers_old(self, key_space_id: int) -> bool:
        """Whether also what an earlier server has left of the key space is of the epoch that is
        known."""
        return key_space_id in self._known and not self.is_unsure(key_space_id)

    def is_unsure(self, key_space_id: int) -> bool:
        """Whether an earlier server has left blocks of the key space and nobody knows of which
        epoch they are."""
        return self.fingerprint(key_space_id) in self._unsure

    def prefix(self, key_space_id: int) -> bytes:
        """How keys of the key space's blocks begin."""
        return b"hotkv/1/%s/%d" % (self.fingerprint(key_space_id).encode(), self.get(key_space_id))

    def expected(self, key_space_id: int) -> Epochs:
        """What the store must still have when blocks have been read."""
        return {self.fingerprint(key_space_id): self.get(key_space_id)}

    def fingerprint(self, key_space_id: int) -> str:
        """What the store knows a key space by."""
        return self._core.key_space(key_space_id).fingerprint.hex()

    async def learn(self, key_space_id: int, until_s: float) -> bool:
        """Asks the store if the epoch is not known. Returns whether it is known by then."""
        if key_space_id not in self._known:
            fingerprint = self.fingerprint(key_space_id)
            learning = self._learning.get(fingerprint)
            if learning is None and fingerprint not in self._flushing:
                epoch = await _asked(self._tier, fingerprint, until_s)
                learning = self._begin_learning(fingerprint, epoch) if epoch else None
            if learning is not None:
                # The disk may hang.
                await asyncio.wait([learning], timeout=max(0.0, until_s - time.monotonic()))
        return key_space_id in self._known

    def begin_flush(self, key_space_id: int) -> None:
        """A flush begins here. `end_flush` must follow when nothing of the key space is left here:
        with a new epoch before that, blocks of before would be written under it."""
        fingerprint = self.fingerprint(key_space_id)
        self._known.pop(key_space_id, None)
        self._before.pop(fingerprint, None)
        self._unsure.discard(fingerprint)
        self._learning.pop(fingerprint, None)
        self._flushing[fingerprint] += 1

    async def end_flush(self, fingerprint: str) -> None:
        """Nothing is left here: the store is told. If it has not answered within FLUSH_WAIT_S it is
        told as soon as it does, by the next server if this one has ended. A disk on which that
        can't be noted within as long again is not waited for either."""
        raising = self._tasks.spawn(self._raise(fingerprint))
        # Not by the caller, who may give up.
        await asyncio.shield(self._tasks.spawn(self._note_if_late(fingerprint, raising)))

    async def _note_if_late(self, fingerprint: str, raising: "asyncio.Task[None]") -> None:
        await asyncio.wait([raising], timeout=FLUSH_WAIT_S)
        if not raising.done():
            log.warning(
                "tier=%s does not answer, so other nodes may find blocks of fingerprint=%s that "
                "were flushed here; it is told as soon as it answers",
                self._name,
                fingerprint,
            )
            noting = self._tasks.spawn(self._note_untold(fingerprint))
            await asyncio.wait([noting], timeout=FLUSH_WAIT_S)

    async def _note_untold(self, fingerprint: str) -> None:
        self._notes.add_untold(self._name, fingerprint)
        await self._save("a flush is forgotten if the server ends before a store has answered")

    async def _save(self, else_what: str) -> None:
        # One at a time: all but the first of those that wait find nothing to save.
        async with self._saving:
            try:
                await asyncio.wrap_future(self._clerk.do(self._notes.save))
            except OSError as error:
                log.error("epochs not written down, so %s: %s", else_what, error)

    async def _raise(self, fingerprint: str, *, is_late: bool = False) -> None:
        """Tells the store of a flush. `is_late`: blocks may have been stored here since."""
        began_s = time.monotonic()
        while (epoch := await _raised(self._tier, fingerprint)) is None:
            await self._note_untold(fingerprint)
            if self._tasks.is_closing:
                return
            is_late = True
            await asyncio.sleep(RETRY_S)
        is_late |= time.monotonic() > began_s + FLUSH_WAIT_S
        number, noted = self._number(fingerprint), self._notes.epochs(self._name).get(fingerprint)
        expected = max(noted or UNSURE, self._met.get(fingerprint, NO_EPOCH)) + 1
        if is_late and number and noted is not None and epoch != expected:
            # Another node has flushed in between, which was not heard of here.
            await self._flush(number)
        await self._settle(fingerprint, epoch)

    async def _poll(self) -> None:
        async for _ in self._tasks.turns(f"the epochs of {self._name}", POLL_S):
            self._forget_gone()
            for key_space_id in self._used() if self._breaker.lets_pass else ():
                if key_space_id not in self._core.key_spaces:
                    continue
                fingerprint = self.fingerprint(key_space_id)
                known = self._known.get(key_space_id)
                epoch = await _asked(self._tier, fingerprint, time.monotonic() + POLL_S)
                if epoch is None or self._known.get(key_space_id) != known:
                    continue
                if known is not None:
                    self._hear(fingerprint, epoch)
                elif epoch != NO_EPOCH:
                    self._begin_learning(fingerprint, epoch)

    def _used(self) -> list[int]:
        """Key spaces that sessions have, and those of which an earlier server has left blocks."""
        used = {one.key_space_id for one in self._core.sessions.records.values()}
        left = {self._number(fingerprint) for fingerprint in self._before} - {0}
        return [*sorted(used)[:MAX_POLLED], *sorted(left - used)[:MAX_POLLED]]

    def _number(self, fingerprint: str) -> int:
        """The key space's number here; 0 if it is not known here."""
        return self._core.catalog.number(bytes.fromhex(fingerprint))

    def _forget_gone(self) -> None:
        """Forgets key spaces that the core has forgotten."""
        for key_space_id in self._known.keys() - self._core.key_spaces.keys():
            del self._known[key_space_id]
        for fingerprint in [name for name in self._before if not self._number(name)]:
            del self._before[fingerprint]

    def _begin_learning(self, fingerprint: str, epoch: int) -> "asyncio.Task[None] | None":
        """This is the epoch in the store, of a key space whose epoch was not known here when the
        store was asked. Returns who writes it down, or an epoch that was met before."""
        number, before = self._number(fingerprint), self._before.get(fingerprint)
        if fingerprint in self._flushing or not number or number in self._known:
            return None
        if fingerprint not in self._learning:
            # Another node may have flushed since blocks were stored here.
            is_first = before is None and fingerprint not in self._unsure
            is_late = is_first and may_be_raised(epoch) and self._core.catalog.has_blocks(number)
            if is_late or before not in (None, epoch):
                self._begin_following(number, epoch)
                return None
            self._learning[fingerprint] = self._tasks.spawn(self._learn(fingerprint, epoch))
        return self._learning[fingerprint]

    async def _learn(self, fingerprint: str, epoch: int) -> None:
        self._notes.keep(self._name, set(map(self.fingerprint, self._core.key_spaces)))
        self._notes.settle(self._name, fingerprint, epoch, is_mixed=fingerprint in self._unsure)
        try:
            await self._save("the next server flushes what this one leaves")
        finally:
            counts = self._learning.get(fingerprint) is asyncio.current_task()
            if counts:
                del self._learning[fingerprint]
        if counts and (number := self._number(fingerprint)):
            self._before.pop(fingerprint, None)
            self._known[number] = epoch

    def _hear(self, fingerprint: str, epoch: int) -> None:
        """This is the epoch in the store. If it is another than ours, another node has flushed, or
        the store has lost what it had."""
        number = self._number(fingerprint)
        if self._known.get(number, epoch) != epoch:
            self._begin_following(number, epoch)

    def _begin_following(self, key_space_id: int, epoch: int) -> None:
        log.info(
            "tier=%s has a new epoch, so key_space=%d is flushed here", self._name, key_space_id
        )
        self.begin_flush(key_space_id)
        self._tasks.spawn(self._follow(key_space_id, self.fingerprint(key_space_id), epoch))

    async def _follow(self, key_space_id: int, fingerprint: str, epoch: int) -> None:
        await self._flush(key_space_id)
        await self._settle(fingerprint, epoch)

    async def _settle(self, fingerprint: str, epoch: int) -> None:
        """A flush has ended, with this epoch in the store. It counts if no other one is under
        way."""
        self._met[fingerprint] = epoch
        if self._flushing[fingerprint] == 1:
            self._notes.settle(self._name, fingerprint, epoch)
            await self._save("the next server flushes what this one leaves")
        self._flushing[fingerprint] -= 1
        if self._flushing[fingerprint]:
            return
        del self._flushing[fingerprint]
        epoch, number = self._met.pop(fingerprint), self._number(fingerprint)
        if epoch != NO_EPOCH and number:
            self._known[number] = epoch


async def _asked(tier: SharedTier, fingerprint: str, until_s: float) -> int | None:
    """The epoch in the store; None if it has not answered by then."""
    ended: asyncio.Future[tuple[int | None]] = future()
    tier.epoch(fingerprint, until_s, on_loop(ended))
    await asyncio.wait([ended], timeout=max(0.0, until_s - time.monotonic()))
    return ended.result()[0] if ended.done() else None


async def _raised(tier: SharedTier, fingerprint: str) -> int | None:
    """The epoch in the store after it was raised; None if it was not."""
    ended: asyncio.Future[tuple[int | None]] = future()
    tier.raise_epoch(fingerprint, on_loop(ended))
    return (await ended)[0]
