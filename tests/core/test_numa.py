"""Tests NUMA placement on /sys folders of fake machines."""

import ctypes
import errno
import mmap
import os
import platform
import re
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotkv_proto.words import file_bytes
from hotkv_server.memory import numa
from hotkv_server.memory.arena import NodeMemory
from hotkv_server.startup.arena import placer

GPU = ("0x10de", "0x030200")
DUAL = {0: "0-3,8-11", 1: "4-7,12-15"}


def machine(
    root: Path, nodes: dict[int, str], devices: dict[str, tuple[str, str, int]] | None = None
) -> Path:
    """A fake /sys with NUMA nodes (number -> processors) and PCI devices (id -> vendor, class,
    node)."""
    of_nodes, of_devices = root / "devices/system/node", root / "bus/pci/devices"
    files = {of_nodes / "has_memory": ",".join(map(str, nodes))}
    files |= {of_nodes / f"node{number}/cpulist": cpus for number, cpus in nodes.items()}
    for name, values in (devices or {}).items():
        for file, value in zip(("vendor", "class", "numa_node"), values, strict=True):
            files[of_devices / name / file] = str(value)
    for path, value in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value + "\n")
    return root


@given(runs=st.lists(st.tuples(st.integers(2, 9), st.integers(0, 9)), max_size=20))
def test_lists_are_read_as_the_kernel_writes_them(runs: list[tuple[int, int]]) -> None:
    text, expected, at = [], [], 0
    for gap, more in runs:
        at += gap
        text.append(f"{at}-{at + more}" if more else str(at))
        expected += range(at, at + more + 1)
        at += more
    assert numa.parse_list(",".join(text) + "\n") == tuple(expected)


def test_gpus_differ_from_their_makers_other_devices(tmp_path: Path) -> None:
    devices = {
        "0000:17:00.0": (*GPU, 0),
        "0000:c3:00.0": (*GPU, 1),
        "0000:c3:00.1": ("0x10de", "0x040300", 1),  # its audio function
        "0000:05:00.0": ("0x1a03", "0x030000", 0),  # another maker's display
        "0000:e1:00.0": (*GPU, -1),
    }
    sys = machine(tmp_path, DUAL, devices)
    assert numa.gpu_nodes(sys) == (0, 1)
    assert numa.node_of("00000000:C3:00.0", sys) == 1
    for odd in ("0000:e1:00.0", "", "zzzz:00", "0000:99:00.0"):
        assert numa.node_of(odd, sys) == numa.UNKNOWN
    assert numa.processors(0, sys) == {0, 1, 2, 3, 8, 9, 10, 11}
    assert numa.processors(1, sys) == {4, 5, 6, 7, 12, 13, 14, 15}
    assert numa.processors(7, sys) == numa.processors(numa.UNKNOWN, sys) == frozenset()


ONE = {0: "0-1"}


@pytest.mark.parametrize(
    ("nodes", "wanted", "gpus", "expected"),
    [
        (DUAL, "auto", [], ()),
        (DUAL, "auto", [1], (1,)),
        (DUAL, "auto", [1, 0], (0, 1)),
        (DUAL, "auto", [3], ()),  # a node without memory
        (DUAL, "interleave", [], (0, 1)),
        (DUAL, "none", [1], ()),
        (DUAL, "0", [1], (0,)),
        (ONE, "auto", [0], ()),
        (ONE, "interleave", [0], ()),
        ({}, "auto", [], ()),
    ],
)
def test_memory_follows_the_chosen_nodes(
    tmp_path: Path, nodes: dict[int, str], wanted: str, gpus: list[int], expected: tuple[int, ...]
) -> None:
    devices = {f"0000:1{at}:00.0": (*GPU, node) for at, node in enumerate(gpus)}
    assert numa.choose(wanted, machine(tmp_path, nodes, devices)) == expected


TWO_GPUS = {"0000:10:00.0": (*GPU, 0), "0000:20:00.0": (*GPU, 1)}
MIB = 1 << 20


@given(
    num_slabs=st.integers(1, 4096),
    slab_bytes=st.sampled_from([1, 2, 3, 5, 16]).map(lambda mib: mib * MIB),
    count=st.integers(1, 8),
)
def test_parts_cover_the_arena_in_whole_slabs_and_huge_pages(
    num_slabs: int, slab_bytes: int, count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sys, num_bytes = tmp_path_factory.mktemp("sys"), num_slabs * slab_bytes
    devices = {f"0000:{10 + node}:00.0": (*GPU, node) for node in range(count)}
    found = numa.parts(
        "auto", num_bytes, slab_bytes, machine(sys, dict.fromkeys(range(count), "0"), devices)
    )
    if count == 1 or num_bytes // count < slab_bytes:
        assert found == numa.ONE_PART
    if found == numa.ONE_PART:
        assert found.ranges(num_bytes) == [] and found.home({0}) == numa.ANY_PART
        return
    ranges = found.ranges(num_bytes)
    assert [node for *_, node in ranges] == list(range(count))
    assert all(start % slab_bytes == start % numa.HUGE_BYTES == 0 for start, *_ in ranges)
    ends = [start + size for start, size, _ in ranges]
    assert [0, *ends] == [*(start for start, *_ in ranges), num_bytes]
    sizes = [size for _, size, _ in ranges]
    grain = max(slab_bytes, numa.HUGE_BYTES) * 2
    assert max(sizes) - min(sizes) < count * grain


@pytest.mark.parametrize("wanted", ["interleave", "none", "1"])
def test_other_settings_make_no_parts(tmp_path: Path, wanted: str) -> None:
    sys = machine(tmp_path, DUAL, TWO_GPUS)
    assert numa.parts(wanted, 1 << 30, MIB, sys) == numa.ONE_PART


@pytest.mark.parametrize(
    ("nodes", "home"),
    [({0}, 0), ({1}, 1), ({0, 1}, -1), ({2}, -1), ({numa.UNKNOWN}, -1), (set(), -1)],
)
def test_an_engine_is_at_home_on_the_node_of_its_devices(
    tmp_path: Path, nodes: set[int], home: int
) -> None:
    found = numa.parts("auto", 1 << 30, MIB, machine(tmp_path, DUAL, TWO_GPUS))
    assert found.starts == (0, 512 * MIB) and found.home(nodes) == home


def test_each_part_is_placed_on_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = list[tuple[int, int, Sequence[int]]]()
    monkeypatch.setattr(numa, "choose", lambda wanted, sys=None: (0, 1))
    monkeypatch.setattr(numa, "place", lambda *call: placed.append(call) or "")
    place = placer("auto", 64 * MIB, MIB)
    assert place is not None
    place(MIB, 64 * MIB)
    assert placed == [(MIB, 32 * MIB, (0,)), (33 * MIB, 32 * MIB, (1,))]


@pytest.mark.skipif(len(numa.memory_nodes()) < 2, reason="this machine has one NUMA node")
def test_pages_lie_on_the_nodes_of_their_parts(tmp_path: Path) -> None:
    """As the kernel shows in numa_maps."""
    nodes, size = numa.memory_nodes()[:2], 64 * MIB
    parts = numa.Parts((0, size // 2), nodes)

    def place(address: int, num_bytes: int) -> None:
        for start, count, node in parts.ranges(num_bytes):
            if why_not := numa.place(address + start, count, (node,)):
                pytest.skip(why_not)

    memory = NodeMemory.open(tmp_path / "arena", size, MIB, 1000, 1, place=place)
    try:
        lines = Path("/proc/self/numa_maps").read_text().splitlines()
        counts = [re.findall(r"N(\d+)=(\d+)", line) for line in lines if "/arena/arena" in line]
        found = [{int(node) for node, _ in one} for one in counts if one]
        assert found == [{nodes[0]}, {nodes[1]}]
    finally:
        memory.remove()


def test_node_without_memory_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is 2, and the nodes with memory are 0, 1"):
        numa.choose("2", machine(tmp_path, DUAL))
    assert numa.choose("auto", tmp_path / "nothing") == ()


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64"), reason="no number of the system call is known"
)
def test_memory_is_placed_or_the_reason_said() -> None:
    """The machine may forbid mbind."""
    nodes = numa.memory_nodes()
    if not nodes:
        pytest.skip("this kernel has no NUMA")
    with mmap.mmap(-1, 1 << 20) as pages:
        view = ctypes.c_uint8.from_buffer(pages)
        said = numa.place(ctypes.addressof(view), 1 << 20, (nodes[0],))
        assert said == "" or "CAP_SYS_NICE" in said
        assert numa.place(ctypes.addressof(view) + 1, 1 << 20, (nodes[0],)) != ""
        view.value = 1
        del view


def test_kernel_may_refuse_the_asked_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[object, ...]] = []

    class Libc:
        def __init__(self, name: None, *, use_errno: bool) -> None:
            assert use_errno

        def syscall(self, *arguments: ctypes.c_long) -> int:
            number, address, num_bytes, mode, mask, num_bits, flags = (a.value for a in arguments)
            words = (ctypes.c_uint64 * 16).from_address(mask)
            nodes = {node for node in range(1024) if words[node // 64] >> node % 64 & 1}
            calls.append((number, address, num_bytes, mode, nodes, num_bits, flags))
            ctypes.set_errno(errno.EPERM)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", Libc)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert numa.place(4096, 8192, (1023,)).startswith("Operation not permitted (")
    assert numa.place(4096, 8192, (0, 70)) != ""
    # One node is preferred; several nodes are interleaved.
    preferred, interleave = 1, 3
    assert calls == [
        (235, 4096, 8192, preferred, {1023}, 1025, 0),
        (235, 4096, 8192, interleave, {0, 70}, 1025, 0),
    ]
    assert numa.place(4096, 8192, (1024,)) == "node 1024 is beyond 1023"
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert "not known how" in numa.place(4096, 8192, (0,))


def test_arena_is_placed_before_it_is_filled(tmp_path: Path) -> None:
    placed: list[int] = []

    def place(address: int, num_bytes: int) -> None:
        placed.append(num_bytes)
        # Only the words behind the arena's end have memory yet.
        num_words = file_bytes(num_bytes) - num_bytes
        assert os.stat(tmp_path / "arena/arena").st_blocks * 512 <= num_words

    memory = NodeMemory.open(tmp_path / "arena", 1 << 20, 64 << 10, 100, 7, place=place)
    assert placed == [1 << 20] and not memory.arena.look()[1]
    memory.remove()


def test_threads_started_inside_inherit_processors() -> None:
    mine = os.sched_getaffinity(0)
    seen: list[set[int]] = []
    with numa.on_processors(frozenset({min(mine), 4096})):
        thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
    assert seen == [{min(mine)}] and os.sched_getaffinity(0) == mine
    with numa.on_processors(frozenset({4096})):
        assert os.sched_getaffinity(0) == mine
