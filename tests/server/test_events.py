"""Tests a real server's KV events over ZMQ, by vLLM's own classes."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
)
from vllm.v1.kv_cache_interface import KVCacheSpecKind

from demo.processes import Server
from hotkv_client import BlockRun
from hotkv_client.admin import AdminClient
from hotkv_client.command.tables import event_line
from hotkv_proto.groups import GroupKind, GroupSpec
from tests.server.routers import (
    Make,
    Router,
    engine,
    external,
    published,
    topic,
)
from tests.server.support import (
    FULL,
    WIDE,
    WINDOW,
    GroupsEngine,
    block_ids,
    hashes,
    number_of,
)
from tests.support.waiting import wait_for

__all__ = ["engine", "published"]

BIG = GroupSpec(GroupKind.FULL_ATTENTION, 16, (128 << 10,))


@pytest.fixture
def router(published: tuple[Server, Path]) -> Iterator[Callable[[GroupsEngine], Router]]:
    with contextlib.ExitStack() as stack:

        def make(engine: GroupsEngine) -> Router:
            made = Router(published[1], topic(engine.key_space.model))
            stack.callback(made.close)
            made.wait_subscribed(engine)
            return made

        yield make


def tokens(count: int, first: int = 1000) -> list[int]:
    return list(range(first, first + count))


def stored(
    blocks: list[bytes], parent: bytes | None, token_ids: list[int], group: int, **fields: Any
) -> BlockStored:
    """The event that vLLM would publish. `group`: index among FULL, WINDOW and WIDE."""
    spec = (FULL, WINDOW, WIDE)[group]
    return BlockStored(
        block_hashes=[external(h) for h in blocks],
        parent_block_hash=None if parent is None else external(parent),
        token_ids=token_ids,
        block_size=spec.block_tokens if token_ids else 0,
        lora_id=None,
        medium="CPU",
        lora_name=fields.get("lora_name"),
        extra_keys=fields.get("extra_keys"),
        group_idx=group,
        kv_cache_spec_kind="sliding_window" if group == 1 else "full_attention",
        kv_cache_spec_sliding_window=24 if group == 1 else None,
    )


def test_published_blocks_have_tokens_keys_adapters(
    engine: Make, router: Callable[[GroupsEngine], Router]
) -> None:
    one = engine("events-stored", FULL, WINDOW, WIDE)
    assert one.session.wants_token_ids
    reader = router(one)
    prompt, ids = hashes(6), tokens(96)
    wide = prompt[1::2]
    # First the third block of the sliding-window group.
    one.store(BlockRun(1, prompt[2:3], block_ids(1), prompt[1], 2, ids[32:48]))
    assert reader.events(1) == [stored(prompt[2:3], prompt[1], ids[32:48], 1)]
    one.store(
        BlockRun(0, prompt, block_ids(6), token_ids=ids),
        BlockRun(1, prompt[1:], block_ids(5), prompt[0], 1, np.array(ids[16:], np.int32)),
        BlockRun(2, wide, block_ids(3), token_ids=ids),
    )
    assert reader.events(4) == [
        stored(prompt, None, ids, 0),
        stored(prompt[1:2], prompt[0], ids[16:32], 1),
        stored(prompt[3:], prompt[2], ids[48:], 1),
        stored(wide, None, ids, 2),
    ]
    # Blocks stored again are no event.
    one.store(BlockRun(0, prompt, block_ids(6), token_ids=ids))
    other = hashes(3)
    keys = [("adapter", ("image-1", 7)), None, (b"\x01\x02", "salt")]
    one.store(BlockRun(0, other, block_ids(3), b"", 0, ids[:48], "adapter", keys))
    # vLLM's decoder returns lists for inner tuples.
    decoded = [("adapter", ["image-1", 7]), None, (b"\x01\x02", "salt")]
    assert reader.events(1) == [
        stored(other, None, ids[:48], 0, lora_name="adapter", extra_keys=decoded)
    ]


def test_router_believes_what_the_server_holds(
    published: tuple[Server, Path], engine: Make, router: Callable[[GroupsEngine], Router]
) -> None:
    """The arena is too small for all blocks."""
    one = engine("events-view", BIG, WINDOW)
    reader = router(one)
    rng = np.random.default_rng(11)
    pool = hashes(300)
    believed: set[tuple[int, Any]] = set()
    num_removed = 0
    with AdminClient(published[0].target) as admin:
        number = number_of(admin, "events-view")
        for step in range(100):
            start, count = int(rng.integers(0, 260)), int(rng.integers(1, 40))
            run = pool[start : start + count]
            group, of_run = int(rng.integers(0, 2)), tokens(16 * len(run))
            one.store(BlockRun(group, run, block_ids(len(run)), b"", 0, of_run))
            if step % 15 == 14:
                some = b"".join(pool[:: int(rng.integers(1, 5))])
                admin.evict(number, int(rng.integers(0, 2)), some)
            if step % 40 == 39:
                admin.flush(number)
        (mark,) = hashes(1)
        one.store(BlockRun(1, [mark], block_ids(1)))
        for event in reader.until_stored(mark):
            match event:
                case BlockStored():
                    new = {(event.group_idx, h) for h in event.block_hashes}
                    assert not new & believed, "stored twice"
                    believed |= new
                case BlockRemoved():
                    gone = {(event.group_idx, h) for h in event.block_hashes}
                    assert gone <= believed, "removed what was not there"
                    believed -= gone
                    num_removed += len(gone)
                case AllBlocksCleared():
                    believed.clear()
        evicted = admin.info()["counters"]["evicted_blocks_total"]
        listed = admin.blocks(number, 10_000)["blocks"]
    held = {
        (b["group_index"], external(bytes.fromhex(b["block_hash"])))
        for b in listed
        if b["state"] == "ready"
    }
    assert believed == held
    assert held
    assert num_removed > 100 and evicted > 100, "little was evicted: the test shows little"


def test_router_keeps_blocks_of_models_other_spaces(
    published: tuple[Server, Path], engine: Make, router: Callable[[GroupsEngine], Router]
) -> None:
    """Two key spaces of a model share a topic."""
    one = engine("events-two")
    reader, prompt, ids = router(one), hashes(4), tokens(64)
    two = engine("events-two", FULL, WINDOW)
    with AdminClient(published[0].target) as admin:
        rows = [r for r in admin.key_spaces() if r["key_space"]["model"] == "events-two"]
        number = min(int(row["key_space_id"]) for row in rows)
        one.store(BlockRun(0, prompt, block_ids(4), token_ids=ids))
        two.store(BlockRun(0, prompt[:2], block_ids(2), token_ids=ids[:32]))
        assert len(reader.events(2)) == 2
        admin.evict(number, 0, b"".join(prompt))
    (gone,) = reader.events(1)
    assert isinstance(gone, BlockRemoved)
    assert set(gone.block_hashes) == {external(one) for one in prompt[2:]}
    two.session.flush().result(60)
    (gone,) = reader.events(1)
    assert isinstance(gone, BlockRemoved)
    assert set(gone.block_hashes) == {external(one) for one in prompt[:2]}


def test_tools_read_the_same_over_grpc(published: tuple[Server, Path], engine: Make) -> None:
    server = published[0]
    one, stranger = engine("events-grpc"), engine("events-grpc-other")
    prompt, ids = hashes(2), tokens(32)
    with AdminClient(server.target) as admin:
        number = number_of(admin, "events-grpc")
        stream = admin.events(number, 60)
        assert next(stream) == ([], 0)
        stranger.store(BlockRun(0, prompt, block_ids(2)))
        keys = [("adapter", ("image", 3)), None]
        one.store(BlockRun(0, prompt, block_ids(2), b"", 0, ids, "adapter", keys))
        admin.evict(number, 0, prompt[0])
        one.session.flush().result(60)
        seen: list[dict[str, Any]] = []
        while not seen or seen[-1]["event"] != "cleared":
            items, lost = next(stream)
            assert lost == 0
            seen += items
        stream.close()  # type: ignore[attr-defined]
        wait_for(lambda: server.counter("event_readers") == 0)
    stored_event, removed = seen[:2]
    assert [item["event"] for item in seen[:2]] == ["stored", "removed"]
    # A flush may report single blocks first.
    assert {item["event"] for item in seen[2:-1]} <= {"removed"}
    assert {item["key_space_id"] for item in seen} == {number}
    assert stored_event["hashes"] == b"".join(prompt).hex() and stored_event["token_ids"] == ids
    assert stored_event["extra_keys"] == [["adapter", ["image", 3]], []]
    assert removed["hashes"] == prompt[0].hex()
    first = f"first {removed['hashes'][:16]}"
    stored_line = f"stored  group 0  2 blocks, {first}  depth 0  tokens 32"
    assert event_line(stored_event).endswith(stored_line)
    assert event_line(removed).endswith(f"removed  group 0  1 block, {first}")
    assert event_line(seen[-1]).endswith("cleared")


def test_kinds_of_groups_have_vllms_names() -> None:
    from hotkv_server.events.wire import KINDS

    assert set(KINDS) == set(GroupKind)
    assert set(KINDS.values()) <= {kind.value for kind in KVCacheSpecKind}
