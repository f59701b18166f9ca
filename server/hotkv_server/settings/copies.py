"""Settings of copies between engines and the arena."""

import os
from typing import Annotated, Literal

from pydantic import BaseModel, ByteSize, Field, model_validator

MIB = 1 << 20


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
    piece_bytes: Annotated[ByteSize, Field(ge=MIB)] = Field(
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
        """Copy threads."""
        return self.threads or min(8, max(1, len(os.sched_getaffinity(0)) // 2))
