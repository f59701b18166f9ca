"""Reads the limits of the machine: locked memory, memory of the control group, huge pages. Servers
and engines compare their settings with these limits when they start."""

import resource
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
NO_LIMIT = (1 << 63) - 1


def memlock_bytes() -> int:
    """Returns how many bytes this process may lock, or pin for a GPU; NO_LIMIT if unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return NO_LIMIT if soft == resource.RLIM_INFINITY else soft


def cgroup_bytes() -> int:
    """Returns the smallest memory limit of this process's control group and the group's ancestors;
    NO_LIMIT if none of them has a limit that can be read."""
    return min((_number(directory / "memory.max") for directory in _cgroups()), default=NO_LIMIT)


def _cgroups() -> list[Path]:
    """Returns the directories of this process's control group (version 2) and of the group's
    ancestors, the process's own group first. Empty if the process has no control group."""
    try:
        own = next(
            line[3:] for line in OWN_CGROUP.read_text().splitlines() if line.startswith("0::")
        )
    except (OSError, StopIteration):
        return []
    group = CGROUPS / own.strip("/")
    return [group, *group.parents]


def _number(path: Path) -> int:
    """Returns the number in a file; NO_LIMIT if the file contains no number or can't be read."""
    try:
        text = path.read_text().strip()
    except OSError:
        return NO_LIMIT
    return int(text) if text.isdecimal() else NO_LIMIT


def _field(path: Path, name: str, unit: int) -> int:
    """Reads a file with a name and a number on each line. Returns the number on the line of `name`,
    multiplied by `unit`; NO_LIMIT if the name is missing or the file can't be read."""
    try:
        rows = (line.split() for line in path.read_text().splitlines())
        return next((int(row[1]) * unit for row in rows if row[:1] == [name]), NO_LIMIT)
    except (OSError, ValueError, IndexError):
        return NO_LIMIT


def available_bytes() -> int:
    """Returns how many bytes can be allocated before the kernel must kill a process. That is the
    smallest number among the available bytes of the machine and of each control group of this
    process.

    Returns NO_LIMIT if the kernel does not report these numbers. Memory of files in the page cache
    counts as available.
    """
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
    """Returns the memory of this machine in bytes, or the limit of this process's control groups if
    that is less; NO_LIMIT if the kernel reports neither."""
    return min(_field(MEMINFO, "MemTotal:", 1024), cgroup_bytes())


def allocated_bytes(path: Path) -> int:
    """Returns the memory that a file on tmpfs uses at the moment; 0 if there is no such file."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def why_no_huge_pages() -> str:
    """Returns the most likely reason why the kernel provided no huge pages, as text for people."""
    try:
        modes = SHMEM_HUGE.read_text().strip()
    except OSError:
        return "this kernel has no transparent huge pages"
    if "[deny]" in modes:
        return f"{SHMEM_HUGE} says deny: write never into it"
    return "they need Linux 6.1 or newer, and free memory that is not in pieces"
