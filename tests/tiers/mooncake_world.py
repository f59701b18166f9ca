"""`python -m tests.tiers.mooncake_world CHECK` runs a check of CHECKS against a real Mooncake
Store, in a network namespace of its own (`unshare -n`): Mooncake listens on all interfaces. Its
master and the memory's owner are children that end with this process."""

import contextlib
import importlib.util
import logging
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hotkv_server.dataplane.plan import Region
from hotkv_server.settings.tiers import MooncakeSettings
from hotkv_server.tiers.compression.form import encoded_key
from hotkv_server.tiers.drive.breaker import MAX_STALL_S, Breaker
from hotkv_server.tiers.mooncake.tier import TIMEOUTS, mooncake_tier
from hotkv_server.tiers.mooncake.words import generation_key, quoted
from hotkv_server.tiers.protocol import Read, Write
from hotkv_server.tiers.remote import workers
from tests.contracts import flush_contract
from tests.contracts.tier_contract import (
    ARENA_BYTES,
    SLOT_BYTES,
    Bench,
    TierRig,
    check_many,
    check_tier,
    key,
)
from tests.server.sharing import SharingNode, check_sharing, node
from tests.server.support import PATIENT, hashes
from tests.support.waiting import end_with_the_parent, stop, wait_for
from tests.tiers.mooncake_owner import MASTER, set_up
from tests.tiers.support import Asked, timeouts_of

CLIENT_PORT, OWNER_PORT = 17001, 17002
FLAGS = ("--tiers.mooncake.master", MASTER, "--tiers.mooncake.local-hostname", "127.0.0.1")
OWNED_BYTES = 64 << 20


class World:
    """A Mooncake Store: its master and the owner of its memory. `client` is independent of
    hotkv's code."""

    def __init__(self, owned_bytes: int = OWNED_BYTES) -> None:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        self._owned_bytes = owned_bytes
        self.start_master()
        self.start_owner()
        self.client = set_up(f"127.0.0.1:{CLIENT_PORT}", 0)

    def start_owner(self) -> None:
        command = [sys.executable, "-m", "tests.tiers.mooncake_owner"]
        self.owner = subprocess.Popen(
            [*command, f"127.0.0.1:{OWNER_PORT}", str(self._owned_bytes)],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, preexec_fn=end_with_the_parent,
        )  # fmt: skip
        assert self.owner.stdout is not None and self.owner.stdout.readline() == b"owns\n"

    def kill_owner(self) -> None:
        self.owner.kill()
        self.owner.wait()

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
        self.kill_owner()

    def damage(self, name: bytes, at: int = 30) -> None:
        value = bytearray(self.client.get(quoted(name)))
        value[at] ^= 1
        self.replace(name, bytes(value))

    def replace(self, name: bytes, value: bytes) -> None:
        assert self.client.remove(quoted(name), True) == 0
        assert self.client.put(quoted(name), value) == 0


@contextlib.contextmanager
def rig(world: World, *, is_first: bool = True, **options: Any) -> Iterator[TierRig]:
    """is_first: empties the store.
    options: of the tier, also `connect_timeout_s` and `timeout_s`; by default one child, as each
        costs a third of a CPU second.
    """
    if is_first:
        world.client.remove_all(True)
    on_generation = options.pop("on_generation", lambda fingerprint, generation: None)
    fd = os.memfd_create("arena")
    os.ftruncate(fd, ARENA_BYTES)
    memory = np.frombuffer(mmap.mmap(fd, ARENA_BYTES), np.uint8)
    arena = Region(memory.ctypes.data, ARENA_BYTES, "arena")
    timeouts = timeouts_of(options, TIMEOUTS)
    options = {"children": 1, **options}
    settings = MooncakeSettings(master=MASTER, local_hostname="127.0.0.1", **options)
    tier = mooncake_tier(arena, fd, settings, on_generation=on_generation, timeouts=timeouts)
    try:
        yield TierRig(tier, arena, lambda name, at: world.damage(name))
    finally:
        tier.close()
        os.close(fd)


def check_one_node() -> None:
    world = World()
    check_tier(lambda: rig(world), seed=1)
    check_many(lambda: rig(world, children=2), seed=1)
    checksums(world)
    check_flushes(world)


def check_dead_processes() -> None:
    world = World()
    check_orphans(world)
    check_faults(world)


def check_compressed() -> None:
    # Its kernels take a while to load.
    from tests.tiers import encodings

    world = World()
    settings = MooncakeSettings(master=MASTER, local_hostname="127.0.0.1", children=1)
    fd = os.memfd_create("arena")
    os.ftruncate(fd, encodings.ARENA_BYTES)
    memory = np.frombuffer(mmap.mmap(fd, encodings.ARENA_BYTES), np.uint8)
    arena = Region(memory.ctypes.data, encodings.ARENA_BYTES, "arena")

    def make() -> contextlib.AbstractContextManager[TierRig]:
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


def checksums(world: World) -> None:
    """Values with a wrong size or version, or of another key, are refused."""
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
    """Without two nodes at the same time: with Mooncake one may have to retry, which the checks
    don't expect."""

    @contextlib.contextmanager
    def node(**options: Any) -> Iterator[Bench]:
        with rig(world, is_first=False, **options) as one:
            yield Bench(one)

    store = flush_contract.SharedStore(
        node,
        lambda: world.client.remove(quoted(generation_key(flush_contract.NAME).encode()), True),
    )
    for check in (
        flush_contract.check_generations,
        flush_contract.check_reads,
        flush_contract.check_lost,
        flush_contract.check_closed,
    ):
        check(store)
        store.lose()


def check_full() -> None:
    """Two nodes write more than fits: each block is STORED or FULL, the last stored one is
    found, the generation stays. After a flush that at last succeeds, no older block is found."""
    for num_mib in (16, 32):
        world = World(num_mib << 20)
        with rig(world) as first, rig(world, is_first=False) as second:
            _fill([Bench(first), Bench(second)], num_mib)
        world.close()


def _fill(benches: Sequence[Bench], num_mib: int) -> None:
    one, other = benches
    before = flush_contract.generation(one.tier)
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
    assert flush_contract.generation(other.tier) == before
    keys = flush_contract.keys_of(before, 4)
    other.fill(range(4), range(4))
    flush_contract.answer(lambda done: other.tier.write(
        flush_contract.blocks_of(keys, 0, {}), lambda codes, seals: done(codes)))  # fmt: skip
    raised = flush_contract.flush(one.tier)
    if raised is None:
        # No room yet for the new generation.
        wait_for(lambda: flush_contract.flush(one.tier) is not None)
    for bench in benches:
        found = flush_contract.read(bench.tier, keys, {flush_contract.NAME: before})
        assert found == [Read.ABSENT] * 4, found


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def check_faults(world: World) -> None:
    """While owner or master is stopped, or children are killed: calls fail in time, no slot
    changes after its call, and blocks are found again afterwards."""
    # A new child may end a problem before it is looked for; the log keeps it.
    said = Said()
    logging.getLogger(workers.__name__).addHandler(said)
    with rig(world, children=2, timeout_s=0.5, connect_timeout_s=30.0) as one:
        bench = Bench(one)
        bench.fill([1, 2], [0, 1])
        wait_for(lambda: bench.write([1], [0]).tolist() in ([Write.STORED], [Write.PRESENT]))
        for process in (world.owner, world.master):
            stop(process.pid)
            said.lines.clear()
            assert bench.read([1], [5]).tolist() == [Read.FAILED]
            assert any("has not answered in time" in line for line in said.lines), said.lines
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
        wait_for(lambda: not set(children) & set(children_of_this()), "a child lives on")
    with rig(world, is_first=False, timeout_s=60.0, connect_timeout_s=30.0) as one:
        bench = Bench(one)
        asked = Asked(bench)
        wait_for(lambda: bench.read([1], [6]).tolist() == [Read.FOUND])
        # As long as the read may still end, the tier must not count as hung.
        stop(world.owner.pid)
        asked.read("long", [1], [7])
        wait_for(lambda: one.tier.stalled_s(time.monotonic()) > MAX_STALL_S)
        assert not Breaker(one.tier).hangs
        os.kill(world.owner.pid, signal.SIGCONT)
        assert asked.wait("long") == [Read.FOUND]
    with rig(world, is_first=False, timeout_s=0.5, connect_timeout_s=4.0) as one:
        bench = Bench(one)
        wait_for(lambda: bench.read([1], [6]).tolist() == [Read.FOUND])
        world.master.kill()
        assert bench.read([1], [7]).tolist() == [Read.FAILED]
        # A problem only once the next child can't connect either.
        wait_for(one.tier.problem)
        assert "mooncake at" in one.tier.problem()
        assert bench.write([2], [1]).tolist() == [Write.FAILED]


def check_daemons() -> None:
    world = World()
    with node() as a, node() as b:
        check_sharing(*(one.start_sharing(*FLAGS, *PATIENT) for one in (a, b)))
    world.close()


def check_owner_restarts() -> None:
    world = World()
    _check_shared_after(lambda: (world.kill_owner(), world.start_owner()))


def check_master_restarts() -> None:
    world = World()
    _check_shared_after(lambda: (world.kill_master(), world.start_master()))


def _check_shared_after(restart: Callable[[], object]) -> None:
    with node() as a, node() as b:
        for one in (a, b):
            one.start_sharing(*FLAGS, *PATIENT)
        wait_for(partial(is_shared, a, b))
        restart()
        wait_for(partial(is_shared, a, b), "blocks are not shared", 240.0)


def is_shared(one: SharingNode, other: SharingNode) -> bool:
    """Retry with new blocks: a node gives up those that it could not copy."""
    before, chain, until_s = one.num_copied(), hashes(4), time.monotonic() + 2.0
    content = one.put(chain)
    while time.monotonic() < until_s:
        if one.num_copied() >= before + len(chain) and other.loads(chain, content):
            return True
        time.sleep(0.05)
    return False


def check_orphans(world: World) -> None:
    command = [sys.executable, "-m", "tests.tiers.mooncake_orphan"]
    daemon = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert daemon.returncode == -signal.SIGKILL
    wait_for(lambda: not Path(f"/proc/{int(daemon.stdout)}/cmdline").exists()
             or not Path(f"/proc/{int(daemon.stdout)}/cmdline").read_bytes())  # fmt: skip
    assert world.master.poll() is None


def children_of_this() -> list[int]:
    listed = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = [int(pid) for file in listed for pid in file.read_text().split()]
    return [pid for pid in pids if b"mooncake.child" in Path(f"/proc/{pid}/cmdline").read_bytes()]


CHECKS: dict[str, Callable[[], None]] = {
    "compressed": check_compressed,
    "one node": check_one_node,
    "dead processes": check_dead_processes,
    "daemons": check_daemons,
    "owner restarts": check_owner_restarts,
    "master restarts": check_master_restarts,
    "full": check_full,
}


def main() -> int:
    os.environ["MC_TCP_BIND_ADDRESS"] = "127.0.0.1"
    CHECKS[sys.argv[1]]()
    print("passed", flush=True)
    # The native client's threads do not end.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
