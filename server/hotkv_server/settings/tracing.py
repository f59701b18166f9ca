"""Settings of traces."""

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, field_validator, model_validator

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
    max_spans_per_s: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        1000,
        description="Most spans recorded in a second; the others are dropped and counted.",
    )
    queue_spans: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        4096,
        description="Most spans that wait for the collector; the others are dropped and counted.",
    )
    service_name: str = Field(
        "hotkv-server", min_length=1, description="The service that spans name as theirs."
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
            # Not with the field, whose value would be shown.
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
