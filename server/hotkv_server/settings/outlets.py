"""Settings of HTTP, of events and of traces."""

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ByteSize, Field, field_validator, model_validator

MIB = 1 << 20
MAX_PORT = 65_535


class HttpSettings(BaseModel, extra="forbid"):
    """The status page and its API, metrics and probes over HTTP."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: Annotated[int, Field(ge=-1, le=MAX_PORT)] = Field(
        9433, description="Port to listen on. 0: any free port. -1: no HTTP."
    )
    token_file: Path | None = Field(
        None,
        description=(
            "File with the token for the status page and its API, and nothing else. Others must "
            "not be able to read it. Not set: no token on this machine, no page beyond it."
        ),
    )


TOPIC_FIELDS = {"node": "", "pool": "", "model": "", "tenant": "", "key_space": 0}


class EventSettings(BaseModel, extra="forbid"):
    """KV events for routers, in vLLM's format over ZMQ. Needs the extra `events`."""

    endpoint: str = Field(
        "",
        description=(
            "ZMQ address to publish on, such as tcp://*:5557. An address with *, 0.0.0.0 or :: is "
            "bound, another is connected to. Empty: no events."
        ),
    )
    replay_endpoint: str = Field(
        "",
        description=(
            "ZMQ address that replays messages which a reader has missed, such as tcp://*:5558. "
            "Empty: no replay."
        ),
    )
    identity: Literal["node", "pool", "engine"] = Field(
        "node",
        description=(
            "In whose name blocks are told. node: this server's, at the endpoint. pool: at the "
            "endpoint too, but only blocks of a store that nodes share, in the name of them all. "
            "engine: each vLLM engine tells of the blocks as its own, at its own endpoint "
            "(--kv-events-config)."
        ),
    )
    answers: bool = Field(
        False,
        description=(
            "Answer routers that ask which blocks of a prompt are cached: POST "
            "/api/v1/check_blocks of http, as Dynamo's router asks a shared cache."
        ),
    )
    node: str = Field(
        "",
        description="Name of this node in topics. Empty: the host's name.",
    )
    pool: str = Field("", description="Name of the pool in topics, for identity pool.")
    topic: str = Field(
        "",
        description=(
            "Topic of the messages. {node}, {pool}, {model}, {tenant} and {key_space} are replaced "
            "by their values. {model} is the name that requests use. Empty: kv@node:{node}@{model} "
            "or kv@pool:{pool}@{model}, by identity."
        ),
    )
    numbering: Literal["topic", "endpoint"] = Field(
        "topic",
        description=(
            "What the messages' sequence numbers count: the messages of each topic, or those of "
            "the whole endpoint. Dynamo's indexer needs endpoint if the server has several models."
        ),
    )
    content_bytes: Annotated[ByteSize, Field(ge=MIB)] = Field(
        ByteSize(256 * MIB),
        description=(
            "Most bytes of token ids of cached blocks, kept for tiers' events, late readers and a "
            "later server. They lie beside the arena and take memory as blocks come: some 100 "
            "bytes for a block of 16 tokens, and 200 more in the process."
        ),
    )

    @field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if value and not value.startswith(("tcp://", "ipc://")):
            raise ValueError("must begin with tcp:// or ipc://")
        rest = value.partition("://")[2]
        port = rest.rpartition(":")[2] if value.startswith("tcp://") else "0"
        # ZMQ would accept a larger port number.
        if value and not (rest and port.isascii() and port.isdecimal() and int(port) <= MAX_PORT):
            raise ValueError(
                f"must be as tcp://*:5557, with a port up to {MAX_PORT}, or ipc://PATH"
            )
        return value

    @field_validator("topic")
    @classmethod
    def _has_known_fields(cls, value: str) -> str:
        try:
            value.format(**TOPIC_FIELDS)
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            raise ValueError(
                f"may name {', '.join('{' + name + '}' for name in TOPIC_FIELDS)} in braces, and "
                "nothing else"
            ) from error
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> "EventSettings":
        if self.replay_endpoint and not self.endpoint:
            raise ValueError("replay_endpoint needs endpoint")
        if self.endpoint and self.replay_endpoint == self.endpoint:
            raise ValueError("replay_endpoint must be another address than endpoint")
        if self.identity == "engine" and self.endpoint:
            raise ValueError("identity engine publishes at the engines; leave endpoint empty")
        if self.identity == "pool" and not self.pool:
            raise ValueError("identity pool needs pool, the name that all of its nodes give it")
        return self


FROM_ENVIRONMENT = "env"
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class TracingSettings(BaseModel, extra="forbid"):
    """Traces of lookups, leases, loads, stores and tiers, over OTLP. Needs the extra `otel`."""

    endpoint: str = Field(
        "",
        description=(
            "URL of an OTLP/HTTP receiver, such as http://127.0.0.1:4318; /v1/traces is added if "
            "it has no path. env: the variables OTEL_EXPORTER_OTLP_* have it. Empty: no traces."
        ),
    )
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0,
        description=(
            "Share of calls without a trace context that begin a trace of their own. Calls with "
            "one are traced if their caller is."
        ),
    )
    headers_file: Path | None = Field(
        None,
        description=(
            "File of HTTP headers for the collector, a line `name: value` each, such as a token. "
            "Others must not be able to read it."
        ),
    )
    certificate: Path | None = Field(
        None,
        description=(
            "PEM file of the authority that signed the collector's certificate. Default: those of "
            "the system."
        ),
    )
    insecure: bool = Field(False, description="Allow headers_file with http:// to another machine.")

    @field_validator("endpoint")
    @classmethod
    def _is_url(cls, value: str) -> str:
        url = urlsplit(value)
        if value in ("", FROM_ENVIRONMENT) or (
            url.scheme in ("http", "https") and url.hostname is not None
        ):
            return value
        raise ValueError("must be a URL that begins with http:// or https://, or env, or empty")

    @model_validator(mode="after")
    def _keeps_headers_secret(self) -> "TracingSettings":
        url = urlsplit(self.endpoint)
        if url.username is not None:
            # Not a validator of the field, whose error would show the value.
            raise ValueError(
                "endpoint must have no user and password, since logs name it: put `authorization: "
                "Basic …` into headers_file"
            )
        is_open = url.scheme == "http" and url.hostname not in LOOPBACK
        if self.headers_file is not None and is_open and not self.insecure:
            raise ValueError(
                "headers_file over http:// shows its headers to the network; use https://, or set "
                "insecure = true if that is meant"
            )
        if self.endpoint == FROM_ENVIRONMENT and (self.headers_file or self.certificate):
            raise ValueError(
                "with endpoint = env the variables OTEL_EXPORTER_OTLP_HEADERS and _CERTIFICATE "
                "take the place of headers_file and certificate"
            )
        return self
