"""What the machine grants: locked memory, memory of the control group, huge pages. Read at start,
to say what would not fit."""

import resource
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
NO_LIMIT = (1 << 63) - 1


def memlock_bytes() -> int:
    """Most bytes that this process may lock, or pin for a GPU; NO_LIMIT for any."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return NO_LIMIT if soft == resource.RLIM_INFINITY else soft


def cgroup_bytes() -> int:
    """Least memory limit of this process's control group and those above it; NO_LIMIT if there is
    none or none can be read."""
    return min((_number(directory / "memory.max") for directory in _cgroups()), default=NO_LIMIT)


def _cgroups() -> list[Path]:
    """Directories of this process's control group and those above it (version 2); none if it has
    none."""
    try:
        own = next(
            line[3:] for line in OWN_CGROUP.read_text().splitlines() if line.startswith("0::")
        )
    except (OSError, StopIteration):
        return []
    group = CGROUPS / own.strip("/")
    return [group, *group.parents]


def _number(path: Path) -> int:
    """The number in a file; NO_LIMIT if there is none."""
    try:
        text = path.read_text().strip()
    except OSError:
        return NO_LIMIT
    return int(text) if text.isdecimal() else NO_LIMIT


def _field(path: Path, name: str, unit: int) -> int:
    """The number after a name in a file of names and numbers, times the unit; NO_LIMIT if it is not
    there."""
    try:
        rows = (line.split() for line in path.read_text().splitlines())
        return next((int(row[1]) * unit for row in rows if row[:1] == [name]), NO_LIMIT)
    except (OSError, ValueError, IndexError):
        return NO_LIMIT


def available_bytes() -> int:
    """Memory that may be taken before the kernel has to end a process for it: of the machine, and
    of this process's control groups.

    NO_LIMIT if the kernel does not say. What files keep in the page cache counts as available.
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
    """Memory of this machine, or the limit of this process's control groups if that is less;
    NO_LIMIT if the kernel does not say."""
    return min(_field(MEMINFO, "MemTotal:", 1024), cgroup_bytes())


def allocated_bytes(path: Path) -> int:
    """Memory that a file on tmpfs has by now; 0 if there is no such file."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def why_no_huge_pages() -> str:
    """The likeliest reason why the kernel gave no huge pages."""
    try:
        modes = SHMEM_HUGE.read_text().strip()
    except OSError:
        return "this kernel has no transparent huge pages"
    if "[deny]" in modes:
        return f"{SHMEM_HUGE} says deny: write never into it"
    return "they need Linux 6.1 or newer, and free memory that is not in pieces"
