"""Performs the actions of hints: finds an action's blocks, then retains, demotes or prefetches
them, and sets the action's outcome.

Always true: blocks that other sessions (of a router, such as users' conversations) or recent
requests may use again are not demoted. A tenant's prefetches stay within their share of the arena.
Use on the event loop only; long work runs in slices, between which other tasks run. An `Origin`
names the tenant that sent the hints, and the request that brought them.
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
"""Largest share of the arena for the blocks that a tenant's prefetches are fetching."""
PREFETCH_BLOCKS = 256
"""Number of hash blocks (ranges of `hash_block_tokens` tokens) in each part of a prefetch. A
prefetch fetches a prompt part by part, from the first block on."""
PREFETCH_PAUSE_S = 0.05
"""Pause before a prefetch checks again whether there is room within PREFETCH_SHARE, in seconds."""
BLOCKS_PER_ACTION = 4096
"""Number of hash blocks (ranges of `hash_block_tokens` tokens) that cost as much as an action. An
action on n hash blocks takes n / BLOCKS_PER_ACTION actions from the tenant's budget, in addition to
itself."""
MAX_PREFETCHES = 64
"""Most prefetches that a tenant may run at the same time."""
Spawn = Callable[[Coroutine[Any, Any, None]], None]
"""A function that starts a coroutine in the background."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to which an action applies, as the hashes of its blocks.

    hashes: uint32 [n, 8], a hash for each `hash_block_tokens` tokens, from the first token on.
    start, stop: the action applies to `hashes[start:stop]`.
    """

    key_space_id: int
    hashes: Words
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of hints: a tenant, and a request if the hints came with a request.

    hashes: hashes of the request's hash blocks, uint32 words [n, 8]; None without a request.
    session_id: the router's session that the request names; empty without a session.
    noted: the retention (priority, time to live, pin) with which the request's use of its blocks
        was already recorded.
    is_running: True if the request has not ended.
    """

    tenant: str
    key_space_id: int = 0
    hashes: Words | None = None
    session_id: str = ""
    noted: Retention = NO_RETENTION
    is_running: bool = False


class HintedBlocks:
    """Finds the blocks to which actions of hints apply, and performs these actions in slices of
    time."""

    def __init__(self, core: CacheCore, effects: Effects) -> None:
        self.core = core
        self._effects = effects

    def prompts(self, tenant: TenantHints, origin: Origin, target: Target) -> list[Prompt]:
        """Returns the prompts to which an action applies, each with the range of its hashes to
        which it applies. These are the latest prompts of the session that `target` names (one for
        each key space), or the prompt of the hints' request if `target` names no session. Skips key
        spaces that the server does not know any more."""
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
        """Returns the blocks in a prompt's range, by group.

        whole: False includes blocks that begin before the range and end in it (blocks of different
            groups have different sizes). True leaves them out: the result begins at the first
            position in the range at which blocks of all groups begin.
        """
        space = self.core.key_space(prompt.key_space_id)
        start = prompt.start
        if whole:
            step = max(group.block_tokens for group in space.groups) // space.hash_block_tokens
            start = -(-start // step) * step
        return hint_actions.lists_of(space, prompt.hashes, start, prompt.stop)

    async def run(self, parts: hint_actions.Parts) -> Done:
        """Performs the action of a hint in slices of time, and returns its result. Other tasks run
        between the slices."""
        return await in_slices(parts, self._effects.run)

    async def count(self, prompts: list[Prompt]) -> Done:
        """Counts the blocks of prompts (`num_blocks` of the result), and how many of them are ready
        in host memory (`num_done`). Other tasks run between parts of the work."""
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
    """Performs the actions that hints of routers request: retains, pins, demotes, releases or
    prefetches blocks (see the module).

    below: fetches blocks from tiers below host memory; None if there is no tier.
    spawn: starts background work, which is cancelled when the node closes.
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
        """Asks the eviction policy to keep the blocks of an ended request until `until_s`. The
        policy may keep only some of them. Does nothing if the key space (a model in a
        configuration) has been forgotten."""
        assert origin.hashes is not None
        prompt = Prompt(origin.key_space_id, origin.hashes, 0, len(origin.hashes))
        with contextlib.suppress(HotKVError):
            lists = self.blocks.lists(prompt)
            await self.blocks.run(
                hint_actions.hold(self._core, prompt.key_space_id, lists, until_s)
            )

    def _settle_there(self, tenant: TenantHints, outcome: HintOutcome, clipped: str) -> None:
        """Sets the outcome of an action that was done for all of its blocks that are ready in host
        memory.

        clipped: reason why less was done than the action requested, for example with a reduced
            value; empty if there is no such reason.
        """
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
