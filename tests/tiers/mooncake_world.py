"""`python -m tests.tiers.mooncake_world CHECK`: runs a check against a real Mooncake Store. Needs
its own network namespace (`unshare -n`), since Mooncake's ports listen on all interfaces.

The master, and the owner of the store's memory, are child processes; both end with this process.
"""

import contextlib
import importlib.util
import itertools
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hotkv_client import GroupHashes, LoadRun, TransferStatus
from hotkv_client.admin import AdminClient
from hotkv_server.dataplane.plan import Region
from hotkv_server.settings.tiers import MooncakeSettings
from hotkv_server.testing import flush_contract
from hotkv_server.testing.tier_contract import (
    ARENA_BYTES,
    SLOT_BYTES,
    Bench,
    Rig,
    check_many,
    check_tier,
    key,
)
from hotkv_server.tiers.book.epochs import CONFIRMED_S
from hotkv_server.tiers.compression.form import encoded_key
from hotkv_server.tiers.mooncake.tier import mooncake_tier
from hotkv_server.tiers.mooncake.words import epoch_key, quoted
from hotkv_server.tiers.protocol import Read, Write
from tests.server.places import found
from tests.server.sharing import SharingNode, check_sharing, node
from tests.server.support import PATIENT, hashes
from tests.support.waiting import end_with_the_parent, stop, wait_for
from tests.tiers.mooncake_owner import MASTER, set_up

CLIENT_PORT, OWNER_PORT = 17001, 17002
OWNED_BYTES = 64 << 20


class World:
    """Runs the processes. `client`: an independent client, to read and change values."""

    def __init__(self, owned_bytes: int = OWNED_BYTES, num_owners: int = 1) -> None:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        self._owned_bytes = owned_bytes
        self.start_master()
        self.owners: list[subprocess.Popen[bytes]] = []
        for number in range(num_owners):
            self.start_owner(number)
        self.client = set_up(f"127.0.0.1:{CLIENT_PORT}", 0)

    def start_owner(self, number: int = 0) -> None:
        """Starts a process that provides memory to the store, again or for the first time."""
        command = [sys.executable, "-m", "tests.tiers.mooncake_owner"]
        owner = subprocess.Popen(
            [*command, f"127.0.0.1:{OWNER_PORT + number}", str(self._owned_bytes)],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, preexec_fn=end_with_the_parent,
        )  # fmt: skip
        assert owner.stdout is not None and owner.stdout.readline() == b"owns\n"
        self.owners[number : number + 1] = [owner]

    def kill_owner(self, number: int = 0) -> None:
        self.owners[number].kill()
        self.owners[number].wait()

    def start_master(self) -> None:
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None and spec.origin is not None
        binary = Path(spec.origin).parent / "mooncake_master"
        self.master = subprocess.Popen(
            [str(binary), "--rpc_port=50051", "--metrics_port=9004"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=end_with_the_parent,
        )  # fmt: skip

    def kill_master(self) -> None:
        self.master.kill()
        self.master.wait()

    def close(self) -> None:
        self.client.close()
        self.kill_master()
        for number in range(len(self.owners)):
            self.kill_owner(number)

    def damage(self, name: bytes, at: int = 30) -> None:
        value = bytearray(self.client.get(quoted(name)))
        value[at] ^= 1
        self.replace(name, bytes(value))

    def replace(self, name: bytes, value: bytes) -> None:
        assert self.client.remove(quoted(name), True) == 0
        assert self.client.put(quoted(name), value) == 0


@contextlib.contextmanager
def rig(world: World, *, is_first: bool = True, **options: Any) -> Iterator[Rig]:
    """Yields a node's rig. `is_first` empties the store. A rig has a single child unless `children`
    says otherwise, because each takes a third of a processor second to start."""
    if is_first:
        world.client.remove_all(True)
    on_epoch = options.pop("on_epoch", lambda fingerprint, epoch: None)
    fd = os.memfd_create("arena")
    os.ftruncate(fd, ARENA_BYTES)
    memory = np.frombuffer(mmap.mmap(fd, ARENA_BYTES), np.uint8)
    arena = Region(memory.ctypes.data, ARENA_BYTES, "arena")
    options = {"children": 1, **options}
    settings = MooncakeSettings(master=MASTER, local_hostname="127.0.0.1", **options)
    tier = mooncake_tier(arena, fd, settings, on_epoch=on_epoch)
    try:
        yield Rig(tier, arena, lambda name, at: world.damage(name))
    finally:
        tier.close()
        os.close(fd)


def check_one_node() -> None:
    """Checks that the tier keeps the contract, refuses foreign values, flushes, and outlives the
    faults of the store's parts."""
    world = World()
    check_tier(lambda: rig(world), seed=1)
    check_many(lambda: rig(world, children=2), seed=1)
    check_values(world)
    check_flushes(world)
    check_orphans(world)
    check_faults(world)


def check_compressed() -> None:
    """Checks that a tier that encodes keeps the contract, and that its children map the staging
    memory and, for blocks that are larger, the arena."""
    # Imported here, because kernels of encodings take a while to load.
    from tests.tiers import encodings

    world = World()
    settings = MooncakeSettings(master=MASTER, local_hostname="127.0.0.1", children=1)
    fd = os.memfd_create("arena")
    os.ftruncate(fd, encodings.ARENA_BYTES)
    memory = np.frombuffer(mmap.mmap(fd, encodings.ARENA_BYTES), np.uint8)
    arena = Region(memory.ctypes.data, encodings.ARENA_BYTES, "arena")

    def make() -> contextlib.AbstractContextManager[Rig]:
        world.client.remove_all(True)
        memory[:] = 0
        return encodings.encoding_rig(
            lambda arena, staged: mooncake_tier(arena, fd, settings, staged=staged),
            lambda name, at: world.damage(encoded_key(name)),
            content=encodings.compressible,
            arena=arena,
        )

    check_tier(make, seed=2)
    with make() as one:
        encodings.check_larger_blocks(Bench(one))


def check_values(world: World) -> None:
    """Checks that values of other sizes, versions and keys are refused."""
    with rig(world) as one:
        bench = Bench(one)
        bench.fill([1, 2, 3, 4], [0, 1, 2, 3])
        assert (bench.write([1, 2, 3, 4], [0, 1, 2, 3]) == Write.STORED).all()
        value = bytes(world.client.get(quoted(key(1))))
        assert value[24:] == bench.slot(0).tobytes()
        world.replace(key(1), value + bytes(8))
        world.replace(key(2), value[:-8])
        world.replace(key(3), value)
        world.replace(key(4), value[:4] + b"\2" + value[5:])
        codes = bench.read([1, 2, 3, 4], [4, 5, 6, 7]).tolist()
        assert codes == [Read.CORRUPT, Read.CORRUPT, Read.CORRUPT, Read.ABSENT], codes
        assert bench.probe([1, 2, 3]).tolist() == [Read.ABSENT] * 3


def check_flushes(world: World) -> None:
    """Checks flushes without races: when two nodes flush simultaneously, a node may have to
    retry."""

    @contextlib.contextmanager
    def node(**options: Any) -> Iterator[Bench]:
        with rig(world, is_first=False, **options) as one:
            yield Bench(one)

    store = flush_contract.Store(
        node, lambda: world.client.remove(quoted(epoch_key(flush_contract.NAME).encode()), True)
    )
    for check in (
        flush_contract.check_epochs,
        flush_contract.check_reads,
        flush_contract.check_lost,
        flush_contract.check_closed,
    ):
        check(store)
        store.lose()


def check_full() -> None:
    """Checks that a store too small for the writes of two nodes answers FULL, and that each block
    answered with STORED is found. The store keeps the epoch, and a flush in it counts on both nodes
    or has failed."""
    for num_mib in (16, 32):
        world = World(num_mib << 20)
        with rig(world) as first, rig(world, is_first=False) as second:
            _fill([Bench(first), Bench(second)], num_mib)
        world.close()


def _fill(benches: Sequence[Bench], num_mib: int) -> None:
    one, other = benches
    before = flush_contract.epoch(one.tier)
    assert before
    said: list[int] = []
    for number in range(0, 100 * num_mib, 32):
        bench, numbers = benches[number // 32 % 2], range(number, number + 32)
        bench.fill(numbers, range(32))
        codes = bench.write(numbers, range(32))
        stored = [n for n, code in zip(numbers, codes, strict=True) if code == Write.STORED]
        said += codes.tolist()
        if stored:
            assert (bench.read(stored[-1:], [40]) == Read.FOUND).all()
    assert set(said) <= {Write.STORED, Write.FULL}, set(said)
    assert said.count(Write.STORED) * SLOT_BYTES >= num_mib << 19
    assert flush_contract.epoch(other.tier) == before
    keys = flush_contract.keys_of(before, 4)
    other.fill(range(4), range(4))
    flush_contract.answer(lambda done: other.tier.write(
        flush_contract.blocks_of(keys, 0, {}), lambda codes, seals: done(codes)))  # fmt: skip
    raised = flush_contract.flush(one.tier)
    if raised is None:
        # The next try to flush may find room.
        wait_for(lambda: flush_contract.flush(one.tier) is not None)
    for bench in benches:
        found = flush_contract.read(bench.tier, keys, {flush_contract.NAME: before})
        assert found == [Read.ABSENT] * 4, found


def check_faults(world: World) -> None:
    """Checks that a master or an owner that hangs or dies costs hits: calls end in time, and slots
    stay unchanged."""
    with rig(world, children=2, timeout_s=0.5, connect_timeout_s=30.0) as one:
        bench = Bench(one)
        bench.fill([1, 2], [0, 1])
        wait_for(lambda: bench.write([1], [0]).tolist() in ([Write.STORED], [Write.PRESENT]))
        for process in (world.owners[0], world.master):
            stop(process.pid)
            assert bench.read([1], [5]).tolist() == [Read.FAILED]
            assert "has not answered in time" in one.tier.problem()
            before = bench.slot(5).copy()
            os.kill(process.pid, signal.SIGCONT)
            time.sleep(0.5)
            assert np.array_equal(bench.slot(5), before), "a slot changed after its call"
            wait_for(lambda: bench.read([1], [6]).tolist() == [Read.FOUND])
        children = children_of_this()
        assert children and one.tier.memory().held_bytes > len(children) << 20
        for pid in children:
            os.kill(pid, signal.SIGSEGV)
        wait_for(lambda: bench.read([1], [6]).tolist() == [Read.FOUND])
        assert not set(children) & set(children_of_this())
    with rig(world, is_first=False, timeout_s=0.5, connect_timeout_s=4.0) as one:
        bench = Bench(one)
        wait_for(lambda: bench.read([1], [6]).tolist() == [Read.FOUND])
        world.master.kill()
        assert bench.read([1], [7]).tolist() == [Read.FAILED]
        # A lost child does not mean a lost master. A next child that can't start does.
        wait_for(one.tier.problem)
        assert "mooncake at" in one.tier.problem()
        assert bench.write([2], [1]).tolist() == [Write.FAILED]


def check_daemons() -> None:
    World()
    with node() as a, node() as b:
        check_sharing(a.start_sharing(*Kills.FLAGS), b.start_sharing(*Kills.FLAGS))


@dataclass(frozen=True)
class Part:
    """A process of the world. `node`: the node if the process is its server."""

    name: str
    pid: Callable[[], int]
    kill: Callable[[], None]
    start: Callable[[], object]
    node: SharingNode | None = None


@dataclass(frozen=True)
class Chain:
    """Stored blocks, and their bytes [layer, block, byte]."""

    blocks: list[bytes]
    content: np.ndarray


class Kills:
    """Daemons over the store. Each part in turn is killed or stopped, also around a flush.

    Invariants: a node loads only the stored bytes. Once a flush has answered without pending tiers,
    or the store has a new epoch, no node loads an older block from the store. (Host memory may
    still have such a block, if its node could not ask the store since.) `heals`: once all parts run
    again, each node finds the blocks that the others store, and no node loads an older block.
    """

    FLAGS = (
        *("--tiers.mooncake.master", MASTER, "--tiers.mooncake.local-hostname", "127.0.0.1"),
        *PATIENT,
    )

    def __init__(self, world: World, nodes: Sequence[SharingNode], seed: int) -> None:
        self._world, self._nodes, self._dice = world, nodes, random.Random(seed)
        self._stored: list[Chain] = []
        self._gone: list[Chain] = []
        self.num_loads = 0
        for one in nodes:
            one.start_sharing(*self.FLAGS)
        self._fingerprint = self._told(nodes[0])
        self._epoch = b""
        self.heals()

    def _told(self, node: SharingNode) -> str:
        assert node.server is not None
        with AdminClient(node.server.target) as admin:
            (key_space,) = admin.key_spaces()
        return str(key_space["fingerprint"])

    def run(self, num_faults: int) -> None:
        faults = self._faults()
        for _ in range(num_faults):
            self.put(self._dice.choice(self._nodes))
            fault, part = next(faults)
            print(f"{fault.__name__} {part.name}", flush=True)
            fault(part)
            self.load_some()
            self.heals()
            # All nodes know the store's epoch by now.
            self.check_gone(self._gone[:2], self._nodes)
            self.check_gone(self._dice.sample(self._gone, min(2, len(self._gone))), self._nodes)

    def _faults(self) -> Iterator[tuple[Callable[[Part], None], Part]]:
        """Yields each kind of fault in turn. In the course of a run, each kind hits each part."""
        kinds = [
            *(self.kill, self.kill_child, self.stop),
            *(self.flush_then_kill, self.flush_while_stopped, self.flush_while_dead),
        ]
        parts = list(self._parts())
        while True:
            of_kinds = [self._dice.sample(parts, len(parts)) for _ in kinds]
            for of_turn in zip(*of_kinds, strict=True):
                yield from self._dice.sample(list(zip(kinds, of_turn, strict=True)), len(kinds))

    def _parts(self) -> Iterator[Part]:
        world = self._world
        for number, one in enumerate(self._nodes):
            start = partial(one.start_sharing, *self.FLAGS)
            yield Part(f"node {number}", partial(_pid, one), one.stop, start, one)
        for number in range(len(world.owners)):
            pid = partial(lambda at: world.owners[at].pid, number)
            kill, start_again = (
                partial(act, number) for act in (world.kill_owner, world.start_owner)
            )
            yield Part(f"owner {number}", pid, kill, start_again)
        yield Part("master", lambda: world.master.pid, world.kill_master, world.start_master)

    def running(self, without: SharingNode | None = None) -> list[SharingNode]:
        return [node for node in self._nodes if node is not without]

    def put(self, node: SharingNode) -> Chain:
        blocks = hashes(4)
        self._stored.append(Chain(blocks, node.put(blocks)))
        return self._stored[-1]

    def load_some(self, without: SharingNode | None = None) -> None:
        for chain in self._dice.sample(self._stored, min(4, len(self._stored))):
            self.load(self._dice.choice(self.running(without)), chain)

    def load(self, node: SharingNode, chain: Chain) -> int:
        """Loads blocks. Returns their number. Raises AssertionError if bytes are wrong."""
        engine = node.engine
        assert engine is not None and engine.session.wait_connected(60)
        engine.kv[:] = 0
        name = os.urandom(8).hex()
        found(engine, chain.blocks)
        lease = engine.session.acquire(name, [GroupHashes(0, chain.blocks)]).result(60)
        at = np.flatnonzero(lease.pinned[0]).astype(np.int32)
        is_done = False
        if len(at):
            result = engine.session.load(name, name, [LoadRun(0, at, at)], 60).result(90)
            is_done = result.status is TransferStatus.DONE
        engine.session.release(name)
        if not is_done:
            return 0
        assert np.array_equal(engine.kv[:, at], chain.content[:, at]), "wrong bytes"
        self.num_loads += 1
        return len(at)

    def heals(self) -> None:
        for one, other in itertools.permutations(self._nodes, 2):
            try:
                wait_for(partial(self._is_shared, one, other), "blocks are not shared", 240.0)
            except AssertionError:
                self._say_why()
                raise

    def _say_why(self) -> None:
        """Prints the nodes' states of the store, and the ends of their logs."""
        print(f"epoch: {self.epoch()!r}", flush=True)
        for one in self._nodes:
            assert one.server is not None
            with AdminClient(one.server.target) as admin:
                print(admin.tiers(), flush=True)
                counters = admin.info()["counters"]
            shared = {name: n for name, n in counters.items() if name.startswith("shared_")}
            print(shared, flush=True)
            print((one.folder / "hotkv-server.log").read_text()[-2000:], flush=True)

    def _is_shared(self, one: SharingNode, other: SharingNode) -> bool:
        before, chain = one.num_copied(), self.put(one)
        until_s = time.monotonic() + 2.0
        while time.monotonic() < until_s:
            if one.num_copied() >= before + 4 and self.load(other, chain) == 4:
                return True
            time.sleep(0.05)
        return False

    # Flushes

    def flush(self, without: SharingNode | None = None) -> Callable[[], None]:
        """Flushes on a node. Returns a check that no older block is loaded. If the flush is
        pending, the check must wait until all parts run.

        The check leaves out blocks in host memory of nodes that have not asked the store.
        """
        node = self._dice.choice(self.running(without))
        chains, self._stored = self._stored, []
        nodes = [node]
        for one in self.running(without):
            if one is not node and self._dice.random() < 0.7:
                assert one.server is not None
                with AdminClient(one.server.target) as admin:
                    admin.evict(everything=True)
                nodes.append(one)
        before = self._epoch
        assert node.engine is not None
        pending = node.engine.session.flush().result(90).pending_tiers
        print(f"  flushed, pending: {list(pending)}", flush=True)
        some = self._dice.sample(chains, min(4, len(chains)))
        self._gone = chains + self._gone

        def check() -> None:
            if pending:
                wait_for(lambda: self.epoch() not in (b"", before), "a new epoch", 240.0)
                time.sleep(2 * CONFIRMED_S)
            self.check_gone(some, nodes)

        if not pending:
            check()
        return check

    def epoch(self) -> bytes:
        """Returns the epoch in the store; empty if it can't be read."""
        return bytes(self._world.client.get(epoch_key(self._fingerprint)))

    def check_gone(self, chains: Sequence[Chain], nodes: Sequence[SharingNode]) -> None:
        for one, chain in itertools.product(nodes, chains):
            assert self._lacks(one, chain), "a flushed block is loaded"

    def _lacks(self, node: SharingNode, chain: Chain) -> bool:
        return not self.load(node, chain)

    # Faults

    def kill(self, part: Part) -> None:
        part.kill()
        self.load_some(part.node)
        part.start()

    def kill_child(self, part: Part) -> None:
        """Kills the children of a node's tier."""
        node = part.node or self._dice.choice(self._nodes)
        assert node.server is not None
        for pid in children_of(node.server.pid):
            os.kill(pid, signal.SIGKILL)

    def stop(self, part: Part) -> None:
        with stopped(part):
            self.load_some(part.node)

    def flush_then_kill(self, part: Part) -> None:
        self._epoch = self.epoch()
        check = self.flush()
        part.kill()
        self.load_some(part.node)
        part.start()
        check()

    def flush_while_stopped(self, part: Part) -> None:
        self._epoch = self.epoch()
        with stopped(part):
            check = self.flush(part.node)
        check()

    def flush_while_dead(self, part: Part) -> None:
        self._epoch = self.epoch()
        part.kill()
        check = self.flush(part.node)
        part.start()
        check()


def _pid(node: SharingNode) -> int:
    assert node.server is not None
    return node.server.pid


@contextlib.contextmanager
def stopped(part: Part) -> Iterator[None]:
    """Stops the part until the context ends."""
    pid = part.pid()
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def check_kills(seed: int = 1, num_faults: int = 6) -> None:
    """Checks that killing or stopping any single part costs hits only."""
    with node() as a, node() as b:
        kills = Kills(World(num_owners=2), (a, b), seed)
        kills.run(num_faults)
        print(f"{kills.num_loads} loads", flush=True)


def check_orphans(world: World) -> None:
    """Checks that a child ends with its daemon, however the daemon ends."""
    command = [sys.executable, "-m", "tests.tiers.mooncake_orphan"]
    daemon = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert daemon.returncode == -signal.SIGKILL
    wait_for(lambda: not Path(f"/proc/{int(daemon.stdout)}/cmdline").exists()
             or not Path(f"/proc/{int(daemon.stdout)}/cmdline").read_bytes())  # fmt: skip
    assert world.master.poll() is None


def children_of_this() -> list[int]:
    """Returns the process ids of this process's Mooncake children."""
    return children_of(os.getpid())


def children_of(parent: int) -> list[int]:
    listed = Path(f"/proc/{parent}/task").glob("*/children")
    pids = [int(pid) for file in listed for pid in file.read_text().split()]
    return [pid for pid in pids if b"mooncake.child" in Path(f"/proc/{pid}/cmdline").read_bytes()]


CHECKS: dict[str, Callable[..., None]] = {
    "compressed": check_compressed,
    "one node": check_one_node,
    "daemons": check_daemons,
    "kills": check_kills,
    "full": check_full,
}


def main() -> int:
    os.environ["MC_TCP_BIND_ADDRESS"] = "127.0.0.1"
    CHECKS[sys.argv[1]](*map(int, sys.argv[2:]))
    print("passed", flush=True)
    # The native client's threads do not end by themselves.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
