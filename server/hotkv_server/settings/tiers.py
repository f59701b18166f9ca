"""Settings of the tiers below host memory."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ByteSize, Field

from hotkv_server.settings.mooncake import MooncakeSettings
from hotkv_server.settings.s3 import S3Settings
from hotkv_server.settings.valkey import ValkeySettings

MIB, GIB = 1 << 20, 1 << 30


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
    threads: Annotated[int, Field(ge=1, le=64)] = Field(
        16, description="Threads that read and write."
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
        """Size of a slab below."""
        return 4 << 20

    @property
    def capacity(self) -> int:
        """Most blocks below: one per 16 KiB."""
        return max(1 << 12, self.disk.bytes // (16 << 10))
