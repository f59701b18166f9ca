"""Two daemons that share a real Valkey: what an engine of one has stored, an engine of the other
loads byte for byte; a flush on one counts on both; and a Valkey that is away costs hits only."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hotkv_client import BlockResult, TransferStatus
from tests.server.places import load, store
from tests.server.sharing import (
    CHAIN,
    LAYERS,
    PAGE_BYTES,
    SharingNode,
    check_sharing,
    node,
)
from tests.server.support import PATIENT, hashes
from tests.support.waiting import wait_for
from tests.tiers.valkey_support import Server as Valkey
from tests.tiers.valkey_support import running

SECRET = "never-to-be-seen-anywhere"


@pytest.fixture
def nodes() -> Iterator[tuple[SharingNode, SharingNode]]:
    with node() as a, node() as b:
        yield a, b


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    with running(tmp_path / "valkey") as server:
        yield server


def test_what_one_node_stores_another_loads(
    nodes: tuple[SharingNode, SharingNode], valkey: Valkey
) -> None:
    flags = ("--tiers.valkey.address", f"unix:{valkey.path}", "--tiers.valkey.compress", "auto")
    flags += PATIENT
    a, b = (one.start_sharing(*flags) for one in nodes)
    chain = hashes(CHAIN)
    content = a.fill(chain)
    assert b.loads(chain, content)
    assert b.counter("shared_fetched_blocks_total") == CHAIN
    # Once in host memory, it is not fetched again.
    assert b.loads(chain, content)
    assert b.counter("shared_fetched_blocks_total") == CHAIN
    # A node that comes back empty finds it, too.
    b.stop(signal.SIGKILL)
    for path in (b.folder / "arena").iterdir():
        path.unlink()
    b.start_sharing(*flags)
    # A store that is slow to answer is a miss.
    wait_for(lambda: b.loads(chain, content))
    assert not b.counter("shared_corrupt_blocks_total")


def test_a_flush_on_one_node_counts_on_both(
    nodes: tuple[SharingNode, SharingNode], valkey: Valkey
) -> None:
    flags = ("--tiers.valkey.address", f"127.0.0.1:{valkey.port}", *PATIENT)
    a, b = (one.start_sharing(*flags) for one in nodes)
    kept, fetched = hashes(CHAIN), hashes(CHAIN)
    contents = [a.fill(chain) for chain in (kept, fetched)]
    assert b.loads(fetched, contents[1])
    assert a.engine is not None
    a.engine.session.flush().result(60)
    assert not b.finds(kept) and not a.finds(kept) and not a.finds(fetched)
    wait_for(lambda: not b.finds(fetched))
    again = a.fill(kept)
    wait_for(lambda: b.finds(kept))
    assert b.loads(kept, again)


@pytest.mark.long
def test_a_valkey_that_hangs_dies_and_comes_back(
    nodes: tuple[SharingNode, SharingNode], valkey: Valkey
) -> None:
    flags = ("--tiers.valkey.address", f"unix:{valkey.path}", "--tiers.valkey.timeout-s", "0.5")
    a, b = (one.start_sharing(*flags) for one in nodes)
    chain = hashes(CHAIN)
    content = a.fill(chain)
    assert b.loads(chain, content)
    missing = hashes(CHAIN)
    with valkey.stopped():
        for _ in range(3):
            assert b.loads(chain, content), "host memory serves without it"
            assert not b.finds(missing)
        waits = []
        for _ in range(20):
            began_s = time.monotonic()
            assert not b.finds(hashes(CHAIN))
            waits.append(time.monotonic() - began_s)
        # Once it is known to hang nobody waits for it.
        assert sorted(waits)[len(waits) // 2] < 0.15, waits
    with valkey.killed():
        assert b.loads(chain, content) and not b.finds(missing)
    more = hashes(CHAIN)

    def is_shared_again() -> bool:
        content = np.random.default_rng().integers(0, 256, (LAYERS, CHAIN, PAGE_BYTES), np.uint8)
        fresh = hashes(CHAIN)
        assert a.engine is not None
        a.engine.kv[:, :CHAIN] = content
        assert store(a.engine, fresh) == {BlockResult.STORED}
        time.sleep(1.5)
        return b.loads(fresh, content)

    wait_for(is_shared_again)
    assert not b.finds(more)


def test_a_server_without_its_valkey_starts_and_serves(
    nodes: tuple[SharingNode, SharingNode], tmp_path: Path
) -> None:
    secret = tmp_path / "password"
    secret.touch(mode=0o600)
    secret.write_text(SECRET)
    flags = ("--tiers.valkey.address", "127.0.0.1:1", "--tiers.valkey.password-file", str(secret))
    a = nodes[0].start_sharing(*flags)
    chain = hashes(CHAIN)
    assert a.engine is not None
    assert store(a.engine, chain) == {BlockResult.STORED}
    assert load(a.engine, chain, 0) is TransferStatus.DONE
    assert not a.counter("shared_up")


@pytest.mark.long
def test_what_one_node_stores_in_a_bucket_another_loads(
    nodes: tuple[SharingNode, SharingNode], tmp_path: Path
) -> None:
    """And a flush on one counts on both."""
    pytest.importorskip("obstore", reason="obstore speaks S3")
    from tests.tiers.s3_support import BUCKET
    from tests.tiers.s3_support import running as running_s3

    with running_s3(tmp_path) as s3:
        settings = {
            "bucket": BUCKET,
            "endpoint": f"http://127.0.0.1:{s3.port}",
            "credentials-file": str(s3.keys["hotkv"]),
            "refresh-s": "0.2",
        }
        flags = [word for key, value in settings.items() for word in (f"--tiers.s3.{key}", value)]
        a, b = (one.start_sharing(*flags, *PATIENT) for one in nodes)
        chain = hashes(CHAIN)
        content = a.fill(chain)
        wait_for(lambda: b.finds(chain))
        assert b.loads(chain, content)
        assert b.counter("shared_fetched_blocks_total") == CHAIN
        assert a.engine is not None
        a.engine.session.flush().result(60)
        assert not a.finds(chain)
        wait_for(lambda: not b.finds(chain))


def flags_of(valkey: Valkey) -> tuple[str, ...]:
    return ("--tiers.valkey.address", f"unix:{valkey.path}", "--tiers.valkey.timeout-s", "0.5")


@pytest.mark.long
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_flush_that_the_store_missed_outlives_the_server(
    nodes: tuple[SharingNode, SharingNode], tmp_path: Path, how: str
) -> None:
    with running(tmp_path / "kept", appendonly="yes", appendfsync="always") as valkey:
        check_missed_flush(*nodes, valkey, valkey.stopped if how == "stopped" else valkey.killed)


def check_missed_flush(
    a: SharingNode,
    b: SharingNode,
    valkey: Valkey,
    is_away: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    """A flush on a node that ends before the store is back. One that is stopped reads of it twice:
    what the killed server had sent, and what the next one sends; one that is killed reads once."""
    flags = flags_of(valkey)
    for one in (a, b):
        one.start_sharing(*flags)
    chain, kept = hashes(CHAIN), hashes(CHAIN)
    for blocks in (chain, kept):
        a.fill(blocks)
    assert b.finds(chain)
    (key,) = valkey.client.keys("hotkv/1/*/epoch")
    before = int(valkey.client.get(key))
    with is_away():
        assert a.engine is not None
        a.engine.session.flush().result(60)
        a.stop(signal.SIGKILL)
        a.start_sharing(*flags)
        assert not a.finds(chain)
    assert len(valkey.client.keys("*/0/*")) == 2 * CHAIN, "the store has lost the blocks"
    # Neither the node that has flushed nor another one finds what the store still has.
    wait_for(lambda: int(valkey.client.get(key)) > before)
    assert not a.finds(chain) and not b.finds(kept)
    wait_for(lambda: not b.finds(chain))
    # It is told, and the key space is in use again.
    a.until_copying()
    again = a.fill(chain)
    wait_for(lambda: b.loads(chain, again))
    raised = int(valkey.client.get(key))
    a.stop(signal.SIGKILL)
    a.start_sharing(*flags)
    assert a.loads(chain, again)
    time.sleep(1.5)
    assert int(valkey.client.get(key)) == raised and a.finds(chain)


@pytest.mark.long
def test_a_server_that_was_down_during_a_flush_drops_what_it_had(
    nodes: tuple[SharingNode, SharingNode], valkey: Valkey
) -> None:
    """The store is away, too, as the server comes back."""
    flags = flags_of(valkey)
    a, b = (one.start_sharing(*flags) for one in nodes)
    chain = hashes(CHAIN)
    content = a.fill(chain)
    assert b.loads(chain, content)
    a.stop(signal.SIGKILL)
    assert b.engine is not None
    b.engine.session.flush().result(60)
    with valkey.stopped():
        a.start_sharing(*flags)
    wait_for(lambda: not a.finds(chain))
    time.sleep(1.5)
    assert not a.finds(chain) and not b.finds(chain)


@pytest.mark.long
def test_a_server_that_leaves_only_its_disk_drops_what_was_flushed_meanwhile(
    nodes: tuple[SharingNode, SharingNode], valkey: Valkey
) -> None:
    a, b = nodes
    flags = (*flags_of(valkey), "--tiers.disk.bytes", "64MiB", "--arena.keep", "false")
    flags = (*flags, "--tiers.disk.path", str(a.folder / "disk"))
    a.start_sharing(*flags)
    b.start_sharing(*flags_of(valkey))
    chain = hashes(CHAIN)
    content = a.fill(chain)
    wait_for(lambda: a.counter("tier_demoted_blocks_total") == CHAIN)
    a.stop(signal.SIGTERM)
    a.start_sharing(*flags)
    assert a.loads(chain, content)
    a.stop(signal.SIGTERM)
    assert b.engine is not None
    b.engine.session.flush().result(60)
    a.start_sharing(*flags)
    wait_for(lambda: not a.finds(chain))


@pytest.mark.long
def test_what_one_node_stores_in_a_cluster_another_loads(
    nodes: tuple[SharingNode, SharingNode], tmp_path: Path
) -> None:
    from tests.tiers.cluster_support import running as running_cluster

    with running_cluster(tmp_path / "cluster") as cluster:
        flags = ("--tiers.valkey.address", cluster.address, "--tiers.valkey.cluster", "true")
        check_sharing(*(one.start_sharing(*flags, *PATIENT) for one in nodes))
        assert all(one.client.dbsize() for one in cluster.nodes)


@pytest.mark.long
def test_a_flush_says_which_stores_it_could_not_tell(
    nodes: tuple[SharingNode, SharingNode], tmp_path: Path
) -> None:
    with running(tmp_path / "kept", appendonly="yes", appendfsync="always") as valkey:
        a = nodes[0].start_sharing(*flags_of(valkey))
        assert a.engine is not None and a.server is not None
        a.fill(hashes(CHAIN))
        assert not a.engine.session.flush().result(60).pending_tiers
        with valkey.killed():
            assert a.engine.session.flush().result(60).pending_tiers == ("valkey",)
            assert "valkey" in a.server.cli("flush", "--key-space", "1")
