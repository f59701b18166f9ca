"""Settings of HTTP and of events."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ByteSize, Field, field_validator, model_validator

MIB = 1 << 20


class HttpSettings(BaseModel, extra="forbid"):
    """The status page and its API, metrics and probes over HTTP."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: Annotated[int, Field(ge=-1, le=65535)] = Field(
        9433, description="Port to listen on. 0: any free port. -1: no HTTP."
    )
    token_file: Path | None = Field(
        None,
        description=(
            "File with the token for the status page and its API, and nothing else. Others must "
            "not be able to read it. Not set: no token on this machine, no page beyond it."
        ),
    )


TOPIC_FIELDS = {"host": "", "model": "", "tenant": "", "key_space": 0}


class EventSettings(BaseModel, extra="forbid"):
    """KV events for routers, in vLLM's format over ZMQ. Needs the extra `events`."""

    endpoint: str = Field(
        "",
        description=(
            "ZMQ address to publish on, such as tcp://*:5557. An address with * is bound, "
            "another is connected to. Empty: no events."
        ),
    )
    replay_endpoint: str = Field(
        "",
        description=(
            "ZMQ address that replays messages which a reader has missed, such as tcp://*:5558. "
            "Empty: no replay."
        ),
    )
    topic: str = Field(
        "kv@{host}@{model}",
        description=(
            "Topic of the messages. {host}, {model}, {tenant} and {key_space} are replaced by "
            "their values."
        ),
    )
    buffer_steps: Annotated[int, Field(ge=1, le=10_000_000)] = Field(
        10_000, description="Most messages that are kept for replay, per topic."
    )
    buffer_bytes: Annotated[ByteSize, Field(ge=MIB)] = Field(
        ByteSize(64 * MIB),
        description=(
            "Most bytes that wait to be sent, and most that are kept for replay. Both are for all "
            "topics together."
        ),
    )
    int_hashes: bool = Field(
        True,
        description=(
            "Publish hashes as 64-bit numbers, as engines do with "
            "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=1. false: whole hashes."
        ),
    )

    @field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if value and not value.startswith(("tcp://", "ipc://")):
            raise ValueError("must begin with tcp:// or ipc://")
        return value

    @field_validator("topic")
    @classmethod
    def _has_known_fields(cls, value: str) -> str:
        try:
            value.format(**TOPIC_FIELDS)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ValueError(
                f"may name {', '.join('{' + name + '}' for name in TOPIC_FIELDS)} in braces, and "
                "nothing else"
            ) from error
        return value

    @model_validator(mode="after")
    def _replays_something(self) -> "EventSettings":
        if self.replay_endpoint and not self.endpoint:
            raise ValueError("replay_endpoint needs endpoint")
        return self
