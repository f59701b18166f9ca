"""Performs actions: finds their blocks, retains, demotes or prefetches them, settles outcomes.

Always true: blocks that other sessions or recent requests may use again are not demoted. A
tenant's prefetches stay within their share of the arena. Event loop only, in slices.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_proto.errors import HotKVError
from hotkv_proto.hints import Action, ActionType, Status, Target
from hotkv_proto.table import Words
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import HashList
from hotkv_server.hints.book import actions as hint_actions
from hotkv_server.hints.book.actions import Done
from hotkv_server.hints.book.outcomes import HintOutcome, TenantHints
from hotkv_server.node.capability import BlocksBelow
from hotkv_server.node.event_loop import Breaks, in_slices
from hotkv_server.node.removals import Effects

PREFETCH_SHARE = 1 / 16
"""Of the arena, for what a tenant's prefetches are fetching."""
PREFETCH_BLOCKS = 256
"""Hash blocks per part; parts are fetched from the prompt's first block on."""
PREFETCH_PAUSE_S = 0.05
"""Before it looks again for room within PREFETCH_SHARE."""
BLOCKS_PER_ACTION = 4096
"""Hash blocks that cost the tenant's budget one more action."""
MAX_PREFETCHES = 64
"""Of a tenant, at a time."""
Spawn = Callable[[Coroutine[Any, Any, None]], None]
"""Starts a coroutine in the background."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """An action applies to `hashes[start:stop]`.

    hashes: one per `hash_block_tokens`, from the first token on, uint32 words [n, 8].
    """

    key_space_id: int
    hashes: Words
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Origin:
    """Tenant that sent hints, and the request that brought them, if any.

    hashes: of hash blocks, words [n, 8]; None without a request.
    session_id: empty without a session.
    noted: with which the request's use of its blocks was already recorded.
    """

    tenant: str
    key_space_id: int = 0
    hashes: Words | None = None
    session_id: str = ""
    noted: Retention = NO_RETENTION
    is_running: bool = False


class HintedBlocks:
    """Finds and processes the blocks of actions, in slices of time."""

    def __init__(self, core: CacheCore, effects: Effects) -> None:
        self.core = core
        self._effects = effects

    def prompts(self, tenant: TenantHints, origin: Origin, target: Target) -> list[Prompt]:
        """The latest prompts of the target's session, one per key space, or the request's if it
        names none. Forgotten key spaces are skipped."""
        chains: list[tuple[int, Words]] = []
        if target.session_id:
            session = tenant.sessions.get(target.session_id)
            chains = list(session.chains.items()) if session is not None else []
        elif origin.hashes is not None:
            chains = [(origin.key_space_id, origin.hashes)]
        found = []
        for number, hashes in chains:
            try:
                step = self.core.key_space(number).hash_block_tokens
            except HotKVError:
                continue
            start = target.start_tokens // step
            end = target.end_tokens
            stop = len(hashes) if end is None else min(len(hashes), -(-end // step))
            if start < stop:
                found.append(Prompt(number, hashes, start, stop))
        return found

    def lists(self, prompt: Prompt, *, whole: bool = False) -> list[HashList]:
        """Blocks of the range by group.

        whole: begin at the first position where blocks of all groups begin. False includes
            blocks that only end in the range.
        """
        space = self.core.key_space(prompt.key_space_id)
        start = prompt.start
        if whole:
            step = max(group.block_tokens for group in space.groups) // space.hash_block_tokens
            start = -(-start // step) * step
        return hint_actions.lists_of(space, prompt.hashes, start, prompt.stop)

    async def run(self, parts: hint_actions.Parts) -> Done:
        return await in_slices(parts, self._effects.run)

    async def count(self, prompts: list[Prompt]) -> Done:
        """`num_done`: ready in host memory."""
        done, breaks = Done(), Breaks()
        for one in prompts:
            for listed in self.lists(one):
                done.num_blocks += len(listed.hashes)
                for start in range(0, len(listed.hashes), hint_actions.BLOCKS):
                    done.num_done += hint_actions.num_ready(
                        self.core, one.key_space_id, listed, start
                    )
                    await breaks.between()
        return done


class HintWork:
    """Performs actions and settles their outcomes.

    below: None without a tier below host memory.
    spawn: its work is cancelled when the node closes.
    """

    def __init__(
        self, core: CacheCore, below: BlocksBelow | None, effects: Effects, spawn: Spawn
    ) -> None:
        self._core = core
        self._below = below
        self._spawn = spawn
        self.blocks = HintedBlocks(core, effects)

    async def do(
        self, tenant: TenantHints, origin: Origin, action: Action, outcome: HintOutcome
    ) -> None:
        target = Target(outcome.session_id, action.target.start_tokens, action.target.end_tokens)
        prompts = self.blocks.prompts(tenant, origin, target)
        if not prompts:
            tenant.settle(outcome, Status.MISSING, _why_none(tenant, origin, target))
            return
        num_blocks = sum(one.stop - one.start for one in prompts)
        if not tenant.may_act(time.monotonic(), num_blocks / BLOCKS_PER_ACTION):
            tenant.settle(outcome, Status.REJECTED, "too many blocks in this tenant's actions")
            return
        match action.kind:
            case ActionType.RETAIN | ActionType.PIN:
                await self._keep(tenant, origin, action, outcome, prompts)
            case ActionType.DEMOTE | ActionType.RELEASE:
                await self._give_up(tenant, origin, action, outcome, prompts)
            case ActionType.PREFETCH:
                await self._begin_prefetch(tenant, action, outcome, prompts)
        for one in prompts:
            tenant.track(outcome, one.key_space_id, one.hashes, one.start, one.stop)

    async def _keep(
        self,
        tenant: TenantHints,
        origin: Origin,
        action: Action,
        outcome: HintOutcome,
        prompts: list[Prompt],
    ) -> None:
        noted, asked = origin.noted, action.retention
        is_noted = not outcome.session_id and noted != NO_RETENTION
        is_noted &= noted.priority >= asked.priority and noted.ttl_s >= asked.ttl_s
        outcome.num_blocks = outcome.num_done = lacking = 0
        for one in prompts:
            lists = self.blocks.lists(one)
            done = await self.blocks.run(
                hint_actions.keep(
                    self._core, one.key_space_id, lists, action.retention, outcome.came_s,
                    time.monotonic(), is_use=not (is_noted and action.target == Target()),
                )
            )  # fmt: skip
            _add(outcome, done)
            lacking += done.num_blocks - done.num_there
        if outcome.num_done < outcome.num_blocks - lacking:
            reason = "the share of memory for pinned blocks is full"
            status = Status.CLIPPED if outcome.num_done else Status.REJECTED
            tenant.settle(outcome, status, reason)
        elif lacking and origin.is_running and not outcome.session_id:
            reason = "blocks that are not there yet are kept when they are stored"
            tenant.settle(outcome, Status.DEFERRED, reason)
        else:
            self._settle_there(tenant, outcome, action.clipped)

    async def hold(self, origin: Origin, until_s: float) -> None:
        """The policy may hold only some. Nothing happens if the key space was forgotten."""
        assert origin.hashes is not None
        prompt = Prompt(origin.key_space_id, origin.hashes, 0, len(origin.hashes))
        with contextlib.suppress(HotKVError):
            lists = self.blocks.lists(prompt)
            await self.blocks.run(
                hint_actions.hold(self._core, prompt.key_space_id, lists, until_s)
            )

    def _settle_there(self, tenant: TenantHints, outcome: HintOutcome, clipped: str) -> None:
        """Settles an action done for all blocks in host memory. `clipped`: why less was done
        than asked, or empty."""
        if not outcome.num_done:
            tenant.settle(outcome, Status.MISSING, "none of the blocks is in host memory")
        elif outcome.num_done < outcome.num_blocks:
            reason = f"{outcome.num_blocks - outcome.num_done} of the blocks are not there"
            tenant.settle(outcome, Status.CLIPPED, "; ".join(filter(None, (clipped, reason))))
        else:
            tenant.settle(outcome, Status.CLIPPED if clipped else Status.ACCEPTED, clipped)

    async def _give_up(
        self,
        tenant: TenantHints,
        origin: Origin,
        action: Action,
        outcome: HintOutcome,
        prompts: list[Prompt],
    ) -> None:
        num_shared, own = 0, outcome.session_id or origin.session_id
        for one in prompts:
            shared = tenant.sessions.shared_blocks(
                one.key_space_id, one.hashes, own, outcome.came_s
            )
            start = max(one.start, shared)
            num_shared += start - one.start if start < one.stop else one.stop - one.start
            if start < one.stop:
                cut = Prompt(one.key_space_id, one.hashes, start, one.stop)
                lists = self.blocks.lists(cut, whole=True)
                _add(
                    outcome,
                    await self.blocks.run(
                        hint_actions.demote(self._core, one.key_space_id, lists, outcome.came_s)
                    ),
                )
        if action.kind is ActionType.RELEASE and outcome.session_id:
            tenant.sessions.end(outcome.session_id)
        if num_shared:
            reason = f"{num_shared} blocks are kept, which others share"
            tenant.settle(outcome, Status.CLIPPED, reason)
        else:
            self._settle_there(tenant, outcome, action.clipped)

    async def _begin_prefetch(
        self, tenant: TenantHints, action: Action, outcome: HintOutcome, prompts: list[Prompt]
    ) -> None:
        _add(outcome, await self.blocks.count(prompts))
        if outcome.num_done == outcome.num_blocks:
            tenant.settle(outcome, Status.ACCEPTED, "all blocks are in host memory")
        elif self._below is None or not self._below.names:
            self._settle_there(tenant, outcome, "there is no tier below host memory")
        elif tenant.num_prefetches >= MAX_PREFETCHES:
            tenant.settle(outcome, Status.REJECTED, "too many prefetches of this tenant")
        else:
            tenant.num_prefetches += 1
            tenant.settle(outcome, Status.DEFERRED, "blocks are being brought in")
            self._spawn(self._prefetch(tenant, action, outcome, prompts))

    async def _prefetch(
        self, tenant: TenantHints, action: Action, outcome: HintOutcome, prompts: list[Prompt]
    ) -> None:
        until_s, breaks = outcome.came_s + action.deadline_s, Breaks()
        try:
            for one in prompts:
                for start in range(one.start, one.stop, PREFETCH_BLOCKS):
                    part = Prompt(
                        one.key_space_id,
                        one.hashes,
                        start,
                        min(start + PREFETCH_BLOCKS, one.stop),
                    )
                    await self._prefetch_part(tenant, part, until_s)
                    await breaks.between()
            found = await self.blocks.count(prompts)
            outcome.num_blocks, outcome.num_done = found.num_blocks, found.num_done
        except HotKVError as error:
            tenant.settle(outcome, Status.MISSING, error.message)
            return
        finally:
            tenant.num_prefetches -= 1
        late = "" if time.monotonic() < until_s else "the deadline has passed"
        if late and outcome.num_done < outcome.num_blocks:
            status = Status.CLIPPED if outcome.num_done else Status.REJECTED
            tenant.settle(outcome, status, late)
        else:
            self._settle_there(tenant, outcome, action.clipped)

    async def _prefetch_part(self, tenant: TenantHints, part: Prompt, until_s: float) -> None:
        assert self._below is not None
        lists = self.blocks.lists(part)
        groups = self._core.key_space(part.key_space_id).groups
        num_bytes = sum(len(one.hashes) * groups[one.group_index].slot_bytes for one in lists)
        bound_bytes = int(PREFETCH_SHARE * self._core.config.arena_bytes)
        while tenant.prefetch_bytes and tenant.prefetch_bytes + num_bytes > bound_bytes:
            if time.monotonic() >= until_s:
                return
            await asyncio.sleep(PREFETCH_PAUSE_S)
        tenant.prefetch_bytes += num_bytes
        try:
            await self._below.prefetch(part.key_space_id, lists, until_s)
        finally:
            tenant.prefetch_bytes -= num_bytes


def _add(outcome: HintOutcome, done: Done) -> None:
    outcome.num_blocks += done.num_blocks
    outcome.num_done += done.num_done


def _why_none(tenant: TenantHints, origin: Origin, target: Target) -> str:
    if target.session_id and tenant.sessions.get(target.session_id) is None:
        return "there is no session of this name"
    if not target.session_id and origin.hashes is None:
        return "the action names no session, and came without a request"
    if target.start_tokens or target.end_tokens is not None:
        return "the range begins behind the last whole block"
    return "the prompt is shorter than a block"
