"""Settings of the tier in Mooncake Store."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from hotkv_server.settings.compression import Compress

PEER_TO_PEER = "P2PHANDSHAKE"


class MooncakeSettings(BaseModel, extra="forbid"):
    """A Mooncake Store that keeps blocks for many nodes. Its memory is given by clients of its own
    (`mooncake_client`); hotkv's children give none, so killing one loses nothing."""

    master: str = Field(description="host:port of its master.")
    metadata_server: str = Field(
        PEER_TO_PEER, description="URL of its metadata server, or P2PHANDSHAKE for none."
    )
    local_hostname: str = Field(
        description="Name or address under which its other clients reach this node."
    )
    protocol: Literal["tcp", "rdma"] = Field("tcp", description="How bytes are moved.")
    devices: str = Field("", description="RDMA devices, with commas in between.")
    compress: Compress = "off"
    children: Annotated[int, Field(ge=1, le=16)] = Field(
        2, description="Child processes, with a thread each."
    )
    connect_timeout_s: Annotated[float, Field(gt=0, le=60)] = Field(
        10.0, description="Longest time for a child to be ready, in seconds."
    )
    timeout_s: Annotated[float, Field(gt=0, le=600)] = Field(
        5.0,
        description="Longest time for a batch of blocks, in seconds, until its child is killed.",
    )
