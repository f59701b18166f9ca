"""Disk tiers on several kinds of file systems, in temporary folders, and their `TierRig`s for
`tier_contract`."""

import contextlib
import mmap
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hotkv_server.dataplane.plan import Region
from hotkv_server.tiers.compression.staged import Staged
from hotkv_server.tiers.disk.slab_file import FileIO, SlabFile
from hotkv_server.tiers.disk.tier import DiskTier
from hotkv_server.tiers.protocol import Write
from tests.contracts.tier_contract import ARENA_BYTES, Bench, TierRig
from tests.doubles.faulty_disk import EVERYWHERE, Fault, FaultyDisk

SHM = Path("/dev/shm")


def memory(num_bytes: int) -> NDArray[np.uint8]:
    """Zeros, beginning at a page boundary."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


def region(of: NDArray[np.uint8]) -> Region:
    return Region(of.ctypes.data, len(of), "arena")


@contextlib.contextmanager
def shm_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="hotkv-disk-", dir=SHM))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def small_tmpfs(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Skips the test if mounting is not allowed."""
    with _mounted(folder, ["-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs"]) as at:
        yield at


@contextlib.contextmanager
def small_ext4(folder: Path, num_bytes: int) -> Iterator[Path]:
    """On a loop device. Skips the test if mounting is not allowed."""
    image = folder / "image"
    with open(image, "wb") as file:
        file.truncate(num_bytes)
    if not shutil.which("mkfs.ext4"):
        pytest.skip("mkfs.ext4 is not there")
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    with _mounted(folder, ["-t", "ext4", "-o", "loop", str(image)]) as at:
        yield at


@contextlib.contextmanager
def _mounted(folder: Path, arguments: list[str]) -> Iterator[Path]:
    at = folder / "mounted"
    at.mkdir()
    done = subprocess.run(["mount", *arguments, str(at)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"can't mount: {done.stderr.strip()}")
    try:
        yield at
    finally:
        # A failed test may leave files open: unmounted when the last is closed.
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def flip(path: Path, at: int, mask: int = 1) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ mask]), at)
        os.fsync(fd)
    finally:
        os.close(fd)


class Disk:
    """A disk tier over a `FaultyDisk`.

    num_bytes: of the tier's file; 0: as the arena.
    stages: makes its staging memory.
    """

    def __init__(self, folder: Path, *, direct: bool = True,
                 arena_bytes: int = ARENA_BYTES, num_bytes: int = 0,
                 stages: Callable[[Region], Staged] = Staged, **options: Any) -> None:  # fmt: skip
        self.memory = memory(arena_bytes)
        self.file = SlabFile.open(folder, num_bytes or arena_bytes, direct=direct)
        self.io, arena = FaultyDisk(FileIO(self.file.fd)), region(self.memory)
        self.staged = stages(arena)
        self.tier = DiskTier(arena, self.file, io=self.io, staged=self.staged, **options)

    def rig(self, **options: Any) -> TierRig:
        return TierRig(self.tier, region(self.memory), self._damage, self._breaks, **options)

    def _damage(self, key: bytes, place: int) -> None:
        flip(self.file.path, place + 5)

    @contextlib.contextmanager
    def _breaks(self) -> Iterator[None]:
        self.io.reads[EVERYWHERE] = self.io.writes[EVERYWHERE] = Fault(code=5)
        yield
        self.io.heal()

    def stored(self, numbers: list[int], **options: Any) -> Bench:
        """A `Bench` with blocks that are on the disk and no longer in the arena."""
        bench = Bench(self.rig(**options))
        bench.fill(numbers, numbers)
        assert (bench.write(numbers, numbers) == Write.STORED).all()
        bench.arena[:] = 0
        self.io.begun.clear()
        return bench


@contextlib.contextmanager
def disk(folder: Path, **options: Any) -> Iterator[Disk]:
    """At the end, hanging calls of the disk go on."""
    made = Disk(folder, **options)
    try:
        yield made
    finally:
        made.io.heal()
        made.tier.close()
