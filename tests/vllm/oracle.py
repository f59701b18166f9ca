"""Every block in the server and in vLLM's prefix caches must hold what the model computes for its
hash's tokens.

`Engine.named` knows what a hash covers, so nothing else is recorded. LoRA tests add hotkv's
hashes.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_block_hash, get_group_id
from vllm.v1.kv_cache_interface import MambaSpec

from hotkv_client.types import RequestReport
from hotkv_proto.groups import GroupKind
from hotkv_proto.keys import KeySpace
from tests.doubles.fake import FakeServer
from tests.vllm.harness import Engine, Named, _layer, _value, next_token
from tests.vllm.other_connectors import our_connector


@dataclass(frozen=True, slots=True)
class Audit:
    num_stored: int
    num_cached: int


def audit(server: FakeServer, engines: Sequence[Engine]) -> Audit:
    return Audit(check_stored(server, engines), sum(check_cached(one) for one in engines))


def check_stored(
    server: FakeServer, engines: Sequence[Engine], weights: Sequence[int] = (0,)
) -> int:
    """Returns the number of blocks, without sketches.

    weights: numbers; a key space's blocks must all be of one.
    """
    named = {block_hash: what for one in engines for block_hash, what in one.named.items()}
    weights_of: dict[bytes, int] = {}
    spaces = {
        session.config.key_space.fingerprint: session.config.key_space
        for session in server.sessions
    }
    num_heads = {
        name: getattr(group.kv_cache_spec, "num_kv_heads", 1)
        for one in engines
        for group in one.kv_config.kv_cache_groups
        for name in group.layer_names
    }
    salts = [salt for _, salt in engines[0].memories]
    num_compared = 0
    for (fingerprint, group_index, block_hash), shards in server.blocks.items():
        space: KeySpace = spaces[fingerprint]
        if group_index >= len(space.groups):
            continue
        group = space.groups[group_index]
        expected = _expected(named, block_hash, group.block_tokens)
        what = f"the server's block of group {group_index}"
        assert len(expected) == group.block_tokens, f"{what} is a part of a block"
        expected = expected[-1:] if group.kind is GroupKind.MAMBA else expected
        assert sorted(shards) == list(range(len(salts))), f"{what} has shards {sorted(shards)}"
        if fingerprint not in weights_of:
            first = np.frombuffer(shards[0], np.int16)[0] ^ _layer(group.layer_names[0]) ^ salts[0]
            weights_of[fingerprint] = int(first ^ expected[0])
            assert weights_of[fingerprint] in weights, "a key space has blocks of no weights"
        expected = expected ^ np.int16(weights_of[fingerprint])
        for shard, salt in enumerate(salts):
            pages = np.split(np.frombuffer(shards[shard], np.int16), len(group.layer_names))
            for layer, page in zip(group.layer_names, pages, strict=True):
                rows = page.reshape(num_heads[layer], len(expected), -1)
                _compare(rows, expected ^ salt, layer, f"{what}, shard {shard}")
        num_compared += 1
    return num_compared


def check_cached(one: Engine, weights: int = 0) -> int:
    assert not one.queue and not one.scheduler.requests, "the oracle compares what is at rest"
    num_compared = 0
    cached = one.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache
    for key, found in cached.items():
        group = one.kv_config.kv_cache_groups[get_group_id(key)]
        expected = _expected(one.named, get_block_hash(key), group.kv_cache_spec.block_size)
        expected = expected[-1:] if isinstance(group.kv_cache_spec, MambaSpec) else expected
        for block in [found] if isinstance(found, KVCacheBlock) else found.values():
            for layer, (tensors, salt) in itertools.product(group.layer_names, one.memories):
                rows = tensors[layer].view(torch.int16).numpy()[block.block_id][:, : len(expected)]
                what = f"vLLM's block {block.block_id} of group {get_group_id(key)}"
                _compare(rows, expected ^ salt ^ weights, layer, what, one.tints)
            num_compared += 1
    return num_compared


def _expected(named: Mapping[bytes, Named], block_hash: bytes, block_tokens: int) -> Any:
    """int16 [tokens], before the layer's change; fewer if the hash covers fewer."""
    assert block_hash in named, "a block can be found under a hash that no request has"
    what = named[block_hash]
    first = (what.num_tokens - 1) // block_tokens * block_tokens
    return np.array(what.values()[first:], np.int16)


def _compare(rows: Any, expected: Any, layer: str, what: str, tints: Sequence[int] = (0,)) -> None:
    """rows: int16 [KV heads, tokens, values of a token].
    expected: int16 [tokens].
    tints: what values may be off by.
    """
    differ = rows ^ (expected ^ _layer(layer))[None, :, None]
    wrong = np.flatnonzero(~np.isin(differ, tints).all(axis=(0, 2)))
    assert not len(wrong), f"{what}: token {wrong[0]} of {layer} is not what its hash says"


def answer_of(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(_value(tokens)))
    return tokens[len(prompt) :]


def check_nothing_left(one: Engine, *, may_count_errors: bool = False) -> None:
    """may_count_errors: the test made callbacks raise."""
    assert may_count_errors or "callback_errors" not in one.counters, one.counters
    side = our_connector(one.connector)._scheduler
    if side.sharing.cache is not None:
        requests, in_flight = side.requests, side.cache.planner.in_flight
        assert not requests.states and not requests.loads.awaited, requests.states
        assert not requests.short, requests.short
        assert not requests.loads.quarantine.held, "blocks stay in quarantine"
        assert not requests.loads.quarantine.loading
        assert not in_flight.stores and not in_flight.reading and not in_flight.num_bytes, in_flight
        assert not side.cache.finder.failed_loads and not requests.written._matched_tokens
        # If `ended` raised, they may still have the request.
        assert may_count_errors or not requests._adapters._live
        assert may_count_errors or not requests._exactness._exact_tokens
        assert may_count_errors or not requests._exactness._own_tokens
        for each in one.each_worker():
            worker = our_connector(each)._worker
            assert not worker.stores and not worker.loads
            assert not worker.loads._hung and not worker.loads._failed
    pool = one.scheduler.kv_cache_manager.block_pool
    assert pool.num_gpu_blocks == one.kv_config.num_blocks, "blocks stay out of use"
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks of the device are lost"


def reports_to(server: FakeServer) -> list[RequestReport]:
    return [report for kind, batch in server.calls if kind == "report_requests" for report in batch]
