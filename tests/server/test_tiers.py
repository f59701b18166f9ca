"""Tests a disk tier: faults may cost hits, never lead to wrong bytes."""

import argparse
import json
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hotkv_client import GroupHashes
from hotkv_client.admin import AdminClient
from hotkv_client.command import cli
from hotkv_client.command.tables import show_status
from hotkv_client.paged_engine import PagedEngine
from hotkv_proto.errors import Reason
from hotkv_server.dataplane.plan import Region
from hotkv_server.settings import load_settings
from hotkv_server.startup import StartError
from hotkv_server.tiers.compression.form import room_bytes
from hotkv_server.tiers.start import open_lower
from tests.doubles import faults
from tests.server.places import found
from tests.server.refusals import refused
from tests.server.support import hashes
from tests.server.tiered import CHAIN, LAYERS, PAGE_BYTES, SLOT_BYTES, Tiered, place, tiered
from tests.support.waiting import wait_for
from tests.tiers.encodings import keys_and_values

__all__ = ["place"]
ARENA_SLOTS = (16 << 20) // SLOT_BYTES


@pytest.fixture(scope="module")
def shared() -> Iterator[Tiered]:
    """Used by the whole module. Its disk has a daily budget."""
    with tiered() as made:
        made.start_tiered("--tiers.disk.write-gb-per-day", "1e5")
        made.connect()
        yield made


def test_evicted_blocks_come_back_from_the_disk(place: Tiered) -> None:
    place.start_tiered()
    engine = place.connect()
    chains = [hashes(CHAIN) for _ in range(10)]
    assert sum(map(len, chains)) > 2 * ARENA_SLOTS
    contents = [place.fill(chain) for chain in chains]
    assert not engine.session.probe(0, chains[0]).any(), "the first chain is still in the arena"
    for chain, content in zip(chains, contents, strict=True):
        assert place.loads(chain, content)
    assert place.counter("tier_promoted_blocks_total") >= 6 * CHAIN
    assert not place.counter("tier_lost_blocks_total")


def test_lookup_fetches_its_hit_before_the_lease(shared: Tiered) -> None:
    engine, chain = shared.engine, hashes(CHAIN)
    assert engine is not None
    shared.fill(chain)
    shared.forget()
    assert not engine.session.probe(0, chain).any()
    assert all(found(engine, chain))
    wait_for(lambda: bool(engine.session.probe(0, chain).all()))


def test_lease_on_no_group_is_refused_early(shared: Tiered) -> None:
    assert shared.engine is not None
    asked = shared.engine.session.acquire("a", [GroupHashes(-1, hashes(1))])
    assert refused(asked).reason is Reason.INVALID_FIELD


def lease(engine: PagedEngine, chain: list[bytes]) -> list[bool]:
    pinned: list[bool] = (
        engine.session.acquire("a", [GroupHashes(0, chain)]).result(60).pinned[0].tolist()
    )
    engine.session.release("a")
    return pinned


@pytest.mark.parametrize(
    "how", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL]
)
def test_the_disk_outlives_the_server_and_the_arena(place: Tiered, how: signal.Signals) -> None:
    place.start_tiered()
    place.connect()
    chains = [hashes(CHAIN) for _ in range(6)]
    contents = [place.fill(chain) for chain in chains]
    place.stop(how)
    place.lose_arena()
    place.start_tiered()
    for chain, content in zip(chains, contents, strict=True):
        assert place.loads(chain, content)
    more = hashes(CHAIN)
    assert place.loads(more, place.fill(more))


@pytest.mark.long
def test_what_was_written_today_counts_after_a_restart(place: Tiered) -> None:
    """Also after a reset of the cache."""
    budget = ("--tiers.disk.write-gb-per-day", "100000")
    place.command = faults.command("hurry")
    place.start_tiered(*budget)
    place.connect()
    for _ in range(2):
        place.fill(hashes(CHAIN))
    left, written_bytes = place.counter("tier_budget_left_bytes"), 2 * CHAIN * SLOT_BYTES
    assert left == 10**14 - written_bytes
    note = place.folder / "disk" / "written.json"

    def noted_bytes() -> int:
        return sum(size for _, size in json.loads(note.read_text())) if note.exists() else 0

    wait_for(lambda: noted_bytes() == written_bytes)
    for how, flags in ((signal.SIGKILL, ()), (signal.SIGTERM, ("--reset",))):
        place.stop(how)
        place.start_tiered(*budget, *flags)
        assert place.counter("tier_budget_left_bytes") == left


def test_changed_bytes_on_disk_are_a_miss(shared: Tiered) -> None:
    engine, chain, before = shared.engine, hashes(CHAIN), shared.counter("tier_lost_blocks_total")
    assert engine is not None
    content = shared.fill(chain)
    shared.forget()
    slabs = np.memmap(shared.folder / "disk" / "slabs", np.uint8, "r+")
    at = slabs.tobytes().find(content[0, 7].tobytes())
    assert at >= 0
    slabs[at + 4097] ^= 1
    slabs.flush()
    assert lease(engine, chain) == [at != 7 for at in range(CHAIN)]
    assert shared.counter("tier_lost_blocks_total") == before + 1
    good = [block for at, block in enumerate(chain) if at != 7]
    assert shared.loads(good, np.delete(content, 7, axis=1))
    assert not any(found(engine, chain[7:8]))


def test_disks_blocks_and_answers_are_shown(place: Tiered) -> None:
    place.start_tiered("--tiers.disk.write-gb-per-day", "1e5")
    place.connect()
    chains, of_chain = [hashes(CHAIN) for _ in range(3)], CHAIN * SLOT_BYTES
    contents = [place.fill(chain) for chain in chains[:2]]
    place.forget()
    place.fill(chains[2])
    assert place.server is not None
    with AdminClient(place.server.target) as admin:

        def told(chain: list[bytes]) -> Any:
            (found_here,) = admin.explain(hashes=b"".join(chain))
            return found_here

        below = told(chains[0])
        assert {(b["verdict"], b["tier"]) for b in below["blocks"]} == {("below", "disk")}
        assert below["hit_token_count"] == 16 * CHAIN
        load = {"tier": "disk", "block_count": CHAIN, "byte_count": of_chain, "load_s": 0.0}
        assert below["loads"] == [load]
        here = told(chains[2])
        assert {block["tier"] for block in here["blocks"]} == {"host"} and not here["loads"]
        assert place.loads(chains[0], contents[0])
        assert 0 < told(chains[1])["loads"][0]["load_s"] < 60
        status = cli.status(admin, argparse.Namespace())
    (tier,) = [tier for tier in status["tiers"] if tier["name"] == "disk"]
    disk = tier["activity"]
    assert tier["block_count"] == 3 * CHAIN
    assert (disk["is_up"], disk["is_shared"], disk["problem"]) == (True, False, "")
    assert disk["asked_block_count"] == disk["hit_block_count"] == CHAIN
    assert (disk["read_byte_count"], disk["written_byte_count"]) == (of_chain, 3 * of_chain)
    assert disk["read_count"] >= 1 and 0 < disk["read_p50_s"] <= disk["read_p99_s"] < 20
    assert disk["budget_left_byte_count"] == disk["budget_byte_count"] - 3 * of_chain
    row = next(line for line in show_status(status).splitlines() if line.startswith("disk "))
    assert "100.0%" in row and row.endswith("90.9 TiB")


def test_a_disk_of_another_server_is_refused(shared: Tiered) -> None:
    flags = ["--tiers.disk.path", str(shared.folder / "disk"), "--tiers.disk.bytes", "64MiB"]
    settings = load_settings(None, flags, "hotkv-server")
    with pytest.raises(StartError, match=r"tiers\.disk\.path: .* is in use by hotkv-server"):
        open_lower(settings, Region(0, 1, "arena"), reset=False)


def test_power_loss_revives_nothing_before_a_flush(place: Tiered) -> None:
    """The disk's records are then those of before the flush."""
    disk = place.folder / "disk"
    place.start_tiered()
    engine, blocks, kept = place.connect(), hashes(20), hashes(4)
    place.fill(blocks)
    synced = (disk / "records").read_bytes()
    flushed = engine.session.flush().result(60)
    assert flushed == 20 and not flushed.pending_tiers
    place.stop(signal.SIGKILL)
    shutil.rmtree(place.folder / "arena")
    (disk / "records").write_bytes(synced)
    place.start_tiered()
    assert not any(lease(engine, blocks))
    # New blocks survive the next power loss.
    content = place.fill(kept)
    place.stop(signal.SIGKILL)
    shutil.rmtree(place.folder / "arena")
    place.start_tiered()
    wait_for(lambda: place.loads(kept, content))


def values(count: int, seed: int) -> np.ndarray:
    """[layer, block, byte], which compress as a real model's."""
    made: np.ndarray = keys_and_values(LAYERS * count * PAGE_BYTES, seed)
    return made.reshape(LAYERS, count, PAGE_BYTES)


@pytest.mark.parametrize(
    ("first", "then"),
    [("auto", "off"), pytest.param("off", "auto", marks=pytest.mark.long)],
)
def test_disks_encoding_may_change_between_servers(place: Tiered, first: str, then: str) -> None:
    """Blocks that can't be compressed are written as they are."""
    size = {"auto": room_bytes(SLOT_BYTES), "off": SLOT_BYTES}
    place.start_tiered("--tiers.disk.compress", first)
    place.connect()
    chains = [hashes(CHAIN) for _ in range(4)]
    contents = [place.fill(chain, values(CHAIN, at)) for at, chain in enumerate(chains[:-1])]
    used_bytes = 3 * CHAIN * size[first]
    assert place.counter("tier_used_bytes") == used_bytes
    assert place.counter("tier_written_bytes_total") == used_bytes
    contents.append(place.fill(chains[-1]))
    place.stop(signal.SIGKILL)
    place.lose_arena()
    place.start_tiered("--tiers.disk.compress", then)
    used_bytes += CHAIN * SLOT_BYTES
    assert place.counter("tier_used_bytes") == used_bytes
    for chain, content in zip(chains, contents, strict=True):
        assert place.loads(chain, content)
    more = hashes(CHAIN)
    assert place.loads(more, place.fill(more, values(CHAIN, 9)))
    assert place.counter("tier_encoded_blocks_total") == (CHAIN if then == "auto" else 0)
    assert place.counter("tier_used_bytes") == used_bytes + CHAIN * size[then]
    assert not place.counter("tier_lost_blocks_total")
