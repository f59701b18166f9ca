"""Tests sketches on a real server."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from demo.processes import Server
from hotkv_client import (
    BlockResult,
    BlockRun,
    Evicted,
    GroupHashes,
    LoadRun,
    TransferStatus,
)
from hotkv_client.admin import AdminClient
from hotkv_proto.errors import Reason
from tests.server.sparse_support import SketchEngine, refused
from tests.server.support import block_ids, hashes, number_of


class Engine(SketchEngine):
    def store_runs(self, *runs: tuple[int, list[bytes]]) -> list[set[int]]:
        """Stores (group, hashes) from blocks 0, 1, …; a set of results for each."""
        name = os.urandom(8).hex()
        made = [BlockRun(group, blocks, block_ids(len(blocks))) for group, blocks in runs]
        done = self.session.store(name, name, made, 20).result(60)
        return [set(run.tolist()) for run in done.results]

    def found(self, blocks: list[bytes]) -> tuple[list[bool], list[bool]]:
        """Masks of found blocks and found sketches, on which table and lease must agree."""
        lists = [GroupHashes(group, blocks) for group in (0, self.group)]
        looked_up = [mask.tolist() for mask in self.session.lookup(lists).result(60)]
        probes = [self.session.probe(group, blocks) for group in (0, self.group)]
        assert [None if probe is None else probe.tolist() for probe in probes] == looked_up
        name = os.urandom(8).hex()
        pinned = self.session.acquire(name, lists).result(60).pinned
        assert [mask.tolist() for mask in pinned] == looked_up
        self.session.release(name)
        return looked_up[0], looked_up[1]

    def load(self, blocks: list[bytes], first: int) -> TransferStatus:
        name, count = os.urandom(8).hex(), len(blocks)
        lists = [GroupHashes(group, blocks) for group in (0, self.group)]
        assert all(mask.all() for mask in self.session.acquire(name, lists).result(60).pinned)
        ids = block_ids(count), block_ids(count, first)
        runs = [LoadRun(group, *ids) for group in (0, self.group)]
        result = self.session.load(name, name, runs, 20).result(60)
        self.session.release(name)
        return result.status


Make = Callable[..., Engine]


@pytest.fixture
def sparse(server: Server) -> Iterator[Make]:
    model = os.urandom(8).hex()
    with contextlib.ExitStack() as stack:

        def make(**settings: Any) -> Engine:
            made = Engine(server.target, model, **settings)
            stack.callback(made.close)
            return made

        yield make


def test_hit_brings_sketches_of_its_version(sparse: Make) -> None:
    one, other, newer, blocks = sparse(), sparse(), sparse(version=8), hashes(20)
    assert one.store_runs((one.group, blocks), (0, blocks)) == [{BlockResult.STORED}] * 2
    assert newer.found(blocks) == ([True] * 20, [False] * 20)
    assert other.found([*blocks, *hashes(2)]) == ([True] * 20 + [False] * 2,) * 2
    assert other.load(blocks, 30) is TransferStatus.DONE
    for layer, pool in other.pools.items():
        assert np.array_equal(pool[30:50], one.pools[layer][:20])
    assert np.array_equal(other.kv[30:50], one.kv[:20])


def test_sketch_goes_with_its_block_unannounced(sparse: Make, server: Server) -> None:
    told, blocks = list[Evicted](), hashes(10)
    engine = sparse(on_evicted=told.append)
    before = server.counter("sketch_bytes")
    with AdminClient(server.target) as admin:
        number = number_of(admin, engine.key_space.model)
        stream = admin.events(number, seconds=60)
        assert next(stream) == ([], 0)
        engine.store_runs((engine.group, blocks), (0, blocks))
        (row,) = [one for one in admin.key_spaces() if one["key_space_id"] == number]
        num_bytes = server.counter("sketch_bytes")
        assert num_bytes - before == 10 * 4096
        assert sum(tier["sketch_byte_count"] for tier in admin.tiers()) == num_bytes
        assert (row["block_count"], row["sketch_count"]) == (10, 10)
        assert len(row["sketches"]) == 1
        listed = admin.blocks(number)["blocks"]
        assert [b["sketch_byte_count"] for b in listed] == [4096] * 10
        (answer,) = admin.explain(number, b"".join(blocks))
        assert (answer["hit_token_count"], len(answer["blocks"])) == (160, 10)
        assert admin.evict(number, 0, b"".join(blocks[:4]))["evicted_block_count"] == 4
        assert engine.found(blocks) == ([False] * 4 + [True] * 6,) * 2
        error = refused(lambda: admin.evict(number, 256, blocks[5]))
        assert error.reason is Reason.INVALID_FIELD
        assert engine.session.flush().result(60) == 6
        assert engine.found(blocks) == ([False] * 10,) * 2
        assert server.counter("sketch_bytes") == before
        events: list[dict[str, Any]] = []
        while not events or events[-1]["event"] != "cleared":
            events += next(stream)[0]
    assert [(e["event"], e.get("group_index"), e.get("block_count")) for e in events[:2]] == [
        ("stored", 0, 10),
        ("removed", 0, 4),
    ]
    assert len(events) == 3
    groups = [group for notice in told for group in notice.groups]
    assert sorted(h for group in groups for h in group.hashes) == sorted(blocks)
    assert {group.group_index for group in groups} == {0}


def test_a_layout_without_their_pages_takes_none(sparse: Make) -> None:
    engine, bare, blocks = sparse(), sparse(with_pages=False), hashes(2)
    engine.store_runs((0, blocks), (engine.group, blocks))
    for call in (lambda: bare.store_runs((bare.group, blocks)), lambda: bare.load(blocks, 0)):
        assert "layout" in refused(call).message
