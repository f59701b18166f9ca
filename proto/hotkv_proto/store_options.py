"""What a store may ask besides its blocks: one value, from the connector's plan to the server's
books."""

from dataclasses import dataclass

from hotkv_proto.retention import NO_RETENTION, Retention


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """`retention`: of the store that reserves; other ranks join it. `residency_id`: of an open
    residency of this engine, which pins what the store makes ready from that moment on, and what is
    ready from its start on; empty for none. `traceparent`: names the caller's span, as W3C's
    header; empty for none."""

    retention: Retention = NO_RETENTION
    residency_id: str = ""
    traceparent: str = ""


NO_OPTIONS = StoreOptions()
