"""Both caches have lost different blocks, unnoticed. Hits: at most what both serve together, at
least what the better serves."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_group_id, make_block_hash_with_group_id
from vllm.v1.request import Request

from tests.doubles.fake import FakeServer
from tests.vllm.harness import Engine, prompt
from tests.vllm.oracle import answer_of, audit
from tests.vllm.specs import HYBRIDS, full_model, mixed_model

LENGTH = 420
Readable = Callable[[int, bytes], bool]
"""Asks for a vLLM group and a hash."""
MODELS = pytest.mark.parametrize("model", [full_model, mixed_model, *HYBRIDS])


def on_device(one: Engine) -> Readable:
    cached: Any = one.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
    return lambda group, block_hash: (
        cached.get_one_block(make_block_hash_with_group_id(block_hash, group)) is not None
    )


def on_host(one: Engine, server: FakeServer) -> Readable:
    scheduler = one.connector._scheduler
    fingerprint = scheduler.cache.session.config.key_space.fingerprint
    index_of = {group.vllm_group: index for index, group in enumerate(scheduler.cache.cache_groups)}
    return lambda group, block_hash: server.ready(fingerprint, index_of[group], block_hash)


def longest(one: Engine, request: Request, is_readable: Readable) -> int:
    """Tries each length, without hotkv's or vLLM's rules."""
    alignment = one.connector._scheduler.cache.finder.groups.alignment_tokens
    for end in range((request.num_tokens - 1) // alignment * alignment, 0, -alignment):
        if all(is_readable(group, block_hash) for group, block_hash in read_at(one, request, end)):
            return end
    return 0


def read_at(one: Engine, request: Request, end: int) -> list[tuple[int, bytes]]:
    """Blocks that attention reads, as (group, hash)."""
    found = []
    for index, group in enumerate(one.kv_config.kv_cache_groups):
        spec: Any = group.kv_cache_spec
        window = getattr(spec, "sliding_window", None)
        chunk = getattr(spec, "attention_chunk_size", None)
        first = max(0, end - (window - 1)) if window else end // chunk * chunk if chunk else 0
        scale = spec.block_size // one.hash_block_tokens
        for block in range(first // spec.block_size, -(-end // spec.block_size)):
            found.append((index, request.block_hashes[(block + 1) * scale - 1]))
    return found


def chosen(dice: random.Random, keys: list[Any]) -> list[Any]:
    """Nothing, all, a first or last part, or a sample."""
    cut = dice.randrange(len(keys) + 1)
    return dice.choice([[], [], keys, keys[:cut], keys[cut:], dice.sample(keys, cut)])


def forget(
    dice: random.Random, one: Engine, server: FakeServer, *, device: bool, host: bool
) -> None:
    pool = one.scheduler.kv_cache_manager.block_pool
    for group in range(len(one.kv_config.kv_cache_groups)):
        if device:
            cached = pool.cached_block_hash_to_block._cache.items()
            mine = [found for key, found in cached if get_group_id(key) == group]
            evicted: set[int] = set()
            for found in chosen(dice, mine):
                evicted.update([found.block_id] if isinstance(found, KVCacheBlock) else found)
            pool.evict_blocks(evicted)
        if host:
            for key in chosen(dice, [key for key in server.blocks if key[1] == group]):
                del server.blocks[key]


@pytest.mark.parametrize(
    "pipelined",
    [pytest.param(False, id="sync", marks=pytest.mark.long), pytest.param(True, id="async")],
)
@MODELS
def test_hits_are_what_both_caches_give_together(
    engine: Any, server: FakeServer, model: Any, pipelined: bool
) -> None:
    dice = random.Random(f"{model.__name__}{pipelined}")
    one = engine(specs=model(), pipelined=pipelined, blocks=128, max_tokens_per_step=192)
    num_joined = num_external = 0
    for turn in range(40):
        family, name = dice.randrange(2), f"r{turn}"
        tokens = prompt(family, dice.randrange(40, LENGTH))
        tokens += [dice.randrange(3, 9)] * dice.randrange(3)
        if turn % 4 == 3:
            # So that the device's hit is shorter than the host's.
            one.drop_local()
            one.generate(f"short{turn}", prompt(family, dice.randrange(20, len(tokens))))
        one.add(name, tokens, dice.choice((1, 1, 30)))
        request, count = one.requests[name], one.requests[name].max_tokens
        device, host = on_device(one), on_host(one, server)
        most = longest(one, request, lambda *key: device(*key) or host(*key))  # noqa: B023
        least = max(longest(one, request, host), longest(one, request, device))
        one.run()
        local, external = one.local[name], one.external[name]
        assert one.outputs[name] == answer_of(tokens, count)
        assert least <= local + external <= most, f"{name}: {local} + {external} tokens"
        num_external += external > 0
        num_joined += local > 0 and external > 0
        one.generate(f"end{turn}", prompt(9, 10), 1)
        audit(server, [one])
        forget(dice, one, server, device=True, host=turn % 3 == 2)
    assert num_external > 4 and num_joined, (num_external, num_joined)
    assert not {"failed_loads", "callback_errors"} & one.counters.keys() and not server.leases
