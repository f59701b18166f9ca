"""Tests KV events of a server with a disk."""

import signal
from collections.abc import Iterator

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored

from hotkv_client import BlockRun
from hotkv_client.admin import AdminClient
from hotkv_client.command.tables import event_line
from tests.server.routers import Router, external, topic
from tests.server.support import block_ids, hashes
from tests.server.tiered import CHAIN, Tiered, place
from tests.support.waiting import wait_for

__all__ = ["place"]


def test_readers_learn_in_which_medium_blocks_lie(place: Tiered) -> None:
    """No event may store a block where it already is."""
    place.start_tiered("--events.endpoint", f"ipc://{place.folder}/events")
    engine = place.connect()
    assert place.server is not None
    router = Router(place.folder, topic(engine.key_space.model))
    # Discards the events of a block that is flushed once it is on the disk.
    router.wait_heard(engine)
    place.fill(first := hashes(1))
    engine.session.flush().result(60)
    router.discard_until_flushed(first[0])
    with AdminClient(place.server.target) as admin:
        wide, narrow = admin.events(0, 60, tiers=True), admin.events(0, 60)
        assert next(wide) == next(narrow) == ([], 0)
        chain, last = hashes(CHAIN), hashes(1)
        content = place.fill(chain)
        place.fill(hashes(CHAIN))
        place.forget()
        assert place.loads(chain, content)
        place.fill(last)
        mine = set(map(external, chain))
        lies: dict[str, set[object]] = {MEDIUM_CPU: set(), MEDIUM_STORAGE: set()}
        for event in router.until_stored(last[0], MEDIUM_STORAGE):
            there = mine & set(event.block_hashes)
            assert event.locality == ("LOCAL" if event.medium == MEDIUM_STORAGE else None)
            assert event.ownership is None
            match event:
                case BlockStored():
                    assert not there & lies[event.medium], "stored twice"
                    lies[event.medium] |= there
                case BlockRemoved():
                    assert there <= lies[event.medium]
                    lies[event.medium] -= there
        assert lies == {MEDIUM_CPU: mine, MEDIUM_STORAGE: mine}
        engine.session.flush().result(60)
        seen = [
            [item for items in _until_last_cleared(stream) for item in items]
            for stream in (wide, narrow)
        ]
    router.close()
    media = [{(e["medium"], e["tier"]) for e in some if e["event"] != "cleared"} for some in seen]
    assert media == [{("CPU", ""), ("DISK", "disk")}, {("CPU", "")}]
    on_disk = [e for e in seen[0] if e.get("medium") == "DISK" and e["event"] == "stored"]
    assert {e["block_token_count"] for e in on_disk} == {16}
    assert sum(e["block_count"] for e in on_disk) == 2 * CHAIN + 1
    assert "  disk  " in event_line(on_disk[0])


def _until_last_cleared(stream: Iterator[tuple[list[dict[str, object]], int]]):  # type: ignore[no-untyped-def]
    """Up to a clear event after some stores."""
    has_blocks = False
    for items, lost in stream:
        assert not lost
        yield items
        has_blocks |= any(item["event"] == "stored" for item in items)
        if has_blocks and items and items[-1]["event"] == "cleared":
            return


def test_readers_learn_disk_blocks_of_a_lost_arena(
    place: Tiered,
) -> None:
    events = ("--events.endpoint", f"ipc://{place.folder}/events")
    place.start_tiered(*events)
    engine, chain = place.connect(), hashes(CHAIN)
    run = BlockRun(0, chain, block_ids(CHAIN), token_ids=list(range(16 * CHAIN)))
    engine.session.store("store", "lease", [run], 20).result(60)
    wait_for(lambda: place.counter("tier_demoted_blocks_total") == CHAIN)
    place.stop(signal.SIGTERM)
    (place.folder / "arena" / "state.json").write_text("[]")
    place.start_tiered(*events)
    assert place.server is not None and "starting empty" in place.server.log.read_text()
    with AdminClient(place.server.target) as admin:
        known = b""
        for items, _ in admin.events(0, 60, tiers=True, state=True):
            known += b"".join(bytes.fromhex(one["hashes"]) for one in items)
            if known == b"".join(chain):
                return
    raise AssertionError(f"the reader knows {len(known)} bytes of hashes")
