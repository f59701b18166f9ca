"""Tests that a hung disk, or a slow shared store, affects only its own blocks."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from demo.processes import Server
from hotkv_client import BlockResult, GroupHashes
from hotkv_client.admin import AdminClient
from hotkv_client.paged_engine import PagedEngine
from tests.doubles import faults
from tests.doubles.fault_proxy import FaultProxy, throttled
from tests.server.places import store
from tests.server.sharing import (
    CHAIN,
    LAYERS,
    NUM_BLOCKS,
    PAGE_BYTES,
    SharingNode,
    bucket_flags,
    node,
    probed,
)
from tests.server.support import hashes
from tests.support.waiting import wait_for
from tests.tiers.s3_support import running as running_s3
from tests.tiers.valkey_support import Server as Valkey
from tests.tiers.valkey_support import running

STOP_S = 60.0
BY_A_CUT = ("fallocate", "stat")
"""The tier makes these calls only for a file that was cut short."""
NOT_OF_THE_TIER = ("fsync",)
"""Only other parts of the server make these calls."""


class HungNode(SharingNode):
    """A node whose disk hangs in some calls, from `hang` to `heal`. It has a Valkey too."""

    def start_hung(self, valkey: Valkey) -> None:
        self.disk, self.signs = self.folder / "disk", self.folder / "signs"
        self.signs.mkdir()
        flags = ("--tiers.disk.path", str(self.disk), "--tiers.disk.bytes", "16MiB")
        flags += ("--tiers.valkey.address", f"unix:{valkey.path}")
        self.command = faults.command("hang-disk", self.disk, self.signs)
        self.start_sharing(*flags, "--tiers.lookup-wait-ms", "500")

    def hang(self, *calls: str) -> None:
        for call in calls:
            (self.signs / call).touch()

    def heal(self) -> None:
        for sign in self.signs.iterdir():
            sign.unlink()

    def evict(self) -> None:
        """Evicts from host memory; tiers keep their copies."""
        assert self.server is not None
        with AdminClient(self.server.target) as admin:
            admin.evict(everything=True)

    def loads_soon(self, blocks: list[bytes], content: np.ndarray) -> bool:
        """Waits until all have been fetched from a tier that works."""

        def comes() -> bool:
            self.finds(blocks)
            return bool(self.leases(blocks).all())

        wait_for(comes)
        return self.loads(blocks, content)


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[HungNode]:
    with running(tmp_path / "valkey") as valkey, node(HungNode) as made:
        assert isinstance(made, HungNode)
        made.start_hung(valkey)
        try:
            yield made
        finally:
            made.heal()


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param(tuple(faults.CALLS), id="every", marks=pytest.mark.long),
        *(
            pytest.param((call,), id=call, marks=pytest.mark.campaign)
            for call in ("pread", "pwrite", "fsync", "stat")
        ),
    ],
)
def test_hung_disk_costs_its_own_blocks(hung: HungNode, calls: tuple[str, ...]) -> None:
    engine, server = hung.engine, hung.server
    assert engine is not None and server is not None
    leased = hashes(4)
    hung.fill(leased)
    lease = engine.session.acquire("held", [GroupHashes(0, leased)], 60).result(60)
    assert lease.pinned[0].all()
    lost, chain = hashes(CHAIN), hashes(CHAIN)
    hung.fill(lost)
    content = hung.fill(chain)
    hung.evict()
    if calls[0] in BY_A_CUT:
        with (hung.disk / "slabs").open("r+b") as file:
            file.truncate(0)
    with probed(server):
        hung.hang(*calls)
        hung.leases(lost)
        assert hung.loads_soon(chain, content)
        shape = {"layers": LAYERS, "num_blocks": NUM_BLOCKS, "page_bytes": PAGE_BYTES}
        other = PagedEngine(server.target, model="new while it hangs", **shape).connect()
        fresh, num_copied = hashes(8), hung.num_copied()
        assert store(other, fresh) == {BlockResult.STORED}
        found = other.session.lookup([GroupHashes(0, fresh)]).result(60)
        assert found[0].all()
        wait_for(lambda: any((hung.signs / f"{call}.met").exists() for call in calls))
        if calls[0] not in NOT_OF_THE_TIER:
            wait_for(lambda: not hung.counter("tier_up"))
            wait_for(lambda: "tier=disk is passed by" in server.log.read_text())
        # Awaits these copies, because `fill` counts copies of any blocks.
        wait_for(lambda: hung.num_copied() >= num_copied + len(fresh))
        more = hashes(CHAIN)
        content = hung.fill(more)
        hung.evict()
        assert hung.loads_soon(more, content)
        assert engine.session.connected
        other.close()
    again = engine.session.acquire("held", [GroupHashes(0, leased)], 60).result(60)
    assert again.pinned[0].all(), "the lease is lost"
    server._child.process.send_signal(signal.SIGTERM)
    assert server._child.process.wait(STOP_S) == 0, "it does not stop"


def test_a_disk_that_answers_again_is_used_again(hung: HungNode) -> None:
    server = hung.server
    assert server is not None
    hung.hang("pwrite")
    store(hung.engine, hashes(CHAIN))
    wait_for(lambda: not hung.counter("tier_up"))
    wait_for(lambda: "tier=disk is passed by" in server.log.read_text())
    hung.heal()
    wait_for(lambda: bool(hung.counter("tier_up")))
    before = hung.counter("tier_demoted_blocks_total")
    assert store(hung.engine, hashes(CHAIN)) == {BlockResult.STORED}
    wait_for(lambda: hung.counter("tier_demoted_blocks_total") > before)
    wait_for(lambda: "tier=disk answers again" in server.log.read_text())


def test_server_ends_despite_hung_audit_file(tmp_path: Path) -> None:
    """The disk hangs in a write of an audit line."""
    disk, signs = tmp_path / "disk", tmp_path / "signs"
    disk.mkdir()
    signs.mkdir()
    command = faults.command("hang-disk", disk, signs)
    flags = ("--security.audit-file", str(disk / "audit.jsonl"))
    with Server(tmp_path, "16MiB", *flags, command=command) as server:
        server.wait_ready()
        (signs / "stat").touch()
        server.cli("evict", "--all")
        wait_for((signs / "stat.met").exists)
        server._child.process.send_signal(signal.SIGTERM)
        assert server._child.process.wait(STOP_S) == 0, "it does not stop"


# Slow stores


@contextlib.contextmanager
def bucket(folder: Path, bytes_per_s: float = 0.0) -> Iterator[tuple[str, ...]]:
    """Flags for S3 at this speed; 0: no limit."""
    (folder / "s3").mkdir()
    with running_s3(folder / "s3") as s3:
        proxy = FaultProxy(("127.0.0.1", s3.port))
        if bytes_per_s:
            proxy.on_command = proxy.on_reply = throttled(bytes_per_s)
        with contextlib.closing(proxy):
            yield bucket_flags(s3, proxy.port)


@contextlib.contextmanager
def slow_valkey(folder: Path) -> Iterator[tuple[str, ...]]:
    """Flags for a Valkey that answers one byte per second, and for S3."""
    with running(folder / "valkey") as valkey, bucket(folder) as flags:
        proxy = FaultProxy(valkey.path)
        proxy.on_reply = throttled(1)
        try:
            yield ("--tiers.valkey.address", f"127.0.0.1:{proxy.port}", *flags)
        finally:
            proxy.close()


@contextlib.contextmanager
def slow_bucket(folder: Path) -> Iterator[tuple[str, ...]]:
    """Flags for S3 with 1 MB/s, and for a disk."""
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
def test_slow_store_costs_its_own_blocks(tmp_path: Path, slow: object) -> None:
    with slow(tmp_path) as flags, node() as one:  # type: ignore[operator]
        one.command = faults.command("hurry")
        one.start_sharing(*flags, "--tiers.lookup-wait-ms", "500")
        has_disk = "--tiers.disk.path" in flags
        engine, server = one.engine, one.server
        assert engine is not None and server is not None
        leased = hashes(4)
        # When a store first answers, earlier blocks there are deleted (`Generations.confirm`).
        one.until_copying()
        with probed(server):
            moved = "tier_demoted_blocks_total" if has_disk else "shared_copied_blocks_total"
            before = one.counter(moved)
            assert store(engine, leased) == {BlockResult.STORED}

            def is_leased() -> bool:
                """A lease gets nothing before the slow store counts as away; after a stop, that
                takes as long again."""
                held = engine.session.acquire("held", [GroupHashes(0, leased)], 60).result(60)
                if not held.pinned[0].all():
                    engine.session.release("held")
                return bool(held.pinned[0].all())

            wait_for(is_leased)
            chains = [hashes(CHAIN) for _ in range(4)]
            for chain in chains:
                assert store(engine, chain) == {BlockResult.STORED}
                wait_for(lambda chain=chain: one.finds(chain), "host memory has it")
            count = 4 + CHAIN * len(chains)
            wait_for(lambda: one.counter(moved) >= before + count)
            came = "tier_promoted_blocks_total" if has_disk else "shared_fetched_blocks_total"

            def comes(chain: list[bytes]) -> bool:
                # What is on its way to the slow tier is pinned, so each try evicts again.
                with AdminClient(server.target) as admin:
                    admin.evict(everything=True)
                before = one.counter(came)
                return bool(one.leases(chain).all()) and one.counter(came) >= before + CHAIN

            # All come from the other tier, even while the slow one is busy.
            for chain in chains:
                wait_for(lambda chain=chain: comes(chain))
        again = engine.session.acquire("held", [GroupHashes(0, leased)], 60).result(60)
        assert again.pinned[0].all(), "the lease is lost"
        assert engine.session.connected
