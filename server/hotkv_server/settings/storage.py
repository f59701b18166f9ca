"""Settings of the arena and its blocks: checksums, leases, residencies, copies."""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ByteSize, Field, field_validator, model_validator

MIB, TIB = 1 << 20, 1 << 40
SLABS = 512
"""Without `slab_bytes`, slabs grow only while the arena still has this many; it has fewer if it
is too small for so many of SMALLEST_SLAB."""
SMALLEST_SLAB, LARGEST_SLAB = 4 * MIB, 16 * MIB


class ArenaSettings(BaseModel, extra="forbid"):
    """The host memory that holds the blocks."""

    bytes: Annotated[ByteSize, Field(ge=16 * MIB)] = Field(
        ByteSize(1 << 30), description="Size of the arena, such as 64GiB."
    )
    dir: Path | None = Field(
        None,
        description=(
            "Directory of the arena, on tmpfs. Default: a directory under /dev/shm named after "
            "runtime_dir."
        ),
    )
    slab_bytes: Annotated[ByteSize, Field(ge=0)] = Field(
        ByteSize(0),
        description=(
            "Size of one slab: the unit in which memory moves from one slot size to another. Must "
            "be a multiple of 4KiB, and at least 64KiB. 0: 4MiB, 8MiB from 4GiB of arena on, "
            "16MiB from 8GiB on."
        ),
    )
    max_blocks: Annotated[int, Field(ge=0, le=1 << 30)] = Field(
        0,
        description=("Most entries of the index: blocks and sketches. 0: one per 16 KiB of arena."),
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
    pin_piece_bytes: Annotated[ByteSize, Field(ge=2 * MIB, le=TIB)] = Field(
        ByteSize(1 << 30),
        description="Bytes that are pinned in one call. Must be a multiple of 2MiB.",
    )
    numa: Annotated[str, Field(pattern=r"^(auto|interleave|none|[0-9]{1,3})$")] = Field(
        "auto",
        description=(
            "NUMA nodes of the arena: auto (those of the GPUs), interleave (all in turns), none "
            "(as the kernel decides), or a node's number."
        ),
    )

    @field_validator("pin_piece_bytes")
    @classmethod
    def _whole_huge_pages(cls, value: ByteSize) -> ByteSize:
        if value % (2 * MIB):
            raise ValueError("must be a multiple of 2MiB")
        return value

    @field_validator("slab_bytes")
    @classmethod
    def _whole_pages(cls, value: ByteSize) -> ByteSize:
        if value % 4096:
            raise ValueError("must be a multiple of 4KiB")
        if 0 < value < 64 << 10:
            raise ValueError("must be at least 64KiB, or 0")
        return value

    @model_validator(mode="after")
    def _fits(self) -> "ArenaSettings":
        if self.slab_bytes > self.bytes:
            raise ValueError("slab_bytes must not be larger than bytes")
        return self

    @property
    def slab_size(self) -> int:
        """In bytes: `slab_bytes`, or by the arena's size."""
        if self.slab_bytes:
            return self.slab_bytes
        slab_bytes = SMALLEST_SLAB
        while slab_bytes < LARGEST_SLAB and 2 * slab_bytes * SLABS <= self.bytes:
            slab_bytes *= 2
        return slab_bytes

    @property
    def capacity(self) -> int:
        """Most entries of the index."""
        return self.max_blocks or max(1 << 16, self.bytes // (16 << 10))


class IntegritySettings(BaseModel, extra="forbid"):
    """Checksums: the server compares blocks with them before it trusts their bytes."""

    check: Literal["sampled", "full", "off"] = Field(
        "sampled",
        description=(
            "What a checksum covers: one line of 64 bytes in each 4 KiB (sampled), all bytes "
            "(full), or nothing (off)."
        ),
    )
    start_check_s: Annotated[float, Field(ge=0, le=3600)] = Field(
        0.3,
        description=(
            "Longest time that a start compares blocks with their checksums, in seconds. The "
            "rest is compared when it is first loaded."
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
    """Leases: how long they live, and how much they may pin."""

    ttl_s: Annotated[float, Field(gt=0, le=600)] = Field(
        30.0, description="Lifetime of a lease if the client names none, in seconds."
    )
    unadmitted_share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.25,
        description=(
            "Largest share of the arena that requests may pin before the engine admits them."
        ),
    )
    held_share: Annotated[float, Field(ge=0, le=1)] = Field(
        0.25,
        description=(
            "Largest share of the arena that requests may ask to keep (retention with pin). 0: "
            "none."
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
    method: Literal["auto", "memcpy", "batch", "kernel", "staged"] = Field(
        "auto",
        description=(
            "How a GPU copies: auto (the method that a measurement at the first start finds best), "
            "memcpy, batch, kernel or staged."
        ),
    )
    piece_bytes: Annotated[ByteSize, Field(ge=MIB, le=TIB)] = Field(
        ByteSize(32 * MIB),
        description=(
            "Size of the pieces of a GPU's copies. Other transfers take their turns between pieces."
        ),
    )
    depth: Annotated[int, Field(ge=1, le=64)] = Field(
        4, description="Pieces that a GPU has in its queue at a time, in each direction."
    )
    staging_bytes: Annotated[ByteSize, Field(ge=0)] = Field(
        ByteSize(128 * MIB),
        description="Memory of each GPU that the server uses for staging. 0: none.",
    )

    @model_validator(mode="after")
    def _stages(self) -> "CopySettings":
        if self.method == "staged" and not self.staging_bytes:
            raise ValueError("method staged needs staging_bytes")
        if 0 < self.staging_bytes < 2 * self.depth * 4096:
            raise ValueError(
                f"staging_bytes must be 0 or at least {2 * self.depth * 4096} with this depth"
            )
        return self

    @property
    def num_threads(self) -> int:
        return self.threads or min(8, max(1, len(os.sched_getaffinity(0)) // 2))
