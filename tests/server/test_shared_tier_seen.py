"""What operators see of a tier that nodes share, with a real Valkey server: a row in status, where
blocks lie and what it takes to load them, and events of copies."""

import argparse
from collections.abc import Iterator

import pytest

from demo.processes import runtime_folder
from hotkv_client.admin import AdminClient
from hotkv_client.command import cli
from hotkv_client.command.tables import show_explain, show_status
from tests.server.places import store
from tests.server.support import PATIENT, hashes
from tests.server.tiered import CHAIN, SLOT_BYTES, Tiered
from tests.support.waiting import wait_for
from tests.tiers.valkey_support import Server, running


@pytest.fixture
def place() -> Iterator[tuple[Tiered, Server]]:
    with runtime_folder(256 << 20) as folder, running(folder / "valkey") as valkey:
        made = Tiered(folder)
        made.start("--tiers.valkey.address", f"unix:{valkey.path}", *PATIENT)
        made.connect()
        yield made, valkey
        assert made.engine is not None and made.server is not None
        made.engine.close()
        made.server.__exit__()


@pytest.mark.long
def test_status_explain_and_events_name_the_shared_tier(place: tuple[Tiered, Server]) -> None:
    node, valkey = place
    assert node.server is not None and node.engine is not None
    chain = hashes(CHAIN)
    with AdminClient(node.server.target) as admin:
        stream = admin.events(0, 60, tiers=True)
        assert next(stream) == ([], 0)
        store(node.engine, chain)
        content = node.engine.kv[:, :CHAIN].copy()
        wait_for(lambda: node.counter("shared_copied_blocks_total") == CHAIN)
        num_copied = 0
        while num_copied < CHAIN:
            for event in next(stream)[0]:
                if (event.get("medium"), event.get("tier")) == ("REMOTE", "valkey"):
                    num_copied += event["block_count"]
        stream.close()  # type: ignore[attr-defined]
        admin.evict(1, 0, b"".join(chain))
        # A server asks: nobody has looked the blocks up yet.
        (told,) = admin.explain(hashes=b"".join([*chain, *hashes(1)]))
        assert [b["tier"] for b in told["blocks"]] == ["valkey"] * CHAIN + [""]
        assert [b["verdict"] for b in told["blocks"]] == ["below"] * CHAIN + ["never stored"]
        assert told["hit_token_count"] == 16 * CHAIN
        (load,) = told["loads"]
        assert (load["tier"], load["block_count"], load["load_s"]) == ("valkey", CHAIN, 0.0)
        assert load["byte_count"] == CHAIN * SLOT_BYTES
        assert "in valkey; a lease brings it up" in show_explain([told])
        assert node.loads(chain, content)
        status = cli.status(admin, argparse.Namespace())
        (tier,) = [t for t in status["tiers"] if t["name"] == "valkey"]
        does = tier["activity"]
        assert does["is_shared"] and does["is_up"]
        assert (does["asked_block_count"], does["hit_block_count"]) == (CHAIN, CHAIN)
        assert does["read_byte_count"] == CHAIN * SLOT_BYTES and does["read_bytes_per_s"] > 0
        valkey.kill()
        try:
            store(node.engine, hashes(CHAIN))
            wait_for(lambda: "valkey  DOWN" in show_status(cli.status(admin, argparse.Namespace())))
            (told,) = admin.explain(hashes=b"".join(hashes(2)))
            assert not told["loads"]
        finally:
            valkey.start()
