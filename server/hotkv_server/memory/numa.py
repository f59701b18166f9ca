"""NUMA nodes of the arena's memory, and processors for a device's copy threads.

Nodes are read from /sys, not through CUDA: memory is placed before it is prefaulted, when CUDA
may not run yet. If the kernel refuses, the server continues and logs it. `sys` stands for /sys
in tests.
"""

import contextlib
import ctypes
import math
import os
import platform
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SYS = Path("/sys")
NVIDIA_VENDOR = "0x10de"
DISPLAY_CLASS = "0x03"
"""First byte of a GPU's PCI class, with or without a display."""
UNKNOWN = -1
_MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of mbind(2) by architecture (asm/unistd.h)."""
_PREFERRED, _INTERLEAVE = 1, 3
HUGE_BYTES = 2 << 20
ANY_PART = -1
_MASK_WORDS = 16
_WORD_BITS = 64


def parse_list(text: str) -> tuple[int, ...]:
    """Numbers in the kernel's notation, such as 0-3,8. Raises ValueError."""
    numbers: list[int] = []
    for part in filter(None, (part.strip() for part in text.strip().split(","))):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return tuple(numbers)


def _read_list(path: Path) -> tuple[int, ...]:
    """Empty if the file can't be read."""
    try:
        return parse_list(path.read_text())
    except (OSError, ValueError):
        return ()


def memory_nodes(sys: Path = SYS) -> tuple[int, ...]:
    """Nodes that have memory; empty if the kernel does not say."""
    return _read_list(sys / "devices/system/node/has_memory")


def processors(node: int, sys: Path = SYS) -> frozenset[int]:
    """Empty if the node is UNKNOWN."""
    return (
        frozenset(_read_list(sys / f"devices/system/node/node{node}/cpulist"))
        if node >= 0
        else frozenset()
    )


def node_of(pci_bus_id: str, sys: Path = SYS) -> int:
    """Node of a PCI device, or UNKNOWN. CUDA may write eight digits of the address's domain."""
    domain, _, rest = pci_bus_id.lower().partition(":")
    try:
        return int(
            (sys / "bus/pci/devices" / f"{int(domain, 16):04x}:{rest}" / "numa_node").read_text()
        )
    except (OSError, ValueError):
        return UNKNOWN


def gpu_nodes(sys: Path = SYS) -> tuple[int, ...]:
    """Nodes of NVIDIA GPUs, sorted, each once."""
    found: set[int] = set()
    for device in sorted((sys / "bus/pci/devices").glob("*")):
        with contextlib.suppress(OSError):
            is_gpu = (device / "class").read_text().startswith(DISPLAY_CLASS)
            if is_gpu and (device / "vendor").read_text().strip() == NVIDIA_VENDOR:
                found.add(node_of(device.name, sys))
    return tuple(sorted(found - {UNKNOWN}))


def choose(wanted: str, sys: Path = SYS) -> tuple[int, ...]:
    """Nodes that the setting `arena.numa` selects here; empty for any. Raises ValueError for a
    node without memory. `none`: any. A number: that node. `interleave`: all that have memory.
    `auto`: those of all GPUs, each with a part of the arena (`parts`). On a machine with one node
    the last two are empty.
    """
    nodes = memory_nodes(sys)
    if wanted == "none":
        return ()
    if wanted.isdecimal():
        if int(wanted) not in nodes:
            raise ValueError(
                f"is {wanted}, and the nodes with memory are "
                f"{', '.join(map(str, nodes)) or 'not known'}"
            )
        return (int(wanted),)
    chosen = (
        nodes if wanted == "interleave" else tuple(node for node in gpu_nodes(sys) if node in nodes)
    )
    return chosen if len(nodes) > 1 else ()


@dataclass(frozen=True, slots=True)
class Parts:
    """Equal parts of the arena, one after another.

    starts: first byte of each; (0,) for one part.
    nodes: of each; empty if there is one part, on any nodes.
    """

    starts: tuple[int, ...] = (0,)
    nodes: tuple[int, ...] = ()

    def ranges(self, num_bytes: int) -> list[tuple[int, int, int]]:
        """(first byte, bytes, node) of each part on a node."""
        ends = (*self.starts[1:], num_bytes)
        return [
            (start, end - start, node)
            for start, end, node in zip(self.starts, ends, self.nodes, strict=False)
        ]

    def home(self, nodes: Collection[int]) -> int:
        """The part on the node of an engine's devices; ANY_PART if they have several, or their
        node has no part."""
        (node, *others) = set(nodes) or {UNKNOWN}
        return self.nodes.index(node) if not others and node in self.nodes else ANY_PART


ONE_PART = Parts()


def parts(wanted: str, num_bytes: int, slab_bytes: int, sys: Path = SYS) -> Parts:
    """With the setting `auto`, a part for each node with GPUs, in whole slabs and huge pages. Else
    one part, as also with one such node or an arena that is too small. Raises as `choose`."""
    nodes, grain = choose(wanted, sys), math.lcm(slab_bytes, HUGE_BYTES)
    share = num_bytes // max(len(nodes), 1) // grain * grain
    if wanted != "auto" or len(nodes) < 2 or not share:
        return ONE_PART
    return Parts(tuple(at * share for at in range(len(nodes))), nodes)


def place(address: int, num_bytes: int, nodes: Sequence[int]) -> str:
    """Asks the kernel to allocate pages on these nodes: interleaved over several, elsewhere when
    they are full. Only pages without memory. Returns why it refused; empty on success."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return f"not known how to ask for it on {platform.machine()}"
    words = (ctypes.c_uint64 * _MASK_WORDS)()
    for node in nodes:
        if node >= _MASK_WORDS * _WORD_BITS:
            return f"node {node} is beyond {_MASK_WORDS * _WORD_BITS - 1}"
        words[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    libc = ctypes.CDLL(None, use_errno=True)
    mode = _PREFERRED if len(nodes) == 1 else _INTERLEAVE
    arguments = (
        number,
        address,
        num_bytes,
        mode,
        ctypes.addressof(words),
        _MASK_WORDS * _WORD_BITS + 1,
        0,
    )
    if libc.syscall(*(ctypes.c_long(argument) for argument in arguments)):
        return (
            f"{os.strerror(ctypes.get_errno())} (containers: it takes CAP_SYS_NICE, or a "
            "seccomp profile that allows mbind)"
        )
    return ""


@contextlib.contextmanager
def on_processors(wanted: frozenset[int]) -> Iterator[None]:
    """Threads started in the `with` block run on `wanted`, or anywhere if this process may use
    none of them."""
    before = os.sched_getaffinity(0)
    usable = wanted & before
    if not usable or usable == before:
        yield
        return
    os.sched_setaffinity(0, usable)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
