"""What compression on the disk is worth: blocks that fit, and tokens a second that hits bring up.

Keys and values are SmolLM2's, as in `bench.compression`; two disk tiers have the same blocks of 16
tokens, one encoded and one as they are, and are read in turns, whole calls at random places into
buffers in shared memory, seals and decoding included. Prints a table; `--json` prints one JSON
object last: `disk_hit_tokens_ratio` (tokens a second with `compress = "auto"` over those with
"off", median of the pairs of rounds), `disk_hit_tokens_per_s_auto`, `disk_hit_tokens_per_s_off`,
`disk_write_tokens_ratio` (the same of writes, which fill both files once, in turns), and
`disk_blocks_ratio` (blocks that a new disk of `--disk-gib` holds, over those without compression).
"""

import asyncio
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.compression import BLOCK_TOKENS, blocks_of, keys_and_values
from bench.report import parser, print_report
from demo.processes import ends_cleanly
from hotkv_server.core.slabs import SlabPool
from hotkv_server.dataplane.plan import Region
from hotkv_server.settings.tiers import DiskSettings, TierSettings
from hotkv_server.tiers.compression.form import room_bytes
from hotkv_server.tiers.disk.slab_file import SlabFile
from hotkv_server.tiers.disk.tier import DiskTier
from hotkv_server.tiers.protocol import Blocks, Codes, Int64s, Read, Write
from tools.smollm2 import prepare

MIB, GIB = 1 << 20, 1 << 30
NUM_BYTES = GIB
"""Bytes in slots of the blocks that each tier has."""
BUFFER_BYTES = 64 * MIB
ROUND_S = 1.0
TARGETS = {"disk_hit_tokens_ratio": 1.2, "disk_blocks_ratio": 1.3}


class Hits:
    """A disk tier and its buffers. `place_bytes`: of a block, which is encoded if they are fewer
    than `slot_bytes`. `content`: bytes of blocks, repeated as often as it takes."""

    def __init__(self, folder: Path, content: Codes, slot_bytes: int, place_bytes: int) -> None:
        self.slot_bytes, self.place_bytes = slot_bytes, place_bytes
        self.count = NUM_BYTES // slot_bytes
        self.seals = np.zeros(self.count, np.uint64)
        self.per_call = BUFFER_BYTES // slot_bytes
        self._content = content
        descriptor = os.memfd_create("bench")
        os.ftruncate(descriptor, BUFFER_BYTES)
        self._buffer = mmap.mmap(descriptor, BUFFER_BYTES)
        self._buffer.madvise(mmap.MADV_HUGEPAGE)
        self._slots = np.frombuffer(self._buffer, np.uint8)
        self._slots[:] = 0
        arena = Region(self._slots.ctypes.data, BUFFER_BYTES, "buffers")
        self.tier = DiskTier(arena, SlabFile.open(folder, self.count * place_bytes))
        if place_bytes < slot_bytes:
            self.tier.prepare_encoding()
        self._rng = np.random.default_rng(2)

    def blocks(self, numbers: Int64s) -> Blocks:
        """Blocks with these numbers, at most `per_call`, in slots one after the other."""
        return Blocks(
            [b"block %d" % number for number in numbers.tolist()],
            np.arange(len(numbers), dtype=np.int64) * self.slot_bytes,
            np.full(len(numbers), self.slot_bytes, np.int64),
            numbers * self.place_bytes,
            self.seals[numbers],
            stored_bytes=np.full(len(numbers), self.place_bytes, np.int64),
        )

    def content_of(self, number: int) -> Codes:
        """A block's bytes."""
        at = number % (len(self._content) // self.slot_bytes) * self.slot_bytes
        return self._content[at : at + self.slot_bytes]

    def slot(self, number: int) -> Codes:
        """Bytes of a slot."""
        return self._slots[number * self.slot_bytes : (number + 1) * self.slot_bytes]

    async def write_part(self, begin: int) -> float:
        """Writes blocks from `begin` on, in one call; returns its seconds."""
        numbers = np.arange(begin, min(begin + self.per_call, self.count), dtype=np.int64)
        for slot, number in enumerate(numbers.tolist()):
            self.slot(slot)[:] = self.content_of(number)
        ended, began_s = asyncio.get_running_loop().create_future(), time.monotonic()
        self.tier.write(self.blocks(numbers), _end(ended))
        codes, self.seals[numbers] = await ended
        assert (codes == Write.STORED).all(), "a block was not stored, or does not fit its room"
        return time.monotonic() - began_s

    async def read(self, seconds: float) -> float:
        """Tokens a second of calls at random places. What the benchmark prepares is not counted."""
        num_tokens, passed_s = 0, 0.0
        while passed_s < seconds:
            numbers = self._rng.choice(self.count, self.per_call, replace=False).astype(np.int64)
            blocks = self.blocks(numbers)
            ended, began_s = asyncio.get_running_loop().create_future(), time.monotonic()
            self.tier.read(blocks, began_s + 60, _end(ended))
            (codes,) = await ended
            passed_s += time.monotonic() - began_s
            assert (codes == Read.FOUND).all()
            num_tokens += len(numbers) * BLOCK_TOKENS
        for slot, number in list(enumerate(numbers.tolist()))[::37]:
            assert np.array_equal(self.slot(slot), self.content_of(number)), "a block differs"
        return num_tokens / passed_s


def _end(ended: "asyncio.Future[Any]") -> Any:
    """Sets the future to what a thread answers."""
    loop = ended.get_loop()

    def end(*answer: object) -> None:
        loop.call_soon_threadsafe(ended.set_result, answer)

    return end


async def ratios(folder: Path, rounds: int, content: Codes, slot_bytes: int) -> dict[str, float]:
    """Figures of both tiers, by key."""
    tiers = {
        "auto": Hits(folder / "auto", content, slot_bytes, room_bytes(slot_bytes)),
        "off": Hits(folder / "off", content, slot_bytes, slot_bytes),
    }
    speeds: dict[str, list[float]] = {name: [] for name in tiers}
    written_s = dict.fromkeys(tiers, 0.0)
    try:
        for begin in range(0, tiers["off"].count, tiers["off"].per_call):
            for name, tier in tiers.items():
                written_s[name] += await tier.write_part(begin)
        for number in range(rounds):
            # Whoever was first is second in the next round.
            for name in sorted(tiers, reverse=bool(number % 2)):
                speeds[name].append(await tiers[name].read(ROUND_S))
    finally:
        for name, tier in tiers.items():
            tier.tier.close()
            shutil.rmtree(folder / name)
    pairs = zip(speeds["auto"], speeds["off"], strict=True)
    return {
        "disk_hit_tokens_ratio": statistics.median(auto / off for auto, off in pairs),
        **{f"disk_hit_tokens_per_s_{name}": statistics.median(of) for name, of in speeds.items()},
        "disk_write_tokens_ratio": written_s["off"] / written_s["auto"],
    }


def blocks_ratio(slot_bytes: int, disk_bytes: int) -> float:
    """Blocks of this size that a new disk holds encoded, over those that it holds as they are."""
    disk = DiskSettings(bytes=disk_bytes)  # type: ignore[call-arg, arg-type]
    pool = SlabPool(disk_bytes, TierSettings(disk=disk).slab_bytes)  # type: ignore[call-arg]
    return pool.capacity_slots(room_bytes(slot_bytes)) / pool.capacity_slots(slot_bytes)


def measure(folder: Path, rounds: int, disk_gib: int) -> dict[str, float]:
    """All figures. Raises FileNotFoundError if SmolLM2 is not installed."""
    content, slot_bytes = blocks_of(keys_and_values(prepare()))
    figures = asyncio.run(ratios(folder, rounds, content, slot_bytes))
    return figures | {"disk_blocks_ratio": blocks_ratio(slot_bytes, disk_gib * GIB)}


def main() -> int:
    """Command line."""
    flags = parser("What compression on the disk is worth.")
    flags.add_argument("--rounds", type=int, default=11)
    flags.add_argument(
        "--folder", type=Path, help="on the disk to measure; a temporary one if left out"
    )
    flags.add_argument("--disk-gib", type=int, default=100)
    options = flags.parse_args()
    with ends_cleanly(), tempfile.TemporaryDirectory(dir=options.folder) as name:
        figures: dict[str, Any] = measure(Path(name), options.rounds, options.disk_gib)
    rows = [
        (
            name,
            f"{value:.4g}",
            f"at least {TARGETS[name]:g}" if name in TARGETS else "",
            "missed" if value < TARGETS.get(name, value) else "",
        )
        for name, value in figures.items()
    ]
    print_report(("figure", "value", "target", ""), rows, figures, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
