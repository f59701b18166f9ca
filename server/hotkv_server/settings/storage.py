"""Settings of the arena and its blocks: checksums, leases, residencies, copies."""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ByteSize, Field

MIB = 1 << 20
SLABS = 512
"""Slabs grow with the arena while it has this many; it has fewer if it is too small for so many
of SMALLEST_SLAB."""
SMALLEST_SLAB, LARGEST_SLAB = 64 << 10, 16 * MIB
MIN_ENTRIES, ENTRY_BYTES = 1 << 16, 16 << 10
"""Entries of the index: at least so many, and one for so many bytes of the arena."""


def entries_for(arena_bytes: int) -> int:
    return max(MIN_ENTRIES, arena_bytes // ENTRY_BYTES)


class ArenaSettings(BaseModel, extra="forbid"):
    """The host memory that holds the blocks."""

    bytes: Annotated[ByteSize, Field(ge=16 * MIB)] = Field(
        ByteSize(1 << 30), description="Size of the arena, such as 64GiB."
    )
    max_bytes: Annotated[ByteSize, Field(ge=0)] = Field(
        ByteSize(0),
        description=(
            "Most to which a running server's arena can grow (`hotkv resize`, or a reload of "
            "bytes). Takes a thousandth of the difference in memory. 0: its size at the start. On "
            "GPUs with residency, engines wait half a minute for memory behind the arena."
        ),
    )
    dir: Path | None = Field(
        None,
        description=(
            "Directory of the arena, on tmpfs. Default: a directory under /dev/shm named after "
            "runtime_dir."
        ),
    )
    prefault: bool = Field(
        True,
        description=(
            "Prefault all memory after start, as huge pages if the kernel has them. false: memory "
            "is allocated when it is first used."
        ),
    )
    keep: bool = Field(
        True,
        description=(
            "Keep the arena at a clean stop, so that the next server continues with its blocks."
        ),
    )
    pin: Literal["auto", "required", "off"] = Field(
        "auto",
        description=(
            "Pin the arena for GPUs. auto: as much as the system grants; the rest is copied "
            "slowly. required: what is not granted is an error. off: pin nothing."
        ),
    )
    numa: Annotated[str, Field(pattern=r"^(auto|interleave|none|[0-9]{1,3})$")] = Field(
        "auto",
        description=(
            "NUMA nodes of the arena: auto (those of the GPUs), interleave (all in turns), none "
            "(as the kernel decides), or a node's number."
        ),
    )

    @property
    def slab_size(self) -> int:
        """In bytes."""
        slab_bytes = SMALLEST_SLAB
        while slab_bytes < LARGEST_SLAB and 2 * slab_bytes * SLABS <= self.bytes:
            slab_bytes *= 2
        return slab_bytes

    @property
    def most_bytes(self) -> int:
        return max(self.bytes, self.max_bytes)

    @property
    def capacity(self) -> int:
        """Most entries of the index."""
        return entries_for(self.most_bytes)


class IntegritySettings(BaseModel, extra="forbid"):
    """Checksums: the server compares blocks with them before it trusts their bytes."""

    check: Literal["sampled", "full", "off"] = Field(
        "sampled",
        description=(
            "What a checksum covers: one line of 64 bytes in each 4 KiB (sampled), all bytes "
            "(full), or nothing (off)."
        ),
    )
    scrub_bytes_per_s: Annotated[ByteSize, Field(ge=0)] = Field(
        ByteSize(256 * MIB),
        description=(
            "Bytes of blocks that are compared with their checksums in the background, a "
            "second. 0: none."
        ),
    )

    @property
    def stride(self) -> int:
        """Distance of the lines (64 bytes) that a checksum covers, in lines; 0 for no checksums."""
        return {"sampled": 64, "full": 1, "off": 0}[self.check]


class LeaseSettings(BaseModel, extra="forbid"):
    """Leases: how much they may pin."""

    unadmitted_share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.25,
        description=(
            "Largest share of the arena that requests may pin before the engine admits them."
        ),
    )


class ResidencySettings(BaseModel, extra="forbid"):
    """Residencies: requests whose blocks stay in the arena as long as they run."""

    share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.8,
        description=(
            "Largest share of the arena that residencies may be promised and pin. With tenants: of "
            "what is surely a tenant's. A sixteenth of the arena stays for others at any rate."
        ),
    )
    grace_s: Annotated[float, Field(ge=0, le=600)] = Field(
        10.0,
        description=(
            "How long a server that takes over an arena keeps what residencies of the one before "
            "had pinned, in seconds: longer than engines need to come back."
        ),
    )


class CopySettings(BaseModel, extra="forbid"):
    """Copies between engines and the arena."""

    threads: Annotated[int, Field(ge=0, le=256)] = Field(
        0, description="Number of copy threads. 0: half the processors, 1 to 8."
    )
    cuda: Literal["auto", "on", "off"] = Field(
        "auto",
        description=(
            "Serve engines on GPUs. auto: if there is an NVIDIA device. on: refuse to start if it "
            "does not work. off: never."
        ),
    )

    @property
    def num_threads(self) -> int:
        return self.threads or min(8, max(1, len(os.sched_getaffinity(0)) // 2))
