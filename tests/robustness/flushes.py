"""The flush campaign: nodes that share a Valkey flush while servers, links and the Valkey fail
(docs/robustness.md).

A block's bytes say how many flushes had begun when it was stored. No load may begin after a flush's
answer and have bytes from before that flush. Flushes with pending tiers do not count; and a node
that can't reach the store may serve old blocks from host memory (docs/tiers.md), unless it has
promoted one.

`python -m tests.robustness.flushes --flushes 500 --seed 7 --nodes 3` prints counts.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hotkv_client import BlockRun, Flushed, GroupHashes, LoadRun, TransferStatus
from hotkv_client.admin import AdminClient
from hotkv_client.paged_engine import PagedEngine
from hotkv_proto.errors import HotKVError
from tests.doubles.fault_proxy import FaultProxy, nothing
from tests.doubles.with_constants import COMMAND, constant
from tests.server.places import Place
from tests.server.support import block_ids

LAYERS, PAGE_BYTES, CHAIN, NUM_CHAINS = 2, 4096, 8, 4
ARENA, DISK = "16MiB", "64MiB"
CALL_S = 30.0
HEAL_S = 8.0
"""By then a cut-off node reaches the store again, and nodes trust a store restarted from an old
copy."""
CHAINS = [
    [b"%032d" % (chain * CHAIN + block) for block in range(CHAIN)] for chain in range(NUM_CHAINS)
]


@dataclass(slots=True)
class Findings:
    """`stale` must stay empty.

    cut_off_loads: allowed loads from before a flush, by a node that could not reach the store.
    done: events by kind.
    """

    seed: int = 0
    flushes: int = 0
    answered: int = 0
    pending: int = 0
    left: int = 0
    loads: int = 0
    loaded_blocks: int = 0
    from_tiers_blocks: int = 0
    cut_off_loads: int = 0
    longest_flush_s: float = 0.0
    done: dict[str, int] = field(default_factory=dict)
    stale: list[str] = field(default_factory=list)


class Link:
    def __init__(self, target: str) -> None:
        self.proxy = FaultProxy(target)
        self.is_cut = False

    def cut(self, *, hangs: bool) -> None:
        """`hangs`: bytes vanish; otherwise connections close."""

        def hole(piece: bytes) -> Iterator[bytes]:
            if not hangs:
                raise ConnectionAbortedError
            return iter(())

        self.is_cut = True
        self.proxy.on_command = self.proxy.on_reply = hole
        if not hangs:
            self.proxy.drop()

    def heal(self) -> None:
        self.is_cut = False
        self.proxy.on_command = self.proxy.on_reply = nothing
        self.proxy.drop()


class Node(Place):
    command = COMMAND

    def __init__(self, folder: Path, link: Link, flags: list[str]) -> None:
        folder.mkdir()
        super().__init__(folder)
        self.link = link
        self.is_stopped = False
        self.unreached_until_s = 0.0
        self.synced: bytes | None = None
        self.disk = folder / "disk"
        self.disk.mkdir(mode=0o700)
        self.flags = ["--tiers.disk.path", str(self.disk), "--tiers.disk.bytes", DISK, *flags]

    def begin(self) -> None:
        self.start(*self.flags, arena=ARENA)
        if self.engine is None:
            self.engine = self.new_engine(2 * CHAIN * NUM_CHAINS).connect()

    def new_engine(self, num_blocks: int, **more: Any) -> PagedEngine:
        assert self.server is not None
        sizes = {"layers": LAYERS, "num_blocks": num_blocks, "page_bytes": PAGE_BYTES}
        return PagedEngine(self.server.target, **sizes, **more)

    def pause(self) -> None:
        assert self.server is not None
        os.kill(self.server.pid, signal.SIGSTOP)
        self.is_stopped = True

    def resume(self) -> None:
        assert self.server is not None and self.engine is not None
        os.kill(self.server.pid, signal.SIGCONT)
        self.is_stopped = False
        assert self.engine.session.wait_connected(CALL_S)

    def heal(self) -> None:
        self.link.heal()
        self.unreached_until_s = time.monotonic() + HEAL_S

    def sync(self) -> None:
        """Copies the disk tier's records: what survives a power loss."""
        self.synced = (self.disk / "records").read_bytes()

    def lose_power(self) -> None:
        """Loses the arena, and the records since the last `sync`."""
        self.stop(signal.SIGKILL)
        shutil.rmtree(self.folder / "arena")
        if self.synced is not None:
            (self.disk / "records").write_bytes(self.synced)
        self.begin()

    def num_from_tiers(self) -> float:
        names = ("shared_fetched_blocks_total", "tier_promoted_blocks_total")
        return sum(map(self.counter, names))

    @property
    def reaches(self) -> bool:
        """False until HEAL_S after the link's repair."""
        return not self.link.is_cut and time.monotonic() >= self.unreached_until_s


class Campaign:
    """Entering the context starts the nodes."""

    def __init__(self, seed: int, store: "ValkeyStore", folder: Path, num_nodes: int):
        self.dice = random.Random(seed)
        self.findings = Findings(seed)
        self.store = store
        self.nodes: list[Node] = []
        self.generation = self.flushed = 0
        self.under_way: list[tuple[int, float, Future[Flushed]]] = []
        for number in range(num_nodes):
            link = Link(store.target)
            self.nodes.append(Node(folder / f"node{number}", link, store.flags(link.proxy.port)))
        self.steady_until_s = 0.0

    def __enter__(self) -> "Campaign":
        for node in self.nodes:
            node.begin()
        return self

    def __exit__(self, *error: object) -> None:
        for node in self.nodes:
            if node.is_stopped:
                node.resume()
            if node.engine is not None:
                node.engine.close()
            if node.server is not None:
                node.server.__exit__()
            node.link.proxy.close()

    def run(self, num_flushes: int, seconds: float = float("inf")) -> Findings:
        ends_s = time.monotonic() + seconds
        often = {self.load: 40, self.put: 24, self.flush: 8}
        seldom = {self.evict: 3, self.sync: 2, self.stop_or_go_on: 2, self.cut_or_heal: 2}
        once = (self.flush_and_leave, self.kill, self.lose_power, self.break_store)
        kinds: dict[Callable[[Node], None], int] = {**often, **seldom, **dict.fromkeys(once, 1)}
        while self.findings.flushes < num_flushes and time.monotonic() < ends_s:
            for one in self.nodes:
                if one.link.is_cut and self.dice.random() < 0.05:
                    self.cut_or_heal(one)
                if one.is_stopped and self.dice.random() < 0.05:
                    self.stop_or_go_on(one)
            (what,) = self.dice.choices([*kinds], [*kinds.values()])
            node = self.dice.choice(self.nodes)
            if node.is_stopped and what not in (self.stop_or_go_on, self.break_store):
                continue
            what(node)
            self.count(what.__name__)
            self.collect()
        self.all_well()
        until_s = time.monotonic() + CALL_S
        while self.under_way and time.monotonic() < until_s:
            self.collect()
            time.sleep(0.05)
        for node in self.nodes * 3:
            self.load(node)
        return self.findings

    # Actions of nodes

    def put(self, node: Node) -> None:
        """Each byte is the number of flushes begun so far."""
        engine, chain = self.engine(node), self.dice.randrange(NUM_CHAINS)
        engine.kv[:, chain * CHAIN : (chain + 1) * CHAIN].view(np.int64)[:] = self.generation
        name = os.urandom(8).hex()
        runs = [BlockRun(0, CHAINS[chain], block_ids(CHAIN, chain * CHAIN))]
        with contextlib.suppress(HotKVError):
            engine.session.store(name, name, runs, CALL_S).result(CALL_S)

    def load(self, node: Node) -> None:
        engine, chain = self.engine(node), self.dice.randrange(NUM_CHAINS)
        name, first = os.urandom(8).hex(), CHAIN * NUM_CHAINS
        flushed, reaches, up_before = self.flushed, self.reaches(node), node.num_from_tiers()
        groups = [GroupHashes(0, CHAINS[chain])]
        with contextlib.suppress(HotKVError):
            engine.session.lookup(groups).result(CALL_S)
            at = np.flatnonzero(engine.session.acquire(name, groups, 20).result(CALL_S).pinned[0])
            if not len(at):
                return
            positions = at.astype(np.int32)
            runs = [LoadRun(0, positions, positions + np.int32(first))]
            result = engine.session.load(name, name, runs, CALL_S).result(CALL_S)
            engine.session.release(name)
            if result.status is not TransferStatus.DONE:
                return
            oldest = int(engine.kv[:, first + at].view(np.int64).min())
            self.judge(node, len(at), oldest, flushed, reaches, up_before)

    def judge(
        self, node: Node, count: int, oldest: int, flushed: int, reaches: bool, up_before: float
    ) -> None:
        findings, num_up = self.findings, node.num_from_tiers() - up_before
        findings.loads += 1
        findings.loaded_blocks += count
        findings.from_tiers_blocks += int(num_up)
        if oldest < flushed and not reaches and not num_up:
            findings.cut_off_loads += 1
        elif oldest < flushed:
            findings.stale.append(
                f"node={self.nodes.index(node)} loaded of={oldest} flushed={flushed} "
                f"reaches={reaches} from_tiers={num_up} after={dict(findings.done)}"
            )

    def reaches(self, node: Node) -> bool:
        return node.reaches and self.store.is_up

    def flush(self, node: Node) -> None:
        """After the answer, no load may return a block from before now."""
        generation = self.begin_generation()
        answer = self.engine(node).session.flush()
        self.under_way.append((generation, time.monotonic(), answer))
        if self.dice.random() < 0.7:
            with contextlib.suppress(Exception):
                answer.result(CALL_S)

    def begin_generation(self) -> int:
        self.generation += 1
        self.findings.flushes += 1
        return self.generation

    def flush_and_leave(self, node: Node) -> None:
        """The client does not wait for the answer."""
        self.begin_generation()
        self.findings.left += 1
        caller = node.new_engine(CHAIN, engine_id="leaves")
        with contextlib.suppress(Exception):
            caller.connect()
            caller.session.flush()
        caller.close()

    def collect(self) -> None:
        findings = self.findings
        for one in [one for one in self.under_way if one[2].done()]:
            generation, began_s, answer = one
            self.under_way.remove(one)
            if answer.exception() is not None:
                continue
            if answer.result().pending_tiers:
                findings.pending += 1
                continue
            findings.answered += 1
            took_s = time.monotonic() - began_s
            findings.longest_flush_s = max(findings.longest_flush_s, took_s)
            self.flushed = max(self.flushed, generation)

    def evict(self, node: Node) -> None:
        assert node.server is not None
        with AdminClient(node.server.target) as admin:
            admin.evict(everything=True)

    # Faults

    def sync(self, node: Node) -> None:
        node.sync()

    def stop_or_go_on(self, node: Node) -> None:
        if node.is_stopped:
            node.resume()
        elif not self.is_steady():
            node.pause()

    def is_steady(self) -> bool:
        """For HEAL_S after a restart with older data, no other fault may happen."""
        return time.monotonic() < self.steady_until_s

    def cut_or_heal(self, node: Node) -> None:
        if node.link.is_cut:
            node.heal()
        elif not self.is_steady():
            node.link.cut(hangs=self.dice.random() < 0.5)

    def kill(self, node: Node) -> None:
        if not self.is_steady():
            node.stop(signal.SIGKILL)
            node.begin()

    def lose_power(self, node: Node) -> None:
        if not self.is_steady():
            node.lose_power()

    def break_store(self, node: Node) -> None:
        if self.is_steady():
            return
        what = self.dice.choice(["copy", "copy", "kill", "older", "older", "empty"])
        if what == "copy":
            self.store.copy()
        elif what == "older":
            self.all_well()
            self.store.put_back(self.dice)
            self.steady_until_s = time.monotonic() + HEAL_S
        elif what == "empty":
            self.store.empty()
        else:
            self.store.kill()
            time.sleep(self.dice.random())
            self.store.come_back()
        if what in ("older", "kill"):
            for one in self.nodes:
                one.unreached_until_s = time.monotonic() + HEAL_S
        self.count(f"store_{what}")

    def count(self, what: str) -> None:
        self.findings.done[what] = self.findings.done.get(what, 0) + 1

    def all_well(self) -> None:
        for node in self.nodes:
            if node.is_stopped:
                node.resume()
            if node.link.is_cut:
                node.heal()
        time.sleep(max(0.0, max(one.unreached_until_s for one in self.nodes) - time.monotonic()))
        for node in self.nodes:
            self.load(node)

    def engine(self, node: Node) -> PagedEngine:
        assert node.engine is not None and node.engine.session.wait_connected(CALL_S)
        return node.engine


class ValkeyStore:
    """A kill loses all writes since the last snapshot."""

    def __init__(self, folder: Path) -> None:
        from tests.tiers.valkey_support import Server

        folder.mkdir()
        self._folder = folder
        self._server = Server(folder)
        self.target = self._server.path
        self._copies: list[bytes] = []
        self.is_up = True

    def flags(self, port: int) -> list[str]:
        address = f"127.0.0.1:{port}"
        hasty = constant("tiers.valkey.tier.TIMEOUTS", "Timeouts(1.0, 1.0)")
        return ["--tiers.valkey.address", address, *hasty]

    def _file(self) -> Path:
        config = self._server.client.config_get("*")
        return Path(config["dir"]) / config["dbfilename"]

    def copy(self) -> None:
        self._server.client.save()
        self._copies.append(self._file().read_bytes())

    def put_back(self, dice: random.Random) -> None:
        if not self._copies:
            self.copy()
        path = self._file()
        self._server.kill()
        path.write_bytes(dice.choice(self._copies))
        self._server.start()

    def empty(self) -> None:
        self._server.client.flushall()

    def kill(self) -> None:
        self._server.client.save()
        self._server.kill()
        self.is_up = False

    def come_back(self) -> None:
        self._server.start()
        self.is_up = True

    def close(self) -> None:
        self._server.close()


def campaign(
    seed: int, num_nodes: int, num_flushes: int, seconds: float = float("inf")
) -> Findings:
    with (
        tempfile.TemporaryDirectory(prefix="hotkv-flushes-") as name,
        contextlib.closing(ValkeyStore(Path(name) / "store")) as store,
        Campaign(seed, store, Path(name), num_nodes) as running,
    ):
        return running.run(num_flushes, seconds)


def main() -> bool:
    parser = argparse.ArgumentParser(description="The flush campaign.")
    parser.add_argument("--flushes", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"))
    parser.add_argument("--nodes", type=int, default=3)
    chosen = parser.parse_args()
    found = campaign(chosen.seed, chosen.nodes, chosen.flushes, chosen.seconds)
    print(json.dumps(asdict(found), indent=2))
    return bool(found.stale)


if __name__ == "__main__":
    raise SystemExit(main())
