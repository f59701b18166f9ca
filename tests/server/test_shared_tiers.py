"""Tests two servers that share Valkey or S3."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hotkv_client import BlockResult, TransferStatus
from hotkv_client.hints import HintClient
from tests.doubles import faults
from tests.doubles.with_constants import constant
from tests.server.places import load, store
from tests.server.sharing import CHAIN, SharingNode, bucket_flags, check_sharing, node
from tests.server.support import PATIENT, hashes
from tests.support.waiting import wait_for
from tests.tiers.cluster_support import running as running_cluster
from tests.tiers.s3_support import running as running_s3
from tests.tiers.valkey_support import Server as Valkey
from tests.tiers.valkey_support import running

SECRET = "never-to-be-seen-anywhere"
Nodes = tuple[SharingNode, SharingNode]
Flags = contextlib.AbstractContextManager[tuple[str, ...]]


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with node() as a, node() as b:
        yield a, b


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    with running(tmp_path / "valkey", appendonly="yes", appendfsync="always") as server:
        yield server


@contextlib.contextmanager
def on_a_socket(folder: Path) -> Iterator[tuple[str, ...]]:
    with running(folder / "valkey") as server:
        yield "--tiers.valkey.address", f"unix:{server.path}", "--tiers.valkey.compress", "auto"


@contextlib.contextmanager
def in_a_cluster(folder: Path) -> Iterator[tuple[str, ...]]:
    with running_cluster(folder / "cluster") as cluster:
        yield "--tiers.valkey.address", cluster.address, "--tiers.valkey.cluster", "true"
        assert all(one.client.dbsize() for one in cluster.nodes)


@contextlib.contextmanager
def in_a_bucket(folder: Path) -> Iterator[tuple[str, ...]]:
    with running_s3(folder) as s3:
        yield bucket_flags(s3, s3.port)


@pytest.mark.parametrize(
    "stored",
    [
        on_a_socket,
        pytest.param(in_a_cluster, marks=pytest.mark.long),
        pytest.param(in_a_bucket, marks=pytest.mark.long),
    ],
)
def test_stored_on_one_node_loaded_on_another(
    nodes: Nodes, tmp_path: Path, stored: Callable[[Path], Flags]
) -> None:
    with stored(tmp_path) as flags:
        for one in nodes:
            one.command = faults.command("hurry")
        a, b = (one.start_sharing(*flags, *PATIENT) for one in nodes)
        check_sharing(a, b)
        # Node `b` starts without its arena.
        chain = hashes(CHAIN)
        content = a.fill(chain)
        b.stop(signal.SIGKILL)
        for path in (b.folder / "arena").iterdir():
            path.unlink()
        b.start_sharing(*flags, *PATIENT)
        # The store's first answers may be too late, which are misses.
        wait_for(lambda: b.loads(chain, content))
        assert not b.counter("shared_corrupt_blocks_total")


def flags_of(valkey: Valkey) -> tuple[str, ...]:
    hasty = constant("tiers.valkey.tier.TIMEOUTS", "Timeouts(1.0, 0.5)")
    return ("--tiers.valkey.address", f"unix:{valkey.path}", *hasty)


def test_a_server_without_its_valkey_starts_and_serves(nodes: Nodes, tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.touch(mode=0o600)
    secret.write_text(SECRET)
    flags = ("--tiers.valkey.address", "127.0.0.1:1", "--tiers.valkey.password-file", str(secret))
    a = nodes[0].start_sharing(*flags)
    chain = hashes(CHAIN)
    assert a.engine is not None and a.server is not None
    assert store(a.engine, chain) == {BlockResult.STORED}
    assert load(a.engine, chain, 0) is TransferStatus.DONE
    assert not a.counter("shared_up") and SECRET not in a.server.log.read_text()


def test_store_is_flushed_later_by_absent_server(nodes: Nodes, valkey: Valkey) -> None:
    """Flushed while there was no store; a later server, which has it, must flush it too."""
    a, chain = nodes[0].start_sharing(*flags_of(valkey)), hashes(CHAIN)
    a.fill(chain)
    a.stop(signal.SIGTERM)
    a.start_sharing()
    assert a.engine is not None and a.server is not None
    assert not a.engine.session.has_tiers
    a.engine.session.flush().result(60)
    # Without a tier, a prefetch has nothing to wait for.
    prefetch = {"action_id": "a", "action_type": "prefetch", "payload": {"deadline_s": 1}}
    with HintClient(a.server.target) as router:
        (outcome,) = router.send({"message_id": "m", "actions": [prefetch]}, 1, chain)
    assert outcome["status"] == "missing"
    a.stop(signal.SIGKILL)
    a.start_sharing(*flags_of(valkey))
    a.until_copying()
    assert not a.finds(chain)


@pytest.mark.long
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_missed_flush_outlives_the_server(nodes: Nodes, valkey: Valkey, how: str) -> None:
    """A store that was only stopped gets the flush from both servers."""
    flags = flags_of(valkey)
    a, b = (one.start_sharing(*flags) for one in nodes)
    chain, kept = hashes(CHAIN), hashes(CHAIN)
    for blocks in (chain, kept):
        a.fill(blocks)
    wait_for(lambda: b.finds(chain))
    (key,) = valkey.client.keys("hotkv/1/*/generation")
    before = int(valkey.client.get(key))
    with valkey.stopped() if how == "stopped" else valkey.killed():
        assert a.engine is not None
        a.engine.session.flush().result(60)
        a.stop(signal.SIGKILL)
        a.start_sharing(*flags)
        assert not a.finds(chain)
    assert len(valkey.client.keys("*/0/*")) == 2 * CHAIN, "the store has lost the blocks"
    # The store still has flushed blocks.
    wait_for(lambda: int(valkey.client.get(key)) > before)
    assert not a.finds(chain) and not b.finds(kept)
    wait_for(lambda: not b.finds(chain))
    # The flush has reached the store, so new blocks stay.
    a.until_copying()
    again = a.fill(chain)
    wait_for(lambda: b.loads(chain, again))
    raised = int(valkey.client.get(key))
    a.stop(signal.SIGKILL)
    a.start_sharing(*flags)
    assert a.loads(chain, again)
    time.sleep(1.5)
    assert int(valkey.client.get(key)) == raised and a.finds(chain)
