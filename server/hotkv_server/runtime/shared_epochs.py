"""The epochs of key spaces in a tier that nodes share: a flush on one node counts on all.

Always true: from the moment in which a flush begins here, until the store has raised the epoch, the
epoch of the key space is not known here; nor while what another node has flushed is still being
flushed here. On the event loop only; the tier answers on threads.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from hotkv_server.core.cache import CacheCore
from hotkv_server.runtime.breaker import Breaker
from hotkv_server.runtime.tier_tasks import TierTasks, future, on_loop
from hotkv_server.tiers.protocol import NO_EPOCH, SharedTier

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
    """See the module. `relay`: what the tier was given as `on_epoch`."""

    def __init__(
        self, core: CacheCore, tier: SharedTier, breaker: Breaker, relay: EpochRelay
    ) -> None:
        self._core = core
        self._tier = tier
        self._breaker = breaker
        self._relay = relay
        self._known: dict[int, int] = {}
        # Flushes of each key space that have begun and not ended, here and in the store.
        self._flushing: Counter[int] = Counter()

    def __repr__(self) -> str:
        return f"SharedEpochs({len(self._known)} known, {len(self._flushing)} flushing)"

    def start(self, tasks: TierTasks, flush: Flush) -> None:
        """Begins to follow what other nodes flush."""
        loop = asyncio.get_running_loop()

        def hear(fingerprint: str, epoch: int) -> None:
            try:
                loop.call_soon_threadsafe(self._hear, fingerprint, epoch, tasks, flush)
            except RuntimeError:
                # The loop has ended.
                return

        self._relay.hear = hear
        tasks.spawn(self._poll(tasks, flush))

    def get(self, key_space_id: int) -> int:
        """The epoch of a key space; NO_EPOCH if it is not known."""
        return self._known.get(key_space_id, NO_EPOCH)

    def fingerprint(self, key_space_id: int) -> str:
        """What the store knows a key space by."""
        return self._core.key_space(key_space_id).fingerprint.hex()

    async def learn(self, key_space_id: int, until_s: float) -> bool:
        """Asks the store if the epoch is not known. Returns whether it is known by then."""
        if key_space_id not in self._known and key_space_id not in self._flushing:
            epoch = await self._ask(key_space_id, until_s)
            if epoch and key_space_id not in self._flushing:
                self._known.setdefault(key_space_id, epoch)
        return key_space_id in self._known

    def begin_flush(self, key_space_id: int) -> None:
        """A flush begins here. `end_flush` must follow when nothing of the key space is left here:
        with a new epoch before that, blocks of before would be written under it."""
        self._known.pop(key_space_id, None)
        self._flushing[key_space_id] += 1

    async def end_flush(self, key_space_id: int, fingerprint: str, tasks: TierTasks) -> bool:
        """Nothing is left here: the store is told. False if it has not answered within
        FLUSH_WAIT_S; then it is told as soon as it does."""
        raising = tasks.spawn(self._raise(key_space_id, fingerprint, tasks))
        done, _ = await asyncio.wait([raising], timeout=FLUSH_WAIT_S)
        if not done:
            log.warning(
                "tier=%s does not answer, so other nodes may find blocks of key_space=%d that were "
                "flushed here; it is told as soon as it answers",
                self._tier.facts().name,
                key_space_id,
            )
        return bool(done)

    async def _raise(self, key_space_id: int, fingerprint: str, tasks: TierTasks) -> None:
        while not tasks.is_closing:
            ended: asyncio.Future[tuple[int | None]] = future()
            self._tier.raise_epoch(fingerprint, on_loop(ended))
            (epoch,) = await ended
            if epoch is not None:
                self._settle(key_space_id, epoch)
                return
            await asyncio.sleep(RETRY_S)

    async def _ask(self, key_space_id: int, until_s: float) -> int | None:
        """The epoch in the store; None if it has not answered by then."""
        ended: asyncio.Future[tuple[int | None]] = future()
        self._tier.epoch(self.fingerprint(key_space_id), until_s, on_loop(ended))
        await asyncio.wait([ended], timeout=max(0.0, until_s - time.monotonic()))
        return ended.result()[0] if ended.done() else None

    async def _poll(self, tasks: TierTasks, flush: Flush) -> None:
        async for _ in tasks.turns(POLL_S):
            for key_space_id in self._used() if self._breaker.lets_pass else ():
                if key_space_id not in self._core.key_spaces:
                    continue
                known = self._known.get(key_space_id)
                epoch = await self._ask(key_space_id, time.monotonic() + POLL_S)
                is_old = self._known.get(key_space_id) != known
                if epoch is None or is_old or key_space_id not in self._core.key_spaces:
                    continue
                if known is not None:
                    self._hear(self.fingerprint(key_space_id), epoch, tasks, flush)
                elif key_space_id not in self._flushing and epoch != NO_EPOCH:
                    self._known[key_space_id] = epoch

    def _used(self) -> list[int]:
        """Key spaces that sessions have."""
        return sorted({one.key_space_id for one in self._core.sessions.records.values()})[
            :MAX_POLLED
        ]

    def _hear(self, fingerprint: str, epoch: int, tasks: TierTasks, flush: Flush) -> None:
        """This is the epoch in the store. If it is another than ours, another node has flushed, or
        the store has lost what it had."""
        for key_space_id, known in list(self._known.items()):
            if key_space_id not in self._core.key_spaces:
                del self._known[key_space_id]
            elif epoch != known and self.fingerprint(key_space_id) == fingerprint:
                log.info(
                    "tier=%s has a new epoch, so key_space=%d is flushed here",
                    self._tier.facts().name,
                    key_space_id,
                )
                self.begin_flush(key_space_id)
                tasks.spawn(self._follow(key_space_id, epoch, flush))

    async def _follow(self, key_space_id: int, epoch: int, flush: Flush) -> None:
        await flush(key_space_id)
        self._settle(key_space_id, epoch)

    def _settle(self, key_space_id: int, epoch: int) -> None:
        """A flush has ended, with this epoch in the store. It counts if no other one is under
        way."""
        self._flushing[key_space_id] -= 1
        if self._flushing[key_space_id]:
            return
        del self._flushing[key_space_id]
        if epoch != NO_EPOCH and key_space_id in self._core.key_spaces:
            self._known[key_space_id] = epoch
