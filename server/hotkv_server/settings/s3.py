"""Settings of the tier in an S3 bucket: where it is, who hotkv is there, and how long it waits.

Always true: no secret stands in them. The access key is read from a file when it is needed, and
errors do not repeat what was given.
"""

import re
import secrets
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from hotkv_server.settings.compression import Compress

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[0-9A-Za-z_-][0-9A-Za-z._-]*(/[0-9A-Za-z_-][0-9A-Za-z._-]*)*")
_REGION = re.compile(r"[0-9A-Za-z-]{1,64}")


class S3Settings(BaseModel):
    """A bucket that keeps blocks, for one node or many."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    bucket: str = Field(description="Its name. The bucket must exist.")
    prefix: str = Field(
        "hotkv", description="Folder of hotkv's objects in it. Nodes that share have the same."
    )
    endpoint: str = Field(
        "",
        description="https://host or http://host:port of the store. Empty: AWS, in this region.",
    )
    region: str = Field("us-east-1", description="Region of the bucket.")
    credentials_file: Path | None = Field(
        None,
        description=(
            "File with the access key, as AWS has it: [default], aws_access_key_id, "
            "aws_secret_access_key, and aws_session_token if there is one. Others must not be able "
            "to read it. It is read anew when the store has refused it. Default: the machine's "
            "role or AWS_* variables."
        ),
    )
    ca_file: Path | None = Field(
        None, description="Authority that signs the store's certificate, besides the system's."
    )
    compress: Compress = "off"
    connections: Annotated[int, Field(ge=1, le=64)] = Field(
        8, description="Calls to it at a time, with a thread each. Half of them may be writes."
    )
    pack_bytes: Annotated[int, Field(ge=4 << 20, le=64 << 20)] = Field(
        16 << 20,
        description=(
            "Bytes of blocks in an object, as far as a write has so many. Each write under way "
            "takes a copy of so much memory."
        ),
    )
    index_blocks: Annotated[int, Field(ge=1 << 16, le=1 << 26)] = Field(
        1 << 20,
        description="Blocks of the bucket that this node knows of, some 170 bytes of memory each.",
    )
    refresh_s: Annotated[float, Field(ge=0.01, le=3600)] = Field(
        10.0,
        description=(
            "How long, in seconds, a node that asks for blocks waits until it looks again for what "
            "other nodes have written."
        ),
    )
    connect_timeout_s: Annotated[float, Field(gt=0, le=60)] = Field(
        3.0, description="Longest wait for an answer that shows the bucket can be used, in seconds."
    )
    timeout_s: Annotated[float, Field(gt=0, le=600)] = Field(
        15.0, description="Longest time for a batch of blocks, in seconds."
    )
    node: str = Field(
        default_factory=lambda: secrets.token_hex(8),
        pattern=r"^[0-9a-z]{1,32}$",
        description="Name of this server in its objects' names. Default: random at each start.",
    )

    @field_validator("bucket")
    @classmethod
    def _is_bucket(cls, value: str) -> str:
        if not _BUCKET.fullmatch(value):
            raise ValueError("a bucket's name has 3 to 63 of a-z, 0-9, '.' and '-'")
        return value

    @field_validator("prefix")
    @classmethod
    def _is_folder(cls, value: str) -> str:
        if not _PREFIX.fullmatch(value) or len(value) > 256:
            raise ValueError(
                "must be a folder such as hotkv or team/hotkv, of 0-9, A-Z, a-z, '.', '_' and '-'"
            )
        return value

    @field_validator("region")
    @classmethod
    def _is_region(cls, value: str) -> str:
        if not _REGION.fullmatch(value):
            raise ValueError("must be a region such as eu-central-1; many stores take any")
        return value

    @field_validator("endpoint")
    @classmethod
    def _can_be_reached(cls, value: str) -> str:
        if not value:
            return value
        try:
            parts = urlsplit(value)
            _ = parts.port
        except ValueError:
            raise ValueError("the port must be a number from 0 to 65535") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be https://host, https://host:port or http://host:port")
        if "@" in parts.netloc or parts.path not in ("", "/") or parts.query or parts.fragment:
            raise ValueError(
                "must have no user, path or query: bucket, prefix and credentials_file have "
                "settings of their own"
            )
        return value.rstrip("/")

    @model_validator(mode="after")
    def _agrees(self) -> "S3Settings":
        if self.ca_file is not None and not self.is_tls:
            raise ValueError("ca_file needs an https:// endpoint")
        return self

    @property
    def url(self) -> str:
        """Of the store."""
        return self.endpoint or f"https://s3.{self.region}.amazonaws.com"

    @property
    def is_tls(self) -> bool:
        """False for http:// endpoints: everybody on the way sees the blocks then."""
        return self.url.startswith("https:")

    @property
    def place(self) -> str:
        """Of the objects, for people."""
        return f"{self.url}/{self.bucket}/{self.prefix}"
