"""`hotkv-server tiers check`: writes and reads blocks in each tier of the settings. A server may
use the tiers meanwhile.

Always true: it changes only its own data: a slab file in a new folder inside the disk tier's, or
keys of a store under a random fingerprint. Both are removed; keys that a store fails to remove
stay until they expire, and are reported if it answers.
"""

import argparse
import contextlib
import json
import mmap
import os
import queue
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hotkv_proto.command_line import columns
from hotkv_server.cache.values import DISK_TIER
from hotkv_server.dataplane.plan import Region
from hotkv_server.logs import print_fatal
from hotkv_server.settings import Settings, load_settings
from hotkv_server.settings.tiers import DiskSettings
from hotkv_server.startup import StartError
from hotkv_server.tiers.drive.flushes import GenerationRelay
from hotkv_server.tiers.kinds import TierResources, shared_tiers
from hotkv_server.tiers.protocol import (
    NO_GENERATION,
    Blocks,
    PlacedBlocks,
    Read,
    SharedBlocks,
    SharedTier,
    Tier,
    Write,
)
from hotkv_server.tiers.remote.client import MissingError

USAGE_ERROR = 2
KIB, MIB = 1 << 10, 1 << 20
SIZES = ((64 * KIB, 32), (MIB, 8))
"""(bytes, count) of the blocks to write."""
NUM_BYTES = sum(size * count for size, count in SIZES)
ANSWER_S = 15.0
"""A slower tier is useless to requests."""
REMOVE_S = 5.0
"""Longest wait for a store to remove the keys."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Median times of `num_blocks` blocks, one at a time."""

    tier: str
    block_bytes: int
    num_blocks: int
    write_ms: float
    read_ms: float


@dataclass(frozen=True, slots=True)
class Checked:
    """`left`: about keys that the store did not remove, or ""."""

    timings: list[Timing]
    left: str = ""


def run(options: argparse.Namespace, flags: Sequence[str]) -> int:
    """The exit status: 0, 1 if a tier does not work, 2 if the settings are bad or have no tier.
    `flags`: those that set settings.
    """
    try:
        settings = load_settings(options.config, list(flags), "hotkv-server tiers check")
    except ValueError as error:
        print_fatal(str(error))
        return USAGE_ERROR
    checks = _checks(settings)
    if not checks:
        print_fatal("the settings have no tier: set tiers.disk.path or tiers.valkey.address")
        return USAGE_ERROR
    timings: list[Timing] = []
    problems: dict[str, str] = {}
    left: dict[str, str] = {}
    for name, check in checks:
        try:
            checked = check()
            timings += checked.timings
            left.update({name: checked.left} if checked.left else {})
        except (StartError, MissingError, ImportError) as error:
            problems[name] = str(error)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            problems[name] = f"{where}{error.strerror or error}"
    if options.json:
        rows = [asdict(one) for one in timings]
        print(json.dumps({"timings": rows, "left": left, "problems": problems}))
    else:
        _show(timings)
    for name, problem in [*left.items(), *problems.items()]:
        print_fatal(f"tiers.{name}: {problem}")
    return 1 if problems else 0


def _checks(settings: Settings) -> list[tuple[str, Callable[[], Checked]]]:
    checks: list[tuple[str, Callable[[], Checked]]] = []
    disk = settings.tiers.disk
    if disk.path is not None:
        checks.append((DISK_TIER, partial(check_disk, disk.path, disk)))
    for name, open_at in shared_tiers(settings):
        checks.append((name, partial(_check_at, open_at)))
    return checks


def _check_at(open_at: Callable[[TierResources], SharedTier]) -> Checked:
    arena, descriptor = _arena()
    return check_shared(open_at(TierResources(arena, descriptor, GenerationRelay())), arena)


def check_disk(path: Path, disk: DiskSettings) -> Checked:
    """Works in a new folder inside `path`, which it creates if missing. Removes both. Raises
    StartError or OSError if the disk does not work."""
    from hotkv_server.tiers.disk.slab_file import SLABS_FILE, SlabFile
    from hotkv_server.tiers.disk.tier import DiskTier

    with contextlib.ExitStack() as made:
        for folder in [one for one in (*path.parents[::-1], path) if not os.path.exists(one)]:
            folder.mkdir(mode=0o700)
            made.callback(folder.rmdir)
        folder = Path(made.enter_context(tempfile.TemporaryDirectory(prefix="check-", dir=path)))
        _look_for_room(path, path / SLABS_FILE, disk.bytes)
        arena, _ = _arena()
        tier = DiskTier(arena, SlabFile.open(folder, NUM_BYTES), num_threads=disk.threads)
        made.callback(tier.close)
        return Checked(list(_try(tier, arena, b"hotkv/check", _placed)))


def _look_for_room(path: Path, slabs: Path, num_bytes: int) -> None:
    """Raises StartError if a slab file of `num_bytes` has no room; what exists at `slabs`
    counts."""
    taken_bytes = slabs.stat().st_blocks * 512 if slabs.exists() else 0
    space = os.statvfs(path)
    free_bytes = space.f_bavail * space.f_frsize
    if num_bytes - taken_bytes > free_bytes:
        raise StartError(
            f"{path} needs {(num_bytes - taken_bytes) // MIB} MiB more and its file system has "
            f"{free_bytes // MIB} MiB free: lower tiers.disk.bytes, or make room"
        )


def check_shared(tier: SharedTier, arena: Region) -> Checked:
    """Closes the tier. Raises StartError if it does not work. `arena`: with which the tier was
    opened."""
    fingerprint = secrets.token_hex(32)
    try:
        until_s = time.monotonic() + ANSWER_S
        (shown,) = _answer(tier, partial(tier.generations, [fingerprint], until_s))
        if shown is None or fingerprint not in shown.generations:
            raise StartError(tier.problem() or "does not say which generation a key space has")
        generation = shown.generations[fingerprint]
        if generation == NO_GENERATION:
            raise StartError("is full: it has no room for the generation of a key space")
        prefix = b"hotkv/1/%s/%d" % (fingerprint.encode(), generation)

        def shared(one: Blocks) -> SharedBlocks:
            depths = np.zeros(len(one), np.int64)
            return SharedBlocks(
                one.keys, one.slots, one.num_bytes, depths, {fingerprint: generation}
            )

        try:
            timings = list(_try(tier, arena, prefix, shared))
        except StartError:
            with contextlib.suppress(StartError):
                _remove(tier, prefix, fingerprint)
            raise
        return Checked(timings, _remove(tier, prefix, fingerprint))
    finally:
        tier.close()


def _remove(tier: SharedTier, prefix: bytes, fingerprint: str) -> str:
    """Removes blocks and generation. Returns what to say of keys left after REMOVE_S, or "".
    Raises StartError without an answer."""
    keys = [key for size, count in SIZES for key in _keys(prefix, size, count)]
    everything = [*keys, b"hotkv/1/%s/generation" % fingerprint.encode()]
    until_s = time.monotonic() + REMOVE_S
    tier.forget(everything)
    while True:
        soon_s = time.monotonic() + ANSWER_S
        (codes,) = _answer(tier, partial(tier.probe, everything, soon_s))
        num_left = int((codes != Read.ABSENT).sum())
        if not num_left:
            return ""
        if time.monotonic() >= until_s:
            return (
                f"works, but {num_left} keys of the check with the fingerprint {fingerprint} stay "
                "until they expire"
            )
        time.sleep(0.02)


def _arena() -> tuple[Region, int]:
    """Memory and its descriptor: first half for blocks to write, second for those read. Never
    unmapped, as a hung tier may still write to it."""
    descriptor = os.memfd_create("hotkv-check")
    os.ftruncate(descriptor, 2 * NUM_BYTES)
    memory = mmap.mmap(descriptor, 2 * NUM_BYTES)
    _kept.append(memory)
    array = np.frombuffer(memory, np.uint8)
    return Region(array.ctypes.data, len(memory), "memory of the check"), descriptor


_kept: list[mmap.mmap] = []


def _keys(prefix: bytes, size: int, count: int) -> list[bytes]:
    hashes = (size.to_bytes(16, "big") + number.to_bytes(16, "big") for number in range(count))
    return [b"%s/0/%s" % (prefix, block_hash) for block_hash in hashes]


def _placed(one: Blocks) -> PlacedBlocks:
    return PlacedBlocks(
        one.keys, one.slots, one.num_bytes, one.slots, one.num_bytes, np.zeros(len(one), np.uint64)
    )


def _try(
    tier: Tier[Any], arena: Region, prefix: bytes, made: Callable[[Blocks], Blocks]
) -> Iterator[Timing]:
    """Writes, reads and compares blocks of each size. Raises StartError if the tier fails or
    returns other bytes.

    `prefix`: of the keys.
    `made`: the tier's own type from plain blocks.
    """
    memory, offset = arena.array(), 0
    for size, count in SIZES:
        slots = offset + size * np.arange(count)
        offset += size * count
        content = np.random.default_rng().integers(0, 256, size * count, np.uint8)
        memory[slots[0] : offset] = content
        keys, sizes = _keys(prefix, size, count), np.full(count, size, np.int64)
        plain = [Blocks([key], slots[n : n + 1], sizes[:1]) for n, key in enumerate(keys)]
        blocks = [made(one) for one in plain]
        write_s, read_s = [], []
        for at, one in enumerate(blocks):
            began_s = time.monotonic()
            codes, seals = _answer(tier, partial(tier.write, one))
            write_s.append(time.monotonic() - began_s)
            if codes[0] != Write.STORED:
                raise StartError(tier.problem() or _refusal(Write(codes[0]), size))
            if isinstance(one, PlacedBlocks):
                blocks[at] = replace(one, seals=seals)
        for one in blocks:
            there = replace(one, slots=one.slots + NUM_BYTES)
            began_s = time.monotonic()
            until_s = began_s + ANSWER_S
            (codes,) = _answer(tier, partial(tier.read, there, until_s))
            read_s.append(time.monotonic() - began_s)
            if codes[0] != Read.FOUND:
                what = {Read.ABSENT: "has lost", Read.CORRUPT: "gives damaged bytes for"}
                does = what.get(Read(codes[0]), "can't read")
                raise StartError(tier.problem() or f"{does} a block of {_kib(size)} just written")
        if not np.array_equal(memory[NUM_BYTES + slots[0] : NUM_BYTES + offset], content):
            raise StartError(f"gives other bytes than were written for blocks of {_kib(size)}")
        yield Timing(
            tier.facts().name,
            size,
            count,
            statistics.median(write_s) * 1e3,
            statistics.median(read_s) * 1e3,
        )


def _refusal(code: Write, size: int) -> str:
    if code is Write.FULL:
        return f"is full: it took no block of {_kib(size)}"
    return f"could not write a block of {_kib(size)}"


def _kib(num_bytes: int) -> str:
    return f"{num_bytes // KIB} KiB"


def _answer(tier: Tier[Any], call: Callable[[Callable[..., None]], None]) -> tuple[Any, ...]:
    """Calls `call` with an `on_done` and returns its arguments. Raises StartError after ANSWER_S
    + 1 seconds."""
    answers: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    call(lambda *answer: answers.put(answer))
    try:
        return answers.get(timeout=ANSWER_S + 1)
    except queue.Empty:
        raise StartError(tier.problem() or f"does not answer within {ANSWER_S:.0f} s") from None


def _show(timings: list[Timing]) -> None:
    lines: list[tuple[str, ...]] = [
        ("tier", "block", "blocks", "write ms", "read ms", "write MB/s", "read MB/s")
    ]
    for one in timings:
        speeds = [one.block_bytes / ms / 1e3 for ms in (one.write_ms, one.read_ms)]
        lines.append(
            (
                one.tier,
                _kib(one.block_bytes),
                str(one.num_blocks),
                f"{one.write_ms:.2f}",
                f"{one.read_ms:.2f}",
                *(f"{speed:.0f}" for speed in speeds),
            )
        )
    if timings:
        print(columns(lines))
        print("one block at a time; bytes compared")
    sys.stdout.flush()
