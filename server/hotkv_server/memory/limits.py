"""What the machine grants: locked memory, memory of the control group, huge pages. Read at start, to say what would not fit."""

import resource
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
NO_LIMIT = (1 << 63) - 1


def memlock_bytes() -> int:
    """Most bytes that this process may lock, or pin for a GPU; NO_LIMIT for any."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return NO_LIMIT if soft == resource.RLIM_INFINITY else soft


def cgroup_bytes() -> int:
    """Least memory limit of this process's control group and those above it; NO_LIMIT where there is none or none can be read."""
    try:
        own = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return NO_LIMIT
    least = NO_LIMIT
    group = CGROUPS / own.strip("/")
    for directory in (group, *group.parents):
        try:
            text = (directory / "memory.max").read_text().strip()
        except OSError:
            text = "max"
        least = min(least, int(text) if text.isdecimal() else NO_LIMIT)
    return least


def allocated_bytes(path: Path) -> int:
    """Memory that a file on tmpfs has by now; 0 where there is none."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def why_no_huge_pages() -> str:
    """The likeliest reason for which the kernel gave none."""
    try:
        modes = SHMEM_HUGE.read_text().strip()
    except OSError:
        return "this kernel has no transparent huge pages"
    if "[deny]" in modes:
        return f"{SHMEM_HUGE} says deny: write never into it"
    return "they need Linux 6.1 or newer, and free memory that is not in pieces"
