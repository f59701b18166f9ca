"""Measures the disk tier against fio over the same kind of buffers, the restart of a tier with many
records, and compression.

Prints a table; `--json` prints a JSON object last:

- `disk_read_ratio_64k`, `disk_read_ratio_1m`, `disk_write_ratio_64k`, `disk_write_ratio_1m`: bytes
  per second, with checksums, over fio's at a depth of 16: direct I/O, buffers in shared memory, in
  turns, medians. Four calls of 16 MiB are always in progress, so the tier never idles.
- `disk_read_ratio`, `disk_write_ratio`: the lower of each two.
- The same with `_busy`: the event loop is busy half of the time.
- `loop_lag_p99_ms`: lag of an otherwise idle event loop while the tier reads 64 KiB blocks;
  `loop_lag_idle_p99_ms`: without.
- `restart_s`: from an earlier server's records to answers, with the blocks of 64 KiB that
  `--records-gib` holds.
- The figures of `bench.compression`.

Needs `fio` (Debian's package); without it the disk's ratios are left out.
"""

import asyncio
import itertools
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench import compression
from bench.policies import POLICIES
from bench.report import at_least, at_most, median, parser, print_figures
from demo.processes import ends_cleanly
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace
from hotkv_proto.table import Words
from hotkv_server.cache.restore import BelowSpace, restore_below
from hotkv_server.cache.room.space import Space
from hotkv_server.cache.sessions import Catalog
from hotkv_server.dataplane.plan import Region
from hotkv_server.tiers.disk.slab_file import SlabFile
from hotkv_server.tiers.disk.tier import BATCH_BYTES, DiskTier
from hotkv_server.tiers.drive.records import LowerMemory
from hotkv_server.tiers.protocol import PlacedBlocks, Read, Write

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = {"64k": 64 * KIB, "1m": MIB}
FILE_BYTES = GIB
BUFFER_BYTES = 64 * MIB
DEPTH = 16
LANES, CALL_BYTES = 4, BATCH_BYTES
"""Calls always in progress. CALL_BYTES: of a call, as in the server's own writes."""
ROUND_S = 2.0
SLAB_BYTES = 4 * MIB
BOUNDS = {
    "disk_read_ratio": at_least(0.85),
    "disk_write_ratio": at_least(0.85),
    "disk_read_ratio_busy": at_least(0.8),
    "disk_write_ratio_busy": at_least(0.8),
    "restart_s": at_most(2.0),
} | compression.BOUNDS


class Disk:
    """A tier over a file of FILE_BYTES; buffers in shared memory, in huge pages if the kernel
    has some."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        descriptor = os.memfd_create("bench")
        os.ftruncate(descriptor, BUFFER_BYTES)
        self.buffer = mmap.mmap(descriptor, BUFFER_BYTES)
        self.buffer.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(self.buffer, np.uint8)
        memory[:] = np.random.default_rng(1).integers(0, 256, BUFFER_BYTES, np.uint8)
        arena = Region(memory.ctypes.data, BUFFER_BYTES, "buffers")
        self.tier = DiskTier(arena, SlabFile.open(folder, FILE_BYTES))
        self.rng = np.random.default_rng(2)
        self.size = 0
        self.seals = np.empty(0, np.uint64)

    async def write(self, size: int, seconds: float, *, is_busy: bool = False) -> float:
        """Bytes per second, at random places. is_busy: the event loop is busy half of the time."""
        if size != self.size:
            # Blocks of the new size overwrite the old.
            self.size, self.seals = size, np.zeros(FILE_BYTES // size, np.uint64)
        return await self._run(seconds, is_write=True, is_busy=is_busy)

    async def read(self, size: int, seconds: float, *, is_busy: bool = False) -> float:
        """Of what was written in this size. As `write`."""
        assert size == self.size, "nothing of this size was written"
        return await self._run(seconds, is_write=False, is_busy=is_busy)

    async def _run(self, seconds: float, *, is_write: bool, is_busy: bool) -> float:
        lanes = [self._calls(lane, is_write=is_write) for lane in range(LANES)]
        busy = asyncio.create_task(half_busy()) if is_busy else None
        began_s = time.monotonic()
        moved = await asyncio.gather(
            *(self._lane(calls, began_s + seconds, is_write=is_write) for calls in lanes)
        )
        passed_s = time.monotonic() - began_s
        if busy is not None:
            busy.cancel()
        return sum(moved) / passed_s

    async def _lane(self, calls: list[PlacedBlocks], until_s: float, *, is_write: bool) -> int:
        """Calls one after the other; several lanes run at once. Returns the bytes moved."""
        loop, moved, answers = asyncio.get_running_loop(), 0, []
        for blocks in itertools.cycle(calls):
            if time.monotonic() >= until_s:
                break
            ended: asyncio.Future[Any] = loop.create_future()

            def end(*answer: object, ended: "asyncio.Future[Any]" = ended) -> None:
                loop.call_soon_threadsafe(ended.set_result, answer)

            if is_write:
                self.tier.write(blocks, end)
            else:
                self.tier.read(blocks, until_s + 60, end)
            answers.append((blocks, await ended))
            moved += blocks.total_bytes
        for blocks, (codes, *seals) in answers:
            assert (codes == (Write.STORED if is_write else Read.FOUND)).all()
            if is_write:
                self.seals[blocks.places // self.size] = seals[0]
        return moved

    def _calls(self, lane: int, *, is_write: bool) -> list[PlacedBlocks]:
        """Every place of the lane's quarter of the file once, in random order; reads: only
        written ones."""
        count, lane_bytes = CALL_BYTES // self.size, FILE_BYTES // LANES
        slots = lane * CALL_BYTES + np.arange(count, dtype=np.int64) * self.size
        places = self.rng.permutation(lane_bytes // self.size) + lane * lane_bytes // self.size
        calls = []
        for some in places.reshape(-1, count).astype(np.int64):
            if is_write or self.seals[some].all():
                keys = [b"block %d of %d" % (place, self.size) for place in some.tolist()]
                sizes = np.full(count, self.size, np.int64)
                calls.append(
                    PlacedBlocks(keys, slots, sizes, some * self.size, sizes, self.seals[some])
                )
        return calls

    def close(self) -> None:
        self.tier.close()
        shutil.rmtree(self.folder)


async def half_busy() -> None:
    """One of every two milliseconds, until cancelled."""
    while True:
        until_s = time.perf_counter() + 0.001
        while time.perf_counter() < until_s:
            pass
        await asyncio.sleep(0.001)


def fio(folder: Path, how: str, size: int) -> float:
    """Bytes per second, at random places with direct I/O, for ROUND_S. how: `randread` or
    `randwrite`."""
    answer = subprocess.run(
        [
            "fio",
            "--name=bench",
            f"--filename={folder / 'fio'}",
            f"--rw={how}",
            f"--bs={size}",
            f"--size={FILE_BYTES}",
            f"--iodepth={DEPTH}",
            "--ioengine=libaio",
            "--direct=1",
            "--mem=mmapshared",
            "--time_based",
            f"--runtime={ROUND_S}",
            "--output-format=json",
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    job = json.loads(answer.stdout)["jobs"][0]
    return float(job["read" if how == "randread" else "write"]["bw_bytes"])


async def ratios(folder: Path, rounds: int) -> dict[str, float]:
    """Medians, by name."""
    disk = Disk(folder / "tier")
    found: dict[str, list[float]] = {}
    fio(folder, "randwrite", MIB)
    try:
        for name, size in SIZES.items():
            await disk.write(size, ROUND_S)
            for _ in range(rounds):
                for how, run in (("write", disk.write), ("read", disk.read)):
                    theirs = fio(folder, f"rand{how}", size)
                    for suffix in ("", "_busy"):
                        mine = await run(size, ROUND_S, is_busy=bool(suffix))
                        found.setdefault(f"disk_{how}_ratio{suffix}_{name}", []).append(
                            mine / theirs
                        )
                        found.setdefault(f"disk_{how}_gb_s{suffix}_{name}", []).append(mine / 1e9)
    finally:
        disk.close()
    medians = {key: median(values) for key, values in found.items()}
    for key in ("disk_read_ratio", "disk_write_ratio"):
        for suffix in ("", "_busy"):
            medians[f"{key}{suffix}"] = min(medians[f"{key}{suffix}_{name}"] for name in SIZES)
    return medians


async def loop_lag(folder: Path) -> dict[str, float]:
    """Lag without and with the tier reading."""
    disk = Disk(folder / "lag")
    try:
        size = SIZES["64k"]
        await disk.write(size, 1.0)
        figures = {}
        for key, is_busy in (("loop_lag_idle_p99_ms", False), ("loop_lag_p99_ms", True)):
            reading = asyncio.create_task(disk.read(size, ROUND_S)) if is_busy else None
            lags, until_s = list[float](), time.monotonic() + ROUND_S
            while time.monotonic() < until_s:
                due_s = time.monotonic() + 0.002
                await asyncio.sleep(0.002)
                lags.append(time.monotonic() - due_s)
            figures[key] = float(np.percentile(lags, 99)) * 1000
            if reading is not None:
                await reading
        return figures
    finally:
        disk.close()


def hashes(first: int, count: int) -> Words:
    """uint32 [count, 8], all different, from the number `first`."""
    return np.random.default_rng(first).integers(0, 1 << 32, (count, 8), np.uint32)


def restart(folder: Path, num_bytes: int) -> float:
    """Seconds from a full tier's records to answers."""
    size, count = SIZES["64k"], num_bytes // SIZES["64k"]
    group = GroupSpec(GroupKind.FULL_ATTENTION, 16, (size,))
    key_space = KeySpace("bench", "bench", "bfloat16", (group,), 16)

    def opened(memory: LowerMemory) -> tuple[Space, int]:
        space = Space(memory.table, num_bytes, SLAB_BYTES, POLICIES["hotness"](count))
        number, _ = Catalog(space.books).register(key_space, (), 0.0)
        return space, number

    memory = LowerMemory.open(folder / "records", num_bytes, SLAB_BYTES, count)
    space, number = opened(memory)
    part = 1 << 14
    for first in range(0, count, part):
        some = hashes(first, min(part, count - first))
        depths = np.arange(len(some), dtype=np.int64)
        entries = space.insert(number, 0, some, size, depths, 1)
        space.publish(entries, 0.0, checks=np.ones(len(entries), np.uint64))
    old = memory.table.records
    again = LowerMemory.open(folder / "again", num_bytes, SLAB_BYTES, count)
    began_s = time.monotonic()
    space, number = opened(again)
    restored = restore_below(
        BelowSpace(space, _known(space, key_space)), old, {number: number}, 0.0
    )
    took_s = time.monotonic() - began_s
    assert restored.blocks == count, restored
    return took_s


def _known(space: Space, key_space: KeySpace) -> Catalog:
    catalog = Catalog(space.books)
    catalog.register(key_space, (), 0.0)
    return catalog


def main() -> int:
    flags = parser("The disk tier beside fio, the restart over many records, and compression.")
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument(
        "--folder", type=Path, help="on the disk to measure; a temporary one if left out"
    )
    flags.add_argument("--records-gib", type=int, default=100)
    options = flags.parse_args()
    figures: dict[str, Any] = {}
    with ends_cleanly(), tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        if shutil.which("fio"):
            figures |= asyncio.run(ratios(folder, options.rounds))
        else:
            print("fio is not installed: no ratios of the disk", file=sys.stderr)
        figures |= asyncio.run(loop_lag(folder))
        figures["restart_s"] = restart(folder, options.records_gib * GIB)
        try:
            figures |= compression.measure()
        except FileNotFoundError as error:
            print(f"no figures of compression: {error}", file=sys.stderr)
    print_figures(figures, BOUNDS, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
