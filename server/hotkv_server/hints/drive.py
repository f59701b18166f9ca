"""Receives hints: with a scheduled request, at its end, or without one. A session here is a
router's, unless it is a `LiveSession`.

Always true: an action that can't be done has an outcome with a reason. A tenant acts within its
budget and on its own key spaces only; another tenant's session is as good as none. Event loop
only.
"""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from hotkv_proto.errors import HotKVError
from hotkv_proto.hints import NO_HINTS, Action, ActionType, Hints, Rejection, Status
from hotkv_server.cache.core import CacheCore
from hotkv_server.hints.book.outcomes import HintBook, HintOutcome, TenantHints
from hotkv_server.hints.book.sessions import HintSessions, SessionReceipt
from hotkv_server.hints.work import HintWork, Origin
from hotkv_server.node.capability import BlocksBelow
from hotkv_server.node.event_loop import Breaks
from hotkv_server.node.removals import Effects

END_DELAY_S = 1.0
"""From a request's end to its deferred actions: its last blocks are stored meanwhile."""
MAX_WAITING_BYTES = 32 << 20
"""Hashes of ended requests that wait for END_DELAY_S or `HintWork.hold`, over all tenants.
Beyond that, deferred actions are rejected."""
GIVING_UP = (ActionType.DEMOTE, ActionType.RELEASE)
"""After these, the action's blocks are evicted before others."""
BYTES_OF_ENDED = 8 << 10
"""Of a waiting ended request, besides its hashes."""


class HintDesk:
    """Receives hints and records their outcomes.

    num_actions: since the start, by the first status of their outcome.
    """

    def __init__(self, core: CacheCore, below: BlocksBelow | None, effects: Effects) -> None:
        self._core = core
        self._work = HintWork(core, below, effects, self._spawn)
        self.book = HintBook()
        self.num_actions: dict[Status, int] = dict.fromkeys(Status, 0)
        self._tasks: set[asyncio.Task[None]] = set()
        self._tried: set[int] = set()
        self._waiting_bytes = 0

    def __repr__(self) -> str:
        return f"HintDesk({self.book!r}, {len(self._tasks)} under way)"

    async def close(self) -> None:
        """Cancels background actions and waits for them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Events

    def scheduled(
        self,
        origin: Origin,
        receipt: SessionReceipt,
        tokens_per_s: float,
        hints: Hints = NO_HINTS,
    ) -> None:
        """Records a request's prompt and hits, also as reuse for earlier actions. Ignores tenants
        whose routers never named a session or sent hints.

        tokens_per_s: the engine's prefill speed; 0 if unknown.
        """
        if origin.hashes is None or not len(origin.hashes):
            return
        now_s = time.monotonic()
        if origin.session_id or hints:
            tenant = self.book.tenant(origin.tenant, now_s)
        elif (known := self.book.known(origin.tenant)) is not None:
            tenant = known
        else:
            return
        block_tokens = self._core.key_space(origin.key_space_id).hash_block_tokens
        tenant.hit(
            origin.key_space_id,
            origin.hashes,
            receipt.device_hit_tokens // block_tokens,
            receipt.hit_tokens // block_tokens,
            block_tokens / tokens_per_s if tokens_per_s else 0.0,
        )
        if origin.session_id:
            tenant.sessions.use(
                origin.session_id,
                origin.key_space_id,
                origin.hashes,
                now_s,
                hints.message_id,
                receipt,
            )
        else:
            tenant.sessions.use_without(origin.key_space_id, origin.hashes, now_s)

    async def act(
        self, origin: Origin, hints: Hints, *, has_ended: bool = False
    ) -> list[HintOutcome]:
        """Outcomes so far; long actions go on in the background.

        has_ended: also performs what was deferred until the request's end.
        """
        if not hints:
            return []
        now_s = time.monotonic()
        tenant = self.book.tenant(origin.tenant, now_s)
        outcomes: list[HintOutcome] = []
        later = hints.split(origin.session_id)[1].actions if origin.is_running else ()
        breaks = Breaks()
        for action in hints.actions:
            await breaks.between()
            known = tenant.outcomes.get((hints.message_id, action.action_id))
            session_id = action.target.session_id
            if action.kind is ActionType.RELEASE:
                session_id = session_id or origin.session_id
            outcome = tenant.begin(
                HintOutcome(
                    hints.message_id, action.action_id, action.kind.value, session_id, now_s
                )
            )
            if outcome is None:
                assert known is not None, "an action that came before has an outcome"
                outcomes.append(known)
                if has_ended and _may_end(known):
                    await self._try(tenant, origin, action, known)
                continue
            if not tenant.may_act(now_s):
                tenant.settle(outcome, Status.REJECTED, "too many actions of this tenant")
            elif action in later:
                tenant.settle(outcome, Status.DEFERRED, "it waits for the end of its request")
            else:
                await self._try(tenant, origin, action, outcome)
            self.num_actions[outcome.status] += 1
            outcomes.append(outcome)
        # Last, so that a rejection never replaces the outcome of an action with the same id.
        return [self._reject(tenant, hints, one, now_s) for one in hints.rejected] + outcomes

    async def _try(
        self, tenant: TenantHints, origin: Origin, action: Action, outcome: HintOutcome
    ) -> None:
        if id(outcome) in self._tried:
            return
        self._tried.add(id(outcome))
        try:
            await self._work.do(tenant, origin, action, outcome)
        except HotKVError as error:
            # The key space was forgotten during the action.
            tenant.settle(outcome, Status.MISSING, error.message)
        finally:
            self._tried.discard(id(outcome))

    def ended(self, origin: Origin, hints: Hints) -> None:
        """Records the prompt, holds the session's blocks, and schedules the deferred actions for
        END_DELAY_S later."""
        assert origin.hashes is not None, "a request has hashes"
        now_s = time.monotonic()
        if origin.session_id and len(origin.hashes):
            sessions = self.book.tenant(origin.tenant, now_s).sessions
            sessions.use(
                origin.session_id, origin.key_space_id, origin.hashes, now_s, hints.message_id
            )
            self._hold(sessions, origin, hints, now_s)
        if not hints:
            return
        num_bytes = origin.hashes.nbytes + BYTES_OF_ENDED
        if self._waiting_bytes + num_bytes > MAX_WAITING_BYTES:
            tenant = self.book.tenant(origin.tenant, now_s)
            for one in tenant.outcomes.values():
                if one.message_id == hints.message_id and _may_end(one):
                    tenant.settle(one, Status.REJECTED, "too many requests have ended")
            return
        self._spawn(self._end_later(origin, hints, now_s), num_bytes)

    def _hold(self, sessions: HintSessions, origin: Origin, hints: Hints, now_s: float) -> None:
        """Asks the eviction policy to hold the session's blocks for HELD_GAPS times its expected
        pause.

        Not if the hints give the blocks up, if too many hashes wait, or if tenants have shares
        of the arena: blocks held for one tenant could make the server refuse another's.
        """
        session = sessions.get(origin.session_id)
        hold_s = sessions.returns.ended(session.gaps, now_s) if session is not None else 0.0
        if not hold_s or origin.hashes is None or self._core.space.tenants.is_used:
            return
        gives_up = any(one.kind in GIVING_UP for one in hints.actions)
        num_bytes = origin.hashes.nbytes + BYTES_OF_ENDED
        if not gives_up and self._waiting_bytes + num_bytes <= MAX_WAITING_BYTES:
            self._spawn(self._work.hold(origin, now_s + hold_s), num_bytes)

    async def _end_later(self, origin: Origin, hints: Hints, came_s: float) -> None:
        await asyncio.sleep(END_DELAY_S)
        tenant = self.book.tenant(origin.tenant, time.monotonic())
        session = tenant.sessions.get(origin.session_id)
        if session is not None and session.used_beside_s(hints.message_id) > came_s:
            for one in tenant.outcomes.values():
                is_release = one.kind == ActionType.RELEASE.value
                if is_release and one.message_id == hints.message_id and _may_end(one):
                    tenant.settle(one, Status.REJECTED, "the session has gone on")
            # `act` skips a settled action. Hints without a message id have no such outcome, so
            # remove their releases here.
            others = tuple(one for one in hints.actions if one.kind is not ActionType.RELEASE)
            hints = replace(hints, actions=others)
        await self.act(origin, hints, has_ended=True)

    def _spawn(self, work: Coroutine[Any, Any, None], num_bytes: int = 0) -> None:
        self._waiting_bytes += num_bytes
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._is_done(task, num_bytes))

    def _is_done(self, task: "asyncio.Task[None]", num_bytes: int) -> None:
        self._tasks.discard(task)
        self._waiting_bytes -= num_bytes
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a hint broke", "exception": error}
            )

    def _reject(
        self, tenant: TenantHints, hints: Hints, one: Rejection, now_s: float
    ) -> HintOutcome:
        outcome = HintOutcome(hints.message_id, one.action_id, one.kind, "", now_s)
        if tenant.begin(outcome) is None:
            return tenant.outcomes[hints.message_id, one.action_id]
        tenant.settle(outcome, Status.REJECTED, one.reason)
        self.num_actions[Status.REJECTED] += 1
        return outcome


def _may_end(outcome: HintOutcome) -> bool:
    """Whether the action waits for its request's end; prefetches don't."""
    return outcome.status is Status.DEFERRED and outcome.kind != ActionType.PREFETCH.value
