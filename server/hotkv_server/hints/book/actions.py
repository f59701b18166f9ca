"""Performs hints' actions as generators, one part of some ms per step.

`lists` names an action's blocks by group (`lists_of`). Between two steps other code may call the
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
"""Of one step."""


@dataclass(slots=True)
class Done:
    """What an action did.

    num_blocks: that the action applies to.
    num_there: ready in host memory; only `keep` sets it.
    """

    num_blocks: int = 0
    num_done: int = 0
    num_there: int = 0


Parts = Generator[None, None, Done]


def lists_of(key_space: KeySpace, hashes: Words, start: int, stop: int) -> list[HashList]:
    """By group, blocks that contain tokens of `hashes[start:stop]`; groups without any are left
    out.

    hashes: one per `hash_block_tokens`, words [n, 8]. A block that spans several has the last
        one's hash.
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
    """Retains the blocks; with `retention.pin` also pins what the budget allows.

    came_s: arrival of the hint, from which the time to live counts.
    is_use: False: the request's use was already recorded with this retention.
    """
    done = Done()
    left_s = max(0.0, came_s + retention.ttl_s - now_s) if retention.ttl_s else 0.0
    use = replace(retention, ttl_s=left_s, pin=False)
    for one in lists:
        done.num_blocks += len(one.hashes)
        starts = range(0, len(one.hashes), BLOCKS)
        # From the prompt's end, so that its first blocks are the most recently used.
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
    """Marks blocks for eviction before all others, the prompt's last blocks first. With a tier
    below host memory, evicts what it has too and offers it the rest."""
    done = Done()
    for one in lists:
        done.num_blocks += len(one.hashes)
        # Blocks are evicted in the order of their demotion.
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
    """Tells the policy that the blocks will probably be used before `until_s`. Until then it may
    refuse to evict them for others."""
    for one in lists:
        for start in range(0, len(one.hashes), BLOCKS):
            entries, _ = _ready(core, key_space_id, one, start)
            core.space.policy.hold(entries, until_s)
            yield
    return Done()


def num_ready(core: CacheCore, key_space_id: int, one: HashList, start: int) -> int:
    """Ready blocks among the next BLOCKS of `one` from `start`. Raises UNKNOWN_KEY_SPACE."""
    entries, num_again = _ready(core, key_space_id, one, start)
    return len(entries) + num_again


def _ready(core: CacheCore, key_space_id: int, one: HashList, start: int) -> tuple[Entries, int]:
    """Ready entries among the next BLOCKS, each once and in order, and the number of
    repetitions. Raises UNKNOWN_KEY_SPACE."""
    core.key_space(key_space_id)
    words = core.space.index.find(key_space_id, one.group_index, one.hashes[start : start + BLOCKS])
    named: Entries = words[table.is_ready(words)]
    entries = each_once(named)
    return entries, len(named) - len(entries)
