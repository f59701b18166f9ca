"""Tests the ranks of an engine. `FakeServer` must answer as the real one."""

import os
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from demo.processes import Server
from hotkv_client import BlockResult, BlockRun, GroupHashes, LoadRun, TransferStatus
from hotkv_client.paged_engine import PagedEngine
from hotkv_proto.errors import HotKVError, Reason
from tests.doubles.fake import FakeServer
from tests.server.support import block_ids, hashes

STORED, PRESENT, WRITTEN = BlockResult.STORED, BlockResult.PRESENT, BlockResult.WRITTEN
NO_SPACE, IN_FLIGHT = BlockResult.NO_SPACE, BlockResult.IN_FLIGHT


class Rank:
    """One of two ranks."""

    def __init__(self, server: Any, name: str, shard: int) -> None:
        is_fake = isinstance(server, FakeServer)
        shards = {"shard_index": shard, "num_shards": 2}
        target = "unix:/nowhere" if is_fake else server.target
        self.engine = one = PagedEngine(target, model=name, engine_id=name, num_blocks=16, **shards)
        one.kv[:] = np.random.default_rng(shard).integers(0, 256, one.kv.shape, np.uint8)
        self.session: Any
        if is_fake:
            self.session = server.open(one.session.config, one.layout, {"kv": one.fd})
        else:
            self.session = one.connect().session

    def store(self, lease_id: str, blocks: list[bytes], first: int = 0) -> list[BlockResult]:
        run = BlockRun(0, blocks, block_ids(len(blocks), first))
        result = self.session.store(os.urandom(8).hex(), lease_id, [run], 10).result(60)
        assert result.status is TransferStatus.DONE
        return [BlockResult(value) for value in result.results[0].tolist()]

    def load(self, lease_id: str, *runs: tuple[list[int], int]) -> TransferStatus:
        """Loads runs of (positions in the lease's list, first block id)."""
        loads = [
            LoadRun(0, np.array(positions, np.int32), block_ids(len(positions), first))
            for positions, first in runs
        ]
        status: TransferStatus = self.session.load("load", lease_id, loads, 10).result(60).status
        return status

    def acquire(self, lease_id: str, blocks: list[bytes]) -> list[bool]:
        lease = self.session.acquire(lease_id, [GroupHashes(0, blocks)]).result(60)
        mask: list[bool] = lease.pinned[0].tolist()
        return mask

    def found(self, blocks: list[bytes]) -> list[bool]:
        mask: list[bool] = self.session.lookup([GroupHashes(0, blocks)]).result(60)[0].tolist()
        return mask

    def close(self) -> None:
        self.session.close()


Open = Callable[[int], Rank]


@pytest.fixture(params=["fake", "real"])
def rank(request: pytest.FixtureRequest) -> Iterator[Open]:
    """All ranks are of one engine."""
    server: FakeServer | Server = (
        FakeServer() if request.param == "fake" else request.getfixturevalue("server")
    )
    name, opened = uuid.uuid4().hex, list[Rank]()

    def make(shard: int) -> Rank:
        opened.append(Rank(server, name, shard))
        return opened[-1]

    yield make
    for one in opened:
        one.close()
        one.engine.close()


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(HotKVError) as raised:
        call()
    assert raised.value.reason is Reason.DUPLICATE_ID and "lease_id" in raised.value.message


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_block_is_ready_when_all_shards_are(rank: Open, order: tuple[int, int]) -> None:
    ranks, blocks = [rank(0), rank(1)], hashes(3)
    first, last = ranks[order[0]], ranks[order[1]]
    assert first.store("w", blocks) == [WRITTEN] * 3
    assert first.found(blocks) == [False] * 3 and first.acquire("early", blocks) == [False] * 3
    assert first.store("w", blocks) == [WRITTEN] * 3, "its shard is written already"
    assert last.store("w", blocks) == [STORED] * 3
    assert last.found(blocks) == [True] * 3
    assert last.store("w", blocks) == first.store("other", blocks) == [PRESENT] * 3
    for one in ranks:
        lease_id, kept = f"r{one.engine.layout.shard_index}", one.engine.kv[:, :3].copy()
        assert one.acquire(lease_id, blocks) == [True] * 3
        assert one.load(lease_id, ([0, 1, 2], 8)) is TransferStatus.DONE
        assert np.array_equal(one.engine.kv[:, 8:11], kept), "each rank gets its own shard"


def test_load_naming_a_block_twice_is_refused(rank: Open) -> None:
    one, two = rank(0), rank(1)
    blocks = hashes(3)
    assert one.store("w", blocks) == [WRITTEN] * 3 and two.store("w", blocks) == [STORED] * 3
    assert one.acquire("r", blocks) == [True] * 3
    assert one.acquire("listed twice", [*blocks, blocks[0]]) == [True] * 4
    one.engine.kv[:, 8:] = 0
    for lease_id, *runs in (
        ("r", ([1, 1], 8)),
        ("r", ([0, 1], 8), ([2, 0], 10)),
        ("listed twice", ([0, 1, 2, 3], 8)),
    ):
        with pytest.raises(HotKVError, match="lease_positions name a block twice") as raised:
            one.load(lease_id, *runs)
        assert raised.value.reason is Reason.INVALID_FIELD
    assert not one.engine.kv[:, 8:].any()
    # Several runs are allowed, and a refused load's id may be used again.
    assert one.load("r", ([0], 8), ([1], 9), ([2], 10)) is TransferStatus.DONE
    assert np.array_equal(one.engine.kv[:, 8:11], one.engine.kv[:, :3])


def test_first_ranks_answer_holds_for_the_others(rank: Open) -> None:
    one, two = rank(0), rank(1)
    blocks, others = hashes(4), hashes(2)
    assert one.store("before", blocks[:1]) == [WRITTEN]
    assert two.store("before", blocks[:1]) == [STORED]
    assert one.store("w", blocks) == [PRESENT, WRITTEN, WRITTEN, WRITTEN]
    assert two.store("another", [*blocks[:2], *others]) == [PRESENT, IN_FLIGHT, WRITTEN, WRITTEN]
    refused(lambda: two.store("w", [*blocks, *others]))
    refused(lambda: two.store("w", others))
    assert two.store("w", [blocks[2], blocks[0]]) == [STORED, PRESENT]
    assert one.found(blocks) == [True, False, True, False]
    assert two.store("w", blocks) == [PRESENT, STORED, PRESENT, STORED]
    assert one.store("another", others) == [STORED] * 2
    # Listed twice, the block is copied once.
    (block,) = hashes(1)
    assert one.store("twice", [block, block]) == [WRITTEN, IN_FLIGHT]
    assert two.store("twice", [block, block]) == [STORED, IN_FLIGHT]


def test_id_has_one_kind_and_one_content(rank: Open) -> None:
    one, two = rank(0), rank(1)
    blocks, others = hashes(2), hashes(2)
    assert one.store("w", blocks) == [WRITTEN] * 2
    refused(lambda: two.acquire("w", blocks))
    assert two.store("w", blocks) == [STORED] * 2
    assert one.acquire("r", blocks) == two.acquire("r", blocks) == [True] * 2
    for asked in (others, blocks[::-1], blocks[:1]):
        refused(lambda asked=asked: two.acquire("r", asked))  # type: ignore[misc]
    refused(lambda: two.store("r", others))


def test_a_flush_between_two_ranks_leaves_nothing(rank: Open) -> None:
    one, two = rank(0), rank(1)
    blocks = hashes(2)
    assert one.store("w", blocks) == [WRITTEN] * 2
    assert one.session.flush().result(60) == 0
    assert two.store("w", blocks) == [NO_SPACE] * 2
    assert one.found(blocks) == [False] * 2
    assert one.store("w", blocks) == [WRITTEN] * 2 and two.store("w", blocks) == [STORED] * 2


@pytest.mark.parametrize("survivor", [0, 1])
def test_a_rank_that_goes_leaves_no_half_blocks(rank: Open, survivor: int) -> None:
    """Its shard is dropped, and must be written again."""
    gone, stays = rank(1 - survivor), rank(survivor)
    blocks = hashes(2)
    assert gone.store("w", blocks) == [WRITTEN] * 2
    gone.close()
    assert stays.store("w", blocks) == [WRITTEN] * 2
    assert stays.found(blocks) == [False] * 2
    assert rank(1 - survivor).store("w", blocks, 5) == [STORED] * 2
    assert stays.found(blocks) == [True] * 2
