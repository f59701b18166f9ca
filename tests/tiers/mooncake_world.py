"""`python -m tests.tiers.mooncake_world CHECK`: runs a check against a real Mooncake Store, in a
network namespace of its own (`unshare -n`), since Mooncake's ports listen on all interfaces.

A master, and an owner that gives memory, are child processes; both end with this one.
"""

import contextlib
import ctypes
import importlib.util
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hotkv_client import GroupHashes, LoadRun, TransferStatus
from hotkv_server.dataplane.plan import Region
from hotkv_server.settings.tiers import MooncakeSettings
from hotkv_server.testing import flush_contract
from hotkv_server.testing.tier_contract import ARENA_BYTES, SLOT_BYTES, Bench, Rig, check_tier, key
from hotkv_server.tiers.compression.form import encoded_key
from hotkv_server.tiers.mooncake.tier import MooncakeClient, mooncake_tier
from hotkv_server.tiers.mooncake.words import epoch_key, quoted
from hotkv_server.tiers.protocol import Read, Write
from tests.server.places import found
from tests.server.sharing import SharingNode, check_sharing, node
from tests.server.support import PATIENT, block_ids, hashes
from tests.support.waiting import stop, wait_for
from tests.tiers.encodings import compressible, encoding_rig

MASTER, OWNER = "127.0.0.1:50051", "127.0.0.1:17001"
OWNED_BYTES = 64 << 20
WAIT_S = 60.0


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class World:
    """The processes, and a client of its own that looks at values and changes them."""

    def __init__(self, owned_bytes: int = OWNED_BYTES) -> None:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        self._owned_bytes = owned_bytes
        self.master = self.start_master()
        self.owner = self.start_owner()
        self.client = set_up("127.0.0.1:17002", 0)

    def start_owner(self) -> "subprocess.Popen[bytes]":
        """Starts a process that gives memory to the store, again or for the first time."""
        self.owner = subprocess.Popen(
            [sys.executable, "-m", "tests.tiers.mooncake_world", "own", str(self._owned_bytes)],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, preexec_fn=end_with_parent,
        )  # fmt: skip
        assert self.owner.stdout is not None and self.owner.stdout.readline() == b"owns\n"
        return self.owner

    def start_master(self) -> "subprocess.Popen[bytes]":
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None and spec.origin is not None
        binary = Path(spec.origin).parent / "mooncake_master"
        self.master = subprocess.Popen(
            [str(binary), "--rpc_port=50051", "--metrics_port=9004"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=end_with_parent,
        )  # fmt: skip
        return self.master

    def damage(self, name: bytes, at: int = 30) -> None:
        value = bytearray(self.client.get(quoted(name)))
        value[at] ^= 1
        self.replace(name, bytes(value))

    def replace(self, name: bytes, value: bytes) -> None:
        assert self.client.remove(quoted(name), True) == 0
        assert self.client.put(quoted(name), value) == 0


def set_up(hostname: str, owned_bytes: int) -> Any:
    from mooncake.store import MooncakeDistributedStore

    until_s = time.monotonic() + WAIT_S
    while True:
        store = MooncakeDistributedStore()
        if not store.setup(hostname, "P2PHANDSHAKE", owned_bytes, 16 << 20, "tcp", "", MASTER):
            return store
        assert time.monotonic() < until_s, "the master does not answer"
        time.sleep(0.1)


@contextlib.contextmanager
def rig(world: World, *, is_first: bool = True, **options: Any) -> Iterator[Rig]:
    """A node; the store is empty if it is the first."""
    if is_first:
        world.client.remove_all(True)
    on_epoch = options.pop("on_epoch", lambda fingerprint, epoch: None)
    fd = os.memfd_create("arena")
    os.ftruncate(fd, ARENA_BYTES)
    memory = np.frombuffer(mmap.mmap(fd, ARENA_BYTES), np.uint8)
    arena = Region(memory.ctypes.data, ARENA_BYTES, "arena")
    settings = MooncakeSettings(master=MASTER, local_hostname="127.0.0.1", **options)
    tier = mooncake_tier(arena, fd, settings, on_epoch=on_epoch)
    try:
        yield Rig(tier, arena, lambda name, at: world.damage(name))
    finally:
        tier.close()
        os.close(fd)


def check_contract() -> None:
    world = World()
    check_tier(lambda: rig(world), seed=1)


def check_compressed() -> None:
    """A tier that encodes keeps the contract: the children map its staging memory."""
    world = World()
    settings = MooncakeSettings(master=MASTER, local_hostname="127.0.0.1")

    def make() -> contextlib.AbstractContextManager[Rig]:
        world.client.remove_all(True)
        return encoding_rig(
            lambda arena, staged: mooncake_tier(arena, -1, settings, staged=staged),
            lambda name, at: world.damage(encoded_key(name)),
            content=compressible,
        )

    check_tier(make, seed=2)


def check_values() -> None:
    """Values of other sizes, versions and keys are refused."""
    world = World()
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


def check_flushes() -> None:
    """But for races: of two nodes that flush at the same time one may have to retry."""
    world = World()

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
    """A store that has no room says so, and what it says is STORED is there."""
    world = World(16 << 20)
    with rig(world) as one:
        bench, said = Bench(one), []
        for number in range(0, 1600, 32):
            numbers = range(number, number + 32)
            bench.fill(numbers, range(32))
            codes = bench.write(numbers, range(32))
            stored = [n for n, code in zip(numbers, codes, strict=True) if code == Write.STORED]
            said += codes.tolist()
            if stored:
                assert (bench.read(stored[-1:], [40]) == Read.FOUND).all()
        assert set(said) <= {Write.STORED, Write.FULL}, set(said)
        assert said.count(Write.STORED) * SLOT_BYTES >= 8 << 20


def check_faults() -> None:
    """A master or an owner that hangs or dies costs hits: calls end in time, slots stay."""
    world = World()
    with rig(world, timeout_s=0.5, connect_timeout_s=1.0) as one:
        bench = Bench(one)
        bench.fill([1, 2], [0, 1])
        wait_for(lambda: bench.write([1], [0]).tolist() in ([Write.STORED], [Write.PRESENT]))
        for process in (world.owner, world.master):
            stop(process.pid)
            assert bench.read([1], [5]).tolist() == [Read.FAILED]
            assert "has not answered in time" in one.tier.problem()
            before = bench.slot(5).copy()
            os.kill(process.pid, signal.SIGCONT)
            time.sleep(0.5)
            assert np.array_equal(bench.slot(5), before), "a slot changed after its call"
            wait_for(lambda: bench.read([1], [6]).tolist() == [Read.FOUND])
        children = children_of_this()
        assert children
        for pid in children:
            os.kill(pid, signal.SIGSEGV)
        wait_for(lambda: bench.read([1], [6]).tolist() == [Read.FOUND])
        assert not set(children) & set(children_of_this())
        world.master.kill()
        assert bench.read([1], [7]).tolist() == [Read.FAILED]
        # A child that is lost says nothing of the master; the next one does.
        wait_for(lambda: bench.read([1], [7]).tolist() == [Read.FAILED] and one.tier.problem())
        assert "mooncake at" in one.tier.problem()
        assert bench.write([2], [1]).tolist() == [Write.FAILED]


def check_daemons() -> None:
    """Two daemons share the store."""
    World()
    # On a busy machine the store takes longer to read than a request usually waits.
    flags = (*Kills.FLAGS, *PATIENT)
    with node() as a, node() as b:
        check_sharing(a.start_sharing(*flags), b.start_sharing(*flags))


class Kills:
    """Two daemons over the store, of which any part is killed or stopped at any time.

    Always true: what a node loads has the bytes that were stored, and a flushed block is never
    loaded on the node that has flushed. `heals`: once all parts run again, one node finds what the
    other stores.
    """

    FLAGS = ("--tiers.mooncake.master", MASTER, "--tiers.mooncake.local-hostname", "127.0.0.1")

    def __init__(self, world: World, nodes: Sequence[SharingNode], seed: int) -> None:
        self._world, self._nodes, self._dice = world, nodes, random.Random(seed)
        self._chains: list[tuple[list[bytes], np.ndarray]] = []
        self.num_loads = 0
        for one in nodes:
            one.start_sharing(*self.FLAGS)

    def run(self, num_faults: int) -> None:
        for _ in range(num_faults):
            self.store()
            fault = self._dice.choice(
                [self.kill_daemon, self.kill_child, self.kill_owner, self.kill_master,
                 self.stop_owner, self.stop_master, self.flush]
            )  # fmt: skip
            print(fault.__name__, flush=True)
            fault()
            self.load_some()
            self.heals()

    def store(self) -> None:
        chain = hashes(4)
        self._chains.append((chain, self._dice.choice(self._nodes).put(chain)))

    def load_some(self) -> None:
        for chain, content in self._dice.sample(self._chains, min(4, len(self._chains))):
            self.load(self._dice.choice(self._nodes), chain, content)

    def load(self, node: SharingNode, chain: list[bytes], content: np.ndarray) -> bool:
        """Returns whether the node has all blocks. Raises AssertionError if bytes are wrong."""
        engine = node.engine
        assert engine is not None
        engine.kv[:] = 0
        name = os.urandom(8).hex()
        found(engine, chain)
        lease = engine.session.acquire(name, [GroupHashes(0, chain)]).result(60)
        is_whole = bool(lease.pinned[0].all())
        if is_whole:
            run = LoadRun(0, block_ids(len(chain)), block_ids(len(chain)))
            result = engine.session.load(name, name, [run], 20).result(60)
            is_whole = result.status is TransferStatus.DONE
            if is_whole:
                assert np.array_equal(engine.kv[:, : len(chain)], content), "wrong bytes"
                self.num_loads += 1
        engine.session.release(name)
        return is_whole

    def heals(self) -> None:
        one, other = self._dice.sample(self._nodes, 2)

        def is_shared() -> bool:
            chain = hashes(4)
            before = one.num_copied()
            content = one.put(chain)
            self._chains.append((chain, content))
            until_s = time.monotonic() + 2.0
            while time.monotonic() < until_s:
                if one.num_copied() >= before + len(chain) and self.load(other, chain, content):
                    return True
                time.sleep(0.05)
            return False

        wait_for(is_shared, "blocks are not shared", 120.0)

    # Faults

    def kill_daemon(self) -> None:
        node = self._dice.choice(self._nodes)
        node.stop()
        node.start_sharing(*self.FLAGS)

    def kill_child(self) -> None:
        node = self._dice.choice(self._nodes)
        assert node.server is not None
        for pid in children_of(node.server.pid):
            os.kill(pid, signal.SIGKILL)

    def kill_owner(self) -> None:
        self._world.owner.kill()
        self._world.owner.wait()
        self.load_some()
        self._world.start_owner()

    def kill_master(self) -> None:
        self._world.master.kill()
        self._world.master.wait()
        self.load_some()
        self._world.start_master()
        # Memory that an owner gave to the master before is not known to the next one.
        self._world.owner.kill()
        self._world.owner.wait()
        self._world.start_owner()

    def stop_owner(self) -> None:
        self._stop(self._world.owner.pid)

    def stop_master(self) -> None:
        self._stop(self._world.master.pid)

    def _stop(self, pid: int) -> None:
        stop(pid)
        self.load_some()
        os.kill(pid, signal.SIGCONT)

    def flush(self) -> None:
        node = self._dice.choice(self._nodes)
        assert node.engine is not None
        node.engine.session.flush().result(60)
        for chain, content in self._chains:
            assert not self.load(node, chain, content), "a flushed block is loaded"
        self._chains = []


def check_kills(seed: int = 1, num_faults: int = 5) -> None:
    world = World()
    with node() as a, node() as b:
        kills = Kills(world, (a, b), seed)
        kills.run(num_faults)
        print(f"{kills.num_loads} loads", flush=True)


def check_orphans() -> None:
    """A child ends with its daemon, however that ends."""
    world = World()
    command = [sys.executable, "-m", "tests.tiers.mooncake_world", "orphan"]
    daemon = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert daemon.returncode == -signal.SIGKILL
    wait_for(lambda: not Path(f"/proc/{int(daemon.stdout)}/cmdline").exists()
             or not Path(f"/proc/{int(daemon.stdout)}/cmdline").read_bytes())  # fmt: skip
    assert world.master.poll() is None


def leave_an_orphan() -> None:
    fd = os.memfd_create("arena")
    os.ftruncate(fd, ARENA_BYTES)
    arena = Region(0, ARENA_BYTES, "arena")
    settings = MooncakeSettings(master=MASTER, local_hostname="127.0.0.1")
    client = MooncakeClient(settings, arena, fd, time.monotonic() + WAIT_S)
    print(client._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def children_of_this() -> list[int]:
    """Pids of the tier's children."""
    return children_of(os.getpid())


def children_of(parent: int) -> list[int]:
    listed = Path(f"/proc/{parent}/task").glob("*/children")
    pids = [int(pid) for file in listed for pid in file.read_text().split()]
    return [pid for pid in pids if b"mooncake.child" in Path(f"/proc/{pid}/cmdline").read_bytes()]


CHECKS: dict[str, Callable[..., None]] = {
    "compressed": check_compressed,
    "contract": check_contract,
    "daemons": check_daemons,
    "kills": check_kills,
    "values": check_values,
    "flushes": check_flushes,
    "full": check_full,
    "orphans": check_orphans,
    "faults": check_faults,
}


def main() -> int:
    os.environ["MC_TCP_BIND_ADDRESS"] = "127.0.0.1"
    if sys.argv[1] == "own":
        end_with_parent()
        _store = set_up(OWNER, int(sys.argv[2]))
        print("owns", flush=True)
        signal.pause()
    if sys.argv[1] == "orphan":
        leave_an_orphan()
    CHECKS[sys.argv[1]](*map(int, sys.argv[2:]))
    print("passed", flush=True)
    # The native client's threads do not end by themselves.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
