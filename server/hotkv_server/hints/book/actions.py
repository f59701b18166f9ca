"""Performs the actions of hints on blocks. Each action is a generator, which performs one part per
step.

The module has no state. In its functions, `lists` names the blocks of an action by group
(`lists_of`). A part takes milliseconds. Between two steps other code may call the cache
core; blocks that it removes are skipped.
"""

from collections.abc import Generator
from dataclasses import dataclass, replace

import numpy as np

from hotkv_proto import table
from hotkv_proto.blocks import Retention
from hotkv_proto.groups import GroupSpec
from hotkv_proto.keys import KeySpace
from hotkv_proto.table import Words
from hotkv_server.cache.arrays import each_once
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import Cause, Entries, HashList

BLOCKS = 1 << 12
"""Most blocks that one step of an action processes. Other code may run between two steps."""


@dataclass(slots=True)
class Done:
    """The result of an action.

    num_blocks: number of blocks to which the action applies.
    num_done: number of these blocks for which the action was done.
    num_there: number of these blocks that are ready in host memory; only `keep` sets it.
    """

    num_blocks: int = 0
    num_done: int = 0
    num_there: int = 0


Parts = Generator[None, None, Done]


def lists_of(key_space: KeySpace, hashes: Words, start: int, stop: int) -> list[HashList]:
    """Returns, for each group, the blocks that contain tokens of `hashes[start:stop]`. Leaves out
    groups without such a block.

    hashes: a hash for each `hash_block_tokens` tokens of a prompt, uint32 words [n, 8]. If a
        group's block spans several of these hashes, the block's hash is the last of them.
    """
    lists = []
    for index, group in enumerate(key_space.groups):
        first, end, step = _blocks(group, key_space.hash_block_tokens, start, stop, len(hashes))
        if first < end:
            chosen = hashes[(first + 1) * step - 1 : end * step : step]
            lists.append(HashList(index, np.ascontiguousarray(chosen), np.arange(first, end)))
    return lists


def _blocks(
    group: GroupSpec, hash_block_tokens: int, start: int, stop: int, num_hashes: int
) -> tuple[int, int, int]:
    step = group.block_tokens // hash_block_tokens
    return start // step, min(-(-stop // step), num_hashes // step), step


def keep(
    core: CacheCore,
    key_space_id: int,
    lists: list[HashList],
    retention: Retention,
    came_s: float,
    now_s: float,
    *,
    is_use: bool,
) -> Parts:
    """Retains the blocks of `lists` (an action's blocks, by group) with the priority and time to
    live of `retention`. If `retention.pin` is set, also pins as many of them as the budget for
    pinned blocks allows.

    came_s: when the hint arrived; the time to live is counted from then.
    is_use: True also records a use of the blocks. False: the request's use of the blocks was
        already recorded with this retention.
    """
    done = Done()
    left_s = max(0.0, came_s + retention.ttl_s - now_s) if retention.ttl_s else 0.0
    use = replace(retention, ttl_s=left_s, pin=False)
    for one in lists:
        done.num_blocks += len(one.hashes)
        starts = range(0, len(one.hashes), BLOCKS)
        # Process the parts from the end of the prompt to its beginning, so that the first blocks
        # count as the most recently used blocks.
        for start in reversed(starts) if is_use else ():
            entries, _ = _ready(core, key_space_id, one, start)
            core.space.touch(entries, now_s, use)
            yield
        for start in starts:
            entries, num_again = _ready(core, key_space_id, one, start)
            done.num_blocks -= num_again
            done.num_there += len(entries)
            num_kept = len(entries)
            if retention.pin:
                num_kept = core.retention_pins.hold(entries, came_s + retention.ttl_s)
                core.counters.held_blocks += num_kept
            done.num_done += num_kept
            yield
    return done


def demote(core: CacheCore, key_space_id: int, lists: list[HashList], now_s: float) -> Parts:
    """Demotes the blocks of `lists` (an action's blocks, by group): marks them, so that they are
    evicted before all other blocks. Of the demoted blocks, the last blocks of a prompt are evicted
    first.

    If there is a tier below host memory, evicts at once the blocks that this tier also has, and
    offers the other blocks to the tier.
    """
    done = Done()
    for one in lists:
        done.num_blocks += len(one.hashes)
        # Begin with the last blocks of the prompt, because blocks are evicted in the order in which
        # they were demoted.
        for start in reversed(range(0, len(one.hashes), BLOCKS)):
            entries, num_again = _ready(core, key_space_id, one, start)
            done.num_blocks -= num_again
            done.num_done += len(entries)
            core.retention_pins.unpin(entries)
            for below in core.below if len(entries) else ():
                core.space.removal.evict(entries[below.offer_demoted(entries)], Cause.HINT)
                entries = entries[core.space.index.is_ready(entries)]
            core.space.policy.demote(entries, core.space.index.mixed(entries), now_s)
            yield
    return done


def hold(core: CacheCore, key_space_id: int, lists: list[HashList], until_s: float) -> Parts:
    """Notifies the eviction policy that the ready blocks of `lists` (blocks by group) will probably
    be used before `until_s`. The reason: the router's session that used them (such as a user's
    conversation) is expected to send another request. Until `until_s` the policy may refuse to
    evict these blocks to make room for other blocks."""
    for one in lists:
        for start in range(0, len(one.hashes), BLOCKS):
            entries, _ = _ready(core, key_space_id, one, start)
            core.space.policy.hold(entries, until_s)
            yield
    return Done()


def num_ready(core: CacheCore, key_space_id: int, one: HashList, start: int) -> int:
    """Looks up the next BLOCKS blocks of the list `one`, from its position `start` on. Returns how
    many of them are ready in host memory. Raises UNKNOWN_KEY_SPACE."""
    entries, num_again = _ready(core, key_space_id, one, start)
    return len(entries) + num_again


def _ready(core: CacheCore, key_space_id: int, one: HashList, start: int) -> tuple[Entries, int]:
    """Looks up the next BLOCKS blocks of the list `one`, from its position `start` on. Returns two
    results: the entries of the blocks that are ready in host memory, in order and without
    duplicates, and the number of duplicates that were left out. Raises UNKNOWN_KEY_SPACE."""
    core.key_space(key_space_id)
    words = core.space.index.find(key_space_id, one.group_index, one.hashes[start : start + BLOCKS])
    named: Entries = words[table.is_ready(words)]
    entries = each_once(named)
    return entries, len(named) - len(entries)
