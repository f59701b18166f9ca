"""KV events of a server with a disk: readers of the ZMQ endpoint and of the gRPC feed learn the
tiers of blocks. A reader without tiers gets events of host memory only."""

from collections.abc import Iterator

import numpy as np
import pytest
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored

from hotkv_client import BlockRun
from hotkv_client.admin import AdminClient
from hotkv_client.command.tables import event_line
from tests.server.routers import Router, external, topic
from tests.server.support import hashes
from tests.server.tiered import CHAIN, Tiered, tiered
from tests.support.waiting import wait_for


@pytest.fixture
def place() -> Iterator[Tiered]:
    with tiered() as made:
        yield made


def test_readers_learn_in_which_medium_blocks_lie(place: Tiered) -> None:
    place.start_tiered("--events.endpoint", f"ipc://{place.folder}/events")
    engine = place.connect()
    assert place.server is not None
    router = Router(place.folder, topic(engine.key_space.model))
    with AdminClient(place.server.target) as admin:
        wide, narrow = admin.events(0, 60, tiers=True), admin.events(0, 60)
        assert next(wide) == next(narrow) == ([], 0)
        wait_for(lambda: bool(router.sub.poll(50)) or not engine.session.flush().result(60))
        router.events()
        chain = hashes(CHAIN)
        content = place.fill(chain)
        place.fill(hashes(CHAIN))
        place.forget()
        assert place.loads(chain, content)
        mine = set(map(external, chain))
        lies: dict[str, set[object]] = {MEDIUM_CPU: set(), MEDIUM_STORAGE: set()}
        for event in router.events():
            there = mine & set(event.block_hashes)
            of_disk = (event.medium, event.locality, event.ownership) == (
                MEDIUM_STORAGE,
                "LOCAL",
                None,
            )
            assert of_disk or (event.medium, event.locality, event.ownership) == (
                MEDIUM_CPU,
                None,
                None,
            )
            match event:
                case BlockStored():
                    assert not there & lies[event.medium], "stored twice"
                    assert not of_disk or (event.token_ids, event.block_size) == ([], 0)
                    lies[event.medium] |= there
                case BlockRemoved():
                    assert there <= lies[event.medium]
                    lies[event.medium] -= there
        assert lies == {MEDIUM_CPU: mine, MEDIUM_STORAGE: mine}
        engine.session.flush().result(60)
        seen = {}
        for name, stream in (("wide", wide), ("narrow", narrow)):
            seen[name] = [item for items in _until_last_cleared(stream) for item in items]
    router.close()
    media = {
        name: {(e["medium"], e["tier"]) for e in events if e["event"] != "cleared"}
        for name, events in seen.items()
    }
    assert media == {"wide": {("CPU", ""), ("DISK", "disk")}, "narrow": {("CPU", "")}}
    on_disk = [e for e in seen["wide"] if e.get("medium") == "DISK" and e["event"] == "stored"]
    assert {e["block_token_count"] for e in on_disk} == {16}
    assert sum(e["block_count"] for e in on_disk) == 2 * CHAIN
    assert "  disk  " in event_line(on_disk[0])


def test_a_tiers_event_has_the_tokens_and_the_parent_of_the_store(place: Tiered) -> None:
    place.start_tiered("--events.endpoint", f"ipc://{place.folder}/events")
    engine = place.connect()
    router = Router(place.folder, topic(engine.key_space.model))
    wait_for(lambda: bool(router.sub.poll(50)) or not engine.session.flush().result(60))
    router.events()
    chain, ids = hashes(CHAIN), list(range(CHAIN * 16))
    run = BlockRun(0, chain, np.arange(CHAIN, dtype=np.int32), token_ids=ids)
    engine.session.store("told", "told", [run], 60).result(60)
    wait_for(lambda: place.counter("tier_demoted_blocks_total") == CHAIN)
    names, told = [*map(external, chain)], set()
    while told != set(names):
        for event in [one for one in router.events() if one.medium == MEDIUM_STORAGE]:
            first = names.index(event.block_hashes[0])
            end = first + len(event.block_hashes)
            assert event.block_hashes == names[first:end] and not told & {*names[first:end]}
            assert (event.token_ids, event.block_size) == (ids[first * 16 : end * 16], 16)
            assert event.parent_block_hash == (names[first - 1] if first else None)
            told.update(event.block_hashes)
    assert place.counter("events_without_tokens_total") == 0
    router.close()


def _until_last_cleared(stream: Iterator[tuple[list[dict[str, object]], int]]):  # type: ignore[no-untyped-def]
    """Yields answers of a stream up to the first clear after blocks were stored."""
    has_blocks = False
    for items, lost in stream:
        assert not lost
        yield items
        has_blocks |= any(item["event"] == "stored" for item in items)
        if has_blocks and items and items[-1]["event"] == "cleared":
            return
