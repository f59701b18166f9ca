"""`hotkv doctor` over hosts that are put together here: each fault is found, named and mended, and
a host that is in order is left in peace."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hotkv_client.command import cli, doctor
from hotkv_client.command.doctor import BAD, GOOD, UNKNOWN, WARN, Doors, Host

GIB = 1 << 30
VERSIONS = {
    "hotkv": "0.1.0",
    "grpcio": "1.71.2",
    "protobuf": "5.29",
    "numba": "0.61",
    "uvloop": "0.20",
    "vllm": "0.33.0",
}


OLD = Doors("0.33", (("own", False, "Request has no attribute id"), ("offloading", True, "fine")))


class Made:
    """A host in order: two NUMA nodes, a GPU, an arena with its server."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment: dict[str, str] = {}
        self.versions = dict(VERSIONS)
        self.shm = (32 * GIB, 30 * GIB)
        self.doors: Doors | None = Doors("0.33", (("own", True, "vLLM 0.33.0 is tested"),))
        self.write("proc/sys/kernel/osrelease", "6.8.0-50-generic")
        self.write("proc/meminfo", f"MemTotal:  {64 * GIB // 1024} kB")
        self.write("proc/self/limits", "Max locked memory         unlimited            unlimited")
        self.write("proc/cmdline", "quiet iommu=pt")
        self.write("proc/sys/kernel/numa_balancing", "0")
        self.write("proc/77/comm", "hotkv-server")
        self.write("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always [advise] deny")
        for path in ("sys/devices/system/node/node0", "sys/devices/system/node/node1", "dev"):
            (root / path).mkdir(parents=True)
        (root / "sys/class/iommu/dmar0").mkdir(parents=True)
        self.write("dev/nvidia0", "")
        self.write("run/hotkv/grpc.sock", "")
        self.arena("hotkv-mine", "77")

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def arena(self, name: str, pid: str) -> None:
        self.write(f"dev/shm/{name}/server.json", "{}")
        self.write(f"dev/shm/{name}/lock", pid + "\n")
        self.write(f"dev/shm/{name}/arena", "x" * 8192)

    def remove(self, path: str) -> None:
        (self.root / path).unlink()

    def findings(self) -> dict[str, doctor.Finding]:
        host = Host(
            self.root,
            self.environment,
            self.versions.get,
            lambda path: self.shm,
            lambda version: self.doors,
        )
        return {finding.check: finding for finding in doctor.examine(host)}


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


def test_a_host_in_order_is_left_in_peace(made: Made) -> None:
    found = made.findings()
    assert {finding.state for finding in found.values()} == {GOOD}, found
    assert not any(finding.mend for finding in found.values())
    assert len(found) == len(doctor.CHECKS)


Fault = Callable[[Made], None]
FAULTS: dict[str, tuple[Fault, str, str, str]] = {
    "an old kernel": (
        lambda host: host.write("proc/sys/kernel/osrelease", "5.15.0"), "kernel", WARN, ""
    ),
    "no huge pages": (
        lambda host: host.write(
            "sys/kernel/mm/transparent_hugepage/shmem_enabled", "always advise [deny]"
        ),
        "huge pages", BAD, "echo advise",
    ),
    "little locked memory": (
        lambda host: host.write("proc/self/limits", "Max locked memory   8388608   8388608 bytes"),
        "locked memory", WARN, "ulimit -l unlimited",
    ),
    "a container's /dev/shm": (
        lambda host: setattr(host, "shm", (64 << 20, 64 << 20)), "/dev/shm", BAD, "docker run"
    ),
    "a small /dev/shm": (
        lambda host: setattr(host, "shm", (8 * GIB, 8 * GIB)), "/dev/shm", WARN, "remount,size="
    ),
    "pages that move": (
        lambda host: host.write("proc/sys/kernel/numa_balancing", "1"),
        "NUMA", WARN, "sysctl -w kernel.numa_balancing=0",
    ),
    "an IOMMU that translates": (
        lambda host: host.write("proc/cmdline", "quiet"), "IOMMU", WARN, "iommu=pt"
    ),
    "an arena without its server": (
        lambda host: host.arena("hotkv-old", "78"), "arenas", WARN, "arenas --remove-stale"
    ),
    "no server": (
        lambda host: host.remove("run/hotkv/grpc.sock"), "sockets", WARN, "systemctl start"
    ),
    "no numba": (lambda host: host.versions.pop("numba"), "versions", BAD, "pip install"),
    "no numba on a client": (
        lambda host: [host.versions.pop(name) for name in ("numba", "uvloop")],
        "versions", WARN, "pip install",
    ),
    "an old vLLM": (
        lambda host: setattr(host, "doors", OLD), "vLLM", BAD, "pip install 'vllm==0.33.*'"
    ),
    "expandable segments": (
        lambda host: host.environment.update(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
        "vLLM's settings", BAD, "unset PYTORCH_CUDA_ALLOC_CONF",
    ),
    "a hash seed": (
        lambda host: host.environment.update(PYTHONHASHSEED="7"),
        "vLLM's settings", WARN, "unset PYTHONHASHSEED",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_fault_is_found_and_mended_and_no_other(made: Made, name: str) -> None:
    fault, check, state, mend = FAULTS[name]
    fault(made)
    found = made.findings()
    assert found[check].state == state and mend in found[check].mend, found[check]
    others = [one for one in found.values() if one.check != check and one.state != GOOD]
    assert not others, others
    assert doctor.status_of(list(found.values())) == int(state == BAD)


def test_what_can_not_be_read_is_not_wrong(tmp_path: Path) -> None:
    host = Host(tmp_path, {}, lambda name: None, lambda path: (0, 0))
    found = {finding.check: finding.state for finding in doctor.examine(host)}
    assert found["kernel"] == found["locked memory"] == found["vLLM"] == UNKNOWN
    assert found["NUMA"] == found["IOMMU"] == found["arenas"] == GOOD


def test_a_socket_of_others(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = made.findings()["sockets"]
    assert found.state == BAD and "usermod" in found.mend


def test_the_command(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    """For people and as JSON; its exit status says whether something is bad."""
    made.write("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always advise [deny]")
    assert cli.main(["doctor", "--json", "--root", str(made.root)]) == 1
    rows = {row["check"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["huge pages"]["state"] == BAD
    assert cli.main(["doctor", "--root", str(made.root)]) == 1
    shown = capsys.readouterr().out
    assert "echo advise > /sys/kernel" in shown and shown.startswith("check ")


def test_it_says_which_door_is_off_and_why(made: Made) -> None:
    made.doors = OLD
    said = made.findings()["vLLM"].says
    assert said.startswith("hotkv (own) is off with 0.33.0: own: Request has no attribute id")
    made.doors = Doors("0.33", (OLD.rows[0],))
    assert made.findings()["vLLM"].says.startswith("hotkv is off with 0.33.0: Request has no")
    made.doors = None
    assert made.findings()["vLLM"].state == UNKNOWN


def test_the_connector_answers_for_the_installed_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real process of this interpreter, which compares the installed vLLM's sources."""
    pytest.importorskip("vllm")
    for version, says in (("0.33.0", "vLLM 0.33.0 is tested"), ("0.99", "uses of its API check")):
        told = doctor.doors(version)
        assert told is not None and told.rows[0][:2] == ("own", True) and says in told.rows[0][2]
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert doctor.doors("0.33.0") is None
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert doctor.doors("0.33.0") is None


def test_memory_of_killed_engines_that_offloaded_is_found(made: Made) -> None:
    """A file that a process maps is in use; another one is left over."""
    made.write("dev/shm/vllm_offload_alive.mmap", "x" * 8192)
    made.write("proc/77/maps", "7f00-7f01 rw-s 0 00:19 5   /dev/shm/vllm_offload_alive.mmap")
    assert made.findings()["offloading"].state == GOOD
    made.write("dev/shm/vllm_offload_dead.mmap", "x" * 8192)
    found = made.findings()["offloading"]
    assert found.state == WARN
    assert found.mend == "rm /dev/shm/vllm_offload_dead.mmap"


def test_the_connector_that_fits_the_host_is_named(made: Made) -> None:
    assert "HotKVOffloadingConnector" in made.findings()["connector"].says
    made.remove("dev/nvidia0")
    assert "HotKVOffloadingConnector" not in made.findings()["connector"].says
