"""Whether a tier stores blocks in fewer bytes."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

STAGING_BYTES = 64 << 20
"""Memory of a tier that compresses, through which its blocks go."""
Compress: TypeAlias = Annotated[
    Literal["off", "auto"],
    Field(
        description=(
            "auto: bfloat16 blocks are stored in three quarters of their bytes, exactly; others as "
            "they are. All nodes and servers read both. Takes 64 MiB of memory."
        )
    ),
]
