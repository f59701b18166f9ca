"""Answers `/api/v1/savings`: while the node rests, with the latest answer and its age.

Always true: the node computes one answer at a time and then rests, so that all of them together
take about RESTING_SHARE of its loop's time, however many ask and for whatever windows. On the loop
of HTTP only.
"""

import asyncio
import dataclasses
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from hotkv_server.node.topics import Figures
from hotkv_server.told.pages.replies import Reply

RESTING_SHARE = 0.05
MAX_REST_S = 5.0
"""Longest rest after an answer, however long a busy node took for it."""
MAX_SINCE_S = 8 * 86_400.0
"""The ledger looks back no further, but for all that it has."""
MAX_KEPT = 32
"""Most answers that are kept: by window, with names and without."""


@dataclass(frozen=True, slots=True)
class _Made:
    reply: Reply
    made_s: float

    def at(self, now_s: float) -> Reply:
        """The answer with its age in whole seconds, as HTTP has it."""
        headers = {**self.reply.headers, "Age": str(int(now_s - self.made_s))}
        return dataclasses.replace(self.reply, headers=headers)


class SavingsPage:
    """See the module. `read(since_s, has_names)` asks the node."""

    def __init__(
        self,
        read: Callable[[float, bool], Awaitable[Figures]],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._read, self._clock, self._sleep = read, clock, sleep
        self._turn = asyncio.Lock()
        self._rests_until_s = float("-inf")
        self._made: OrderedDict[tuple[int, bool], _Made] = OrderedDict()
        self._making: dict[tuple[int, bool], asyncio.Task[_Made]] = {}

    def __repr__(self) -> str:
        return f"SavingsPage({len(self._made)} answers, {len(self._making)} in the making)"

    async def reply(self, since_s: float, *, has_names: bool) -> Reply:
        """The answer for the last `since_s` seconds; 0 for all. Has it computed anew, each window
        in its turn. Waits for that if the node does not rest, or if there is no answer for this
        window yet. Raises whatever the node raises."""
        asked = 60 * math.ceil(min(since_s, MAX_SINCE_S) / 60), has_names
        is_resting = self._turn.locked() or self._clock() < self._rests_until_s
        task = self._making.get(asked)
        if task is None:
            task = self._making[asked] = asyncio.create_task(self._make(*asked))
        latest = self._made.get(asked)
        if latest is None or not is_resting:
            latest = await asyncio.shield(task)
        return latest.at(self._clock())

    async def _make(self, since_s: int, has_names: bool) -> _Made:
        asked = since_s, has_names
        try:
            async with self._turn:
                await self._sleep(max(0.0, self._rests_until_s - self._clock()))
                begun_s = self._clock()
                try:
                    figures = await self._read(float(since_s), has_names)
                finally:
                    now_s = self._clock()
                    rest_s = (now_s - begun_s) * (1 / RESTING_SHARE - 1)
                    self._rests_until_s = now_s + min(rest_s, MAX_REST_S)
        finally:
            del self._making[asked]
        made = self._made[asked] = _Made(Reply.json(figures), now_s)
        self._made.move_to_end(asked)
        while len(self._made) > MAX_KEPT:
            self._made.popitem(last=False)
        return made
