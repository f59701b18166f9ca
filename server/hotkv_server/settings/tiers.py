"""Settings of the tiers below host memory."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ByteSize, Field

from hotkv_server.settings.compression import Compress
from hotkv_server.settings.mooncake import MooncakeSettings
from hotkv_server.settings.s3 import S3Settings
from hotkv_server.settings.valkey import ValkeySettings

MIB, GIB = 1 << 20, 1 << 30
MIN_SLAB_BYTES, MAX_SLAB_BYTES = 4 * MIB, 256 * MIB
MIN_SLABS = 512
"""So many slabs at least, if they are larger than the smallest."""


class DiskSettings(BaseModel, extra="forbid"):
    """A tier on a local disk."""

    path: Path | None = Field(
        None,
        description=(
            "Folder of the tier on a local disk, of this server alone. None: no such tier."
        ),
    )
    bytes: Annotated[ByteSize, Field(ge=16 * MIB)] = Field(
        ByteSize(100 * GIB),
        description="Size of the slab file in that folder, such as 200GiB.",
    )
    write_gb_per_day: Annotated[float | None, Field(gt=0)] = Field(
        None,
        description=(
            "Most that is written there in any 24 hours, in GB: disks wear. What is left decides "
            "which share of new chains is written; one that comes again is. None: no limit."
        ),
    )
    compress: Compress = "off"
    threads: Annotated[int, Field(ge=1, le=64)] = Field(
        20, description="Threads that read and write; at most three quarters of them write."
    )


class TierSettings(BaseModel, extra="forbid", hide_input_in_errors=True):
    """What lies below host memory, and how long a hit waits for it."""

    disk: DiskSettings = Field(default_factory=lambda: DiskSettings())  # type: ignore[call-arg]
    valkey: ValkeySettings | None = Field(
        None,
        description="A Valkey or Redis server that nodes share. None: no such tier.",
    )
    mooncake: MooncakeSettings | None = Field(
        None,
        description="A Mooncake Store that nodes share. None: no such tier.",
    )
    s3: S3Settings | None = Field(
        None,
        description="A bucket of S3 or of a store like it, that nodes share. None: no such tier.",
    )
    lookup_wait_ms: Annotated[int, Field(ge=0, le=60_000)] = Field(
        200,
        description=(
            "Longest time that a request waits for a tier to say what it has, and again for blocks "
            "to come up, in milliseconds. What comes later is there for the next request."
        ),
    )

    @property
    def write_bytes_per_day(self) -> int | None:
        """The disk's budget."""
        gb_per_day = self.disk.write_gb_per_day
        return None if gb_per_day is None else int(gb_per_day * 1e9)

    @property
    def slab_bytes(self) -> int:
        """Size of a slab of a new disk. Large, since what is left of a slab behind its last place
        is lost: of 4 MiB two places of 1.5 MiB, for encoded blocks of 2 MiB, leave a quarter."""
        slab_bytes = MIN_SLAB_BYTES
        while slab_bytes < MAX_SLAB_BYTES and 2 * slab_bytes * MIN_SLABS <= self.disk.bytes:
            slab_bytes *= 2
        return slab_bytes

    @property
    def capacity(self) -> int:
        """Most blocks below: one per 16 KiB."""
        return max(1 << 12, self.disk.bytes // (16 << 10))
