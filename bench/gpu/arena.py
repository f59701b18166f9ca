"""Measures how fast a GPU reads the server's arena directly, in fragments of 8 KiB, in each way
that the device allows, in turns with plain copies from pinned memory.

`python -m bench.gpu.arena [--json]`, with CuPy; seconds, 64 MiB of host memory, no server. An
engine maps the arena read-only; its device reads it registered read-only, or as pageable memory.
`writable` is the mapping of engines in `security.arena_writers`, which every GPU can register.
All bytes are compared.
"""

import mmap
import os
import sys
from contextlib import closing, suppress
from typing import Any

import numpy as np

from bench.gpu.figures import Figure, gpu_parser, print_figures
from bench.gpu.kernels import U8, CudaArrays, HostArrays, array_kernels
from bench.report import median
from hotkv_proto.errors import HotKVError
from hotkv_sparse.cuda.device import cupy_module
from hotkv_sparse.cuda.hotsets import Fragment
from hotkv_sparse.cuda.mapped_arena import (
    PAGEABLE_ACCESS,
    READ_ONLY_REGISTER,
    SAME_ADDRESS,
    Access,
    MappedArena,
)

KV_HEADS, BLOCK_TOKENS, HEAD_SIZE = 8, 16, 128
FRAGMENT_BYTES = BLOCK_TOKENS * HEAD_SIZE * 2 * 2
"""K and V of a block in one KV head, in float16: the smallest piece that a kernel copies."""
SEQUENCES, LOADS = 64, 4
ROUNDS = 20
PULL_TARGET = 0.6
READ_ONLY, PAGEABLE, WRITABLE = "registered read-only", "pageable", "registered writable"


class Mapping:
    """Shared memory as the server maps it (`server`), and as engines do (`writable`,
    `read_only`)."""

    def __init__(self, num_bytes: int) -> None:
        fd = os.memfd_create("arena")
        os.posix_fallocate(fd, 0, num_bytes)
        maps = mmap.MAP_SHARED
        self.server, self.writable = (
            np.frombuffer(mmap.mmap(fd, num_bytes, maps), np.uint8) for _ in range(2)
        )
        self.read_only = np.frombuffer(mmap.mmap(fd, num_bytes, maps, mmap.PROT_READ), np.uint8)
        os.close(fd)
        self.server[:] = np.random.default_rng(2).integers(0, 256, num_bytes, np.uint8)


class Puller:
    """Copies scattered fragments to the device by the kernel `pull_blocks`, as a decode step
    does: some blocks of each of many sequences.
    """

    def __init__(self, kernels: "CudaArrays | HostArrays", sequences: int) -> None:
        self._kernels, self._sequences = kernels, sequences
        self._given: tuple[Any, ...] = ()
        self._block_bytes, xp = KV_HEADS * FRAGMENT_BYTES, kernels.xp
        self.num_bytes = sequences * LOADS * self._block_bytes
        self._pages = xp.zeros(self.num_bytes, xp.uint8)
        self._flat, self._pinned = (
            xp.zeros(self.num_bytes, xp.uint8),
            kernels.pinned(self.num_bytes),
        )
        rng, count = np.random.default_rng(3), sequences * LOADS
        self._sources = rng.permutation(2 * count)[:count].reshape(sequences, LOADS)
        self._targets = rng.permutation(count).astype(np.int32)

    def pull(self) -> None:
        self._kernels.device.launch("pull_blocks", (LOADS, 2, self._sequences), 256, self._given)

    def aim(self, address: int) -> None:
        """Later pulls read the arena at this address."""
        xp, base = self._kernels.xp, self._kernels.address(self._pages)
        places = [
            Fragment(i * FRAGMENT_BYTES, base + i * FRAGMENT_BYTES, FRAGMENT_BYTES)
            for i in range(KV_HEADS)
        ]
        table = [[place.offset_bytes, place.address, place.num_bytes] for place in places]
        blocks = np.tile(np.arange(LOADS, dtype=np.int32), (self._sequences, 1))
        counts = np.zeros((self._sequences, 8), np.int32)
        counts[:, 0] = LOADS
        at = address + self._sources.astype(np.int64) * self._block_bytes
        self._given = (
            xp.asarray(np.stack([blocks, blocks], axis=1)), np.int32(LOADS), xp.asarray(counts),
            xp.arange(self._sequences, dtype=np.int32), xp.asarray(at), np.int32(LOADS),
            xp.asarray(np.array(table, np.int64)), np.int32(KV_HEADS),
            np.int64(self._block_bytes), xp.asarray(self._targets.reshape(-1, LOADS)),
            np.int32(LOADS), xp.zeros(2, np.int32),
        )  # fmt: skip

    def copy(self) -> None:
        """As many bytes, from pinned memory, by CUDA's plain call."""
        self._kernels.copy_in(self._flat, self._pinned)

    def check(self, content: U8) -> None:
        """Compares all pages with `content`, then clears them. Raises ValueError."""
        held = self._kernels.device.read(self._pages).reshape(len(self._targets), -1)
        expected = content.reshape(-1, self._block_bytes)[self._sources.reshape(-1)]
        if not np.array_equal(held[self._targets], expected):
            raise ValueError("a pull moved wrong bytes")
        self._kernels.device.write(self._pages, (0,), np.zeros(self.num_bytes, np.uint8))


def allowed() -> tuple[bool, bool]:
    """(registered read-only, pageable): can the device read so?"""
    runtime = cupy_module().cuda.runtime
    registers, same, pageable = (
        bool(runtime.deviceGetAttribute(attribute, 0))
        for attribute in (READ_ONLY_REGISTER, SAME_ADDRESS, PAGEABLE_ACCESS)
    )
    return registers and same, pageable


def pulled_share(puller: Puller, kernels: "CudaArrays | HostArrays", rounds: int) -> float:
    """Rate of the kernel, divided by that of plain copies."""
    pulls, copies = [], []
    for number in range(rounds + 2):
        pull_ms = kernels.milliseconds(puller.pull)
        copy_ms = kernels.milliseconds(puller.copy)
        if number >= 2:
            pulls.append(pull_ms)
            copies.append(copy_ms)
    return median(copies) / median(pulls)


def measure(kernels: "CudaArrays | HostArrays", rounds: int, sequences: int) -> list[Figure]:
    """Only the way that engines use on this device has a target."""
    puller = Puller(kernels, sequences)
    mapping = Mapping(2 * puller.num_bytes)
    registers, pageable = allowed()
    figures = [
        Figure("arena: read-only mappings can be registered (1: yes)", float(registers)),
        Figure("arena: pageable memory can be read (1: yes)", float(pageable)),
    ]
    taken = READ_ONLY if registers else PAGEABLE if pageable else WRITABLE
    ways = {READ_ONLY: registers, PAGEABLE: pageable, WRITABLE: True}
    for way in [way for way, is_allowed in ways.items() if is_allowed]:
        memory = mapping.writable if way == WRITABLE else mapping.read_only
        with suppress(HotKVError), closing(MappedArena(memory, is_writable=way == WRITABLE)) as it:
            if way != PAGEABLE and it.access is Access.REGISTERED:
                it.start()
                if not it.wait(30):
                    print(f"{way}: {it.error}", file=sys.stderr)
                    continue
            puller.aim(it.address)
            share = pulled_share(puller, kernels, rounds)
            puller.check(mapping.server)
            target = PULL_TARGET if way == taken else None
            figures.append(Figure(f"arena: pulls of 8 KiB, {way}, of plain copy", share, target))
    print(f"an engine's device reads the arena {taken}", flush=True)
    return figures


def main() -> int:
    options = gpu_parser("Ways and speeds of a GPU's reads of the arena.").parse_args()
    kernels = array_kernels(options.made_up)
    small = options.made_up or options.quick
    figures = measure(kernels, 2 if small else ROUNDS, 2 if options.made_up else SEQUENCES)
    print_figures(figures, {"made_up": options.made_up}, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
