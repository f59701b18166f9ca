"""A store that is slow costs its own blocks only: a bucket at 1 MB/s, a Valkey that answers one
byte a second. The server lives, engines keep leases and hit in host memory, and other tiers go on:
the disk beside a bucket that answers at last which epoch it has; a bucket beside a Valkey that
can't, without whose word the disk's blocks may be of before a flush elsewhere."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotkv_client import BlockResult, GroupHashes
from hotkv_client.admin import AdminClient
from hotkv_server.testing.fault_proxy import FaultProxy, throttled
from tests.server.places import store
from tests.server.sharing import CHAIN, node, probed
from tests.server.support import hashes
from tests.support.waiting import wait_for
from tests.tiers import s3_support
from tests.tiers.valkey_support import running


@contextlib.contextmanager
def bucket(folder: Path, bytes_per_s: float = 0.0) -> Iterator[tuple[str, ...]]:
    """Flags of a bucket, which takes and gives so much; 0: as fast as it can."""
    (folder / "s3").mkdir()
    weed = s3_support.Server(folder / "s3")
    try:
        weed.wait()
        proxy = FaultProxy(("127.0.0.1", weed.port))
        if bytes_per_s:
            proxy.on_command = proxy.on_reply = throttled(bytes_per_s)
        try:
            yield (
                *("--tiers.s3.bucket", s3_support.BUCKET),
                *("--tiers.s3.endpoint", f"http://127.0.0.1:{proxy.port}"),
                *("--tiers.s3.credentials-file", str(weed.keys["hotkv"])),
                *("--tiers.s3.refresh-s", "0.1"),
            )
        finally:
            proxy.close()
    finally:
        weed.close()


@contextlib.contextmanager
def slow_valkey(folder: Path) -> Iterator[tuple[str, ...]]:
    """Flags of a Valkey that answers one byte a second, and of a bucket."""
    with running(folder / "valkey") as valkey, bucket(folder) as flags:
        proxy = FaultProxy(valkey.path)
        proxy.on_reply = throttled(1)
        try:
            yield ("--tiers.valkey.address", f"127.0.0.1:{proxy.port}", *flags)
        finally:
            proxy.close()


@contextlib.contextmanager
def slow_bucket(folder: Path) -> Iterator[tuple[str, ...]]:
    """Flags of a bucket that takes and gives 1 MB/s, and of a disk."""
    with bucket(folder, 1e6) as flags:
        disk = folder / "disk"
        yield (*flags, "--tiers.disk.path", str(disk), "--tiers.disk.bytes", "64MiB")


@pytest.mark.long
@pytest.mark.parametrize(
    "slow",
    [
        pytest.param(slow_valkey, id="valkey"),
        pytest.param(slow_bucket, id="bucket"),
    ],
)
def test_a_store_that_is_slow_costs_its_own_blocks_only(tmp_path: Path, slow: object) -> None:
    with slow(tmp_path) as flags, node() as one:  # type: ignore[operator]
        one.start_sharing(*flags, "--tiers.lookup-wait-ms", "500")
        has_disk = "--tiers.disk.path" in flags
        engine, server = one.engine, one.server
        assert engine is not None and server is not None
        leased = hashes(4)
        with probed(server):
            assert store(engine, leased) == {BlockResult.STORED}
            held = engine.session.acquire("held", [GroupHashes(0, leased)], 60).result(60)
            assert held.pinned[0].all()
            chains = [hashes(CHAIN) for _ in range(4)]
            for chain in chains:
                assert store(engine, chain) == {BlockResult.STORED}
                assert one.finds(chain), "host memory has it"
            count = 4 + CHAIN * len(chains)
            moved = "tier_demoted_blocks_total" if has_disk else "shared_copied_blocks_total"
            wait_for(lambda: one.counter(moved) >= count)
            with AdminClient(server.target) as admin:
                admin.evict(everything=True)
            # The other tier has them all, whatever the slow one is asked for meanwhile.
            wait_for(lambda: all(one.leases_some(chain) for chain in chains))
            came = "tier_promoted_blocks_total" if has_disk else "shared_fetched_blocks_total"
            assert one.counter(came)
        again = engine.session.acquire("held", [GroupHashes(0, leased)], 60).result(60)
        assert again.pinned[0].all(), "the lease is lost"
        assert engine.session.connected
