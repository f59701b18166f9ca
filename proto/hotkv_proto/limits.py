"""Reads the machine's limits, with which servers and engines compare their settings."""

import resource
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
NO_LIMIT = (1 << 63) - 1


def memlock_bytes() -> int:
    """What this process may lock, or pin for a GPU."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return NO_LIMIT if soft == resource.RLIM_INFINITY else soft


def cgroup_bytes() -> int:
    """Least limit of this process's control group and its ancestors; NO_LIMIT if none can be
    read."""
    return min((_number(directory / "memory.max") for directory in _cgroups()), default=NO_LIMIT)


def _cgroups() -> list[Path]:
    """Own first (version 2)."""
    try:
        own = next(
            line[3:] for line in OWN_CGROUP.read_text().splitlines() if line.startswith("0::")
        )
    except (OSError, StopIteration):
        return []
    group = CGROUPS / own.strip("/")
    return [group, *group.parents]


def _number(path: Path) -> int:
    """NO_LIMIT if it can't be read."""
    try:
        text = path.read_text().strip()
    except OSError:
        return NO_LIMIT
    return int(text) if text.isdecimal() else NO_LIMIT


def _field(path: Path, name: str, unit: int) -> int:
    """Number in the line of `name`, times `unit`; NO_LIMIT if it can't be read."""
    try:
        rows = (line.split() for line in path.read_text().splitlines())
        return next((int(row[1]) * unit for row in rows if row[:1] == [name]), NO_LIMIT)
    except (OSError, ValueError, IndexError):
        return NO_LIMIT


def available_bytes() -> int:
    """What can be allocated before the kernel must kill a process: the least of the machine and
    each control group, with files in the page cache. NO_LIMIT if the kernel does not say."""
    least = _field(MEMINFO, "MemAvailable:", 1024)
    for directory in _cgroups():
        limit, used = _number(directory / "memory.max"), _number(directory / "memory.current")
        if NO_LIMIT not in (limit, used):
            cached = [
                _field(directory / "memory.stat", name, 1)
                for name in ("inactive_file", "active_file")
            ]
            least = min(
                least, max(0, limit - used + sum(count for count in cached if count != NO_LIMIT))
            )
    return least


def machine_bytes() -> int:
    """Memory of the machine, or the limit of the control groups, if less; NO_LIMIT if the kernel
    reports neither."""
    return min(_field(MEMINFO, "MemTotal:", 1024), cgroup_bytes())


def allocated_bytes(path: Path) -> int:
    """Memory that a file on tmpfs uses; 0 without the file."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def why_no_huge_pages() -> str:
    try:
        modes = SHMEM_HUGE.read_text().strip()
    except OSError:
        return "this kernel has no transparent huge pages"
    if "[deny]" in modes:
        return f"{SHMEM_HUGE} says deny: write never into it"
    return "they need Linux 6.1 or newer, and free memory that is not in pieces"
