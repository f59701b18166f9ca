"""Tests docs/wire.md and the wire's enums against the code."""

import re
from pathlib import Path
from typing import Any

import pytest

from hotkv_client import Role
from hotkv_client.wire import admin as _admin_wire
from hotkv_proto import hints, keys, layout, table, traces, versions, words
from hotkv_proto.blocks import BlockResult, TransferStatus
from hotkv_proto.errors import RETRYABLE, Reason
from hotkv_proto.groups import GroupKind
from hotkv_proto.messages import fields
from hotkv_proto.messages.cache import MAX_LOADED_BLOCKS, MAX_STORED_BLOCKS
from hotkv_proto.messages.hints import MAX_ENVELOPE_CHARS
from hotkv_proto.messages.layout import MAX_KEY_SPACE_BYTES
from hotkv_proto.messages.report_messages import MAX_REPORTS
from hotkv_proto.order import OrderKind
from hotkv_proto.sparse_counters import SPARSE_COUNTERS
from hotkv_proto.v1 import (
    admin_pb2,
    cache_pb2,
    errors_pb2,
    events_pb2,
    layout_pb2,
    residency_pb2,
    session_pb2,
    sparse_pb2,
)
from hotkv_proto.versions import MAX_PARTS, Feature
from hotkv_server.cache.values import CoreConfig
from hotkv_server.node import sessions, transfers
from hotkv_server.security import identity
from hotkv_server.wire import descriptors, server, session_stream
from hotkv_server.wire.errors import CODES
from hotkv_sparse.server.residency.book import register as residency_book

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "wire.md").read_text()
CORE = CoreConfig(arena_bytes=1 << 30, slab_bytes=1 << 20, capacity=1 << 10)
LIMITS = {
    "bytes of a message to the server": server.MAX_MESSAGE_BYTES,
    "fields, list entries and messages in one message": MAX_PARTS,
    "hash lists or runs in a call": fields.MAX_LISTS,
    "hashes in a lookup or lease, or to extend a residency": CORE.max_blocks_per_call,
    "blocks in a store or reservation": MAX_STORED_BLOCKS,
    "blocks in a load": MAX_LOADED_BLOCKS,
    "characters of an id or name": fields.MAX_IDENTIFIER,
    "names of a session's model": session_stream.MAX_MODEL_NAMES,
    "characters of a traceparent": traces.MAX_TRACEPARENT_CHARS,
    "bytes of a key space on the wire": MAX_KEY_SPACE_BYTES,
    "groups of a key space": keys.MAX_GROUPS,
    "bytes of a hash, at least": keys.MIN_HASH_BYTES,
    "bytes of a hash, at most": keys.MAX_HASH_BYTES,
    "sessions of a server": sessions.MAX_SESSIONS,
    "transfers of a session under way": transfers.MAX_TRANSFERS_OF_SESSION,
    "residencies of a server": residency_book.MAX_RESIDENCIES,
    "words behind the arena": words.WORD_COUNT,
    "requests in one report": MAX_REPORTS,
    "ended requests in one report": MAX_REPORTS,
    "actions of one request's hints": hints.MAX_ACTIONS,
    "characters of an envelope of hints": MAX_ENVELOPE_CHARS,
    "answers of a stream that wait to be read, before the server reads on": (
        session_stream.UNREAD_ANSWERS
    ),
    "seconds for the first message of a stream": session_stream.FIRST_MESSAGE_TIMEOUT_S,
    "seconds for the first packet on the descriptor socket": descriptors.REQUEST_TIMEOUT_S,
    "seconds that a ticket is good": identity.TTL_S,
    "bytes of a packet on the descriptor socket": descriptors.MAX_PACKET_BYTES,
    "descriptors in a packet": descriptors.MAX_DESCRIPTORS,
    "backings of a layout": layout.MAX_BACKINGS,
    "bytes of all ranges of a layout": layout.MAX_BACKED_BYTES,
    "words of the fence": layout.FENCE_WORDS,
    "longest lifetime of a lease in seconds": CORE.max_lease_ttl_s,
    "lifetime of a lease that asks for none, in seconds": CORE.lease_ttl_s,
}


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """The cells of the table, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_limits_are_those_of_the_code() -> None:
    assert {name: float(value) for name, value in rows("Limits")} == LIMITS


def test_reasons_have_the_codes_codes_and_advice() -> None:
    told = {name: (code, retry) for name, code, retry, _ in rows("Errors")}
    assert told == {
        reason.name: (CODES[reason].name, "yes" if RETRYABLE[reason] else "no") for reason in Reason
    }
    assert all(what.endswith(".") for *_, what in rows("Errors"))


def test_the_schema_names_the_same_codes() -> None:
    text = (ROOT / "proto" / "hotkv" / "v1" / "errors.proto").read_text()
    for reason in Reason:
        comment = text.partition(f"  ERROR_REASON_{reason.name} = ")[0].rpartition(";")[2]
        assert re.findall(r"\b[A-Z_]{6,}\b", comment)[-1] == CODES[reason].name


def test_versions_and_features_are_those_of_the_code() -> None:
    assert f"speak {versions.OLDEST_VERSION} to {versions.NEWEST_VERSION}" in PAGE
    named = {name.strip("`") for name, _ in rows("Versions and features")}
    assert named == {name for name, number in session_pb2.Feature.items() if number}


def test_block_table_has_the_codes_numbers() -> None:
    text = section("Block table")
    states = (table.STATE_RESERVED, table.STATE_READY, table.STATE_DETACHED)
    for said in (
        f"magic `{table.MAGIC.decode()}`",
        f"format version (uint32, {table.FORMAT_VERSION})",
        f"0x{int(table._MULTIPLIER):X}",
        f"through {table.MAX_PROBE_BUCKETS} buckets at most",
        f"{table._MAX_RETRIES} attempts",
        f"| header | {table.HEADER_BYTES} |",
        f"| buckets | {4 * table.BUCKET_WORDS} × `num_buckets` |",
        f"| records | {4 * table.RECORD_WORDS} × (`capacity` + 1) |",
        f"in units of {table.SLOT_ALIGN} bytes",
        "({} reserved, {} ready, {} detached)".format(*states),
    ):
        assert said in text, said


# Enums

FILES = (admin_pb2, cache_pb2, errors_pb2, events_pb2, layout_pb2, residency_pb2, session_pb2)
FILES += (sparse_pb2,)


def enums() -> list[Any]:
    return [
        enum
        for file in FILES
        for enum in file.DESCRIPTOR.enum_types_by_name.values()
        if enum.name not in ("ErrorReason", "SessionRole")
    ]


@pytest.mark.parametrize("kind", enums(), ids=lambda kind: kind.name)
def test_an_enum_has_a_word_for_each_value(kind: Any) -> None:
    for value in kind.values[1:]:
        said = fields.enum_word(kind, value.number)
        assert said and value.name.endswith(said.upper().replace(" ", "_"))
    assert fields.enum_word(kind, 0) == ""


def test_client_shows_unknown_numbers() -> None:
    group = layout_pb2.KvGroup(kind=layout_pb2.KvGroupKind.ValueType(99))
    assert _admin_wire.plain(group)["kind"] == 99


@pytest.mark.parametrize(
    ("ours", "wire", "prefix"),
    [
        (Reason, errors_pb2.ErrorReason, "ERROR_REASON_"),
        (BlockResult, cache_pb2.BlockResult, "BLOCK_RESULT_"),
        (TransferStatus, cache_pb2.TransferStatus, "TRANSFER_STATUS_"),
        (GroupKind, layout_pb2.KvGroupKind, "KV_GROUP_KIND_"),
        (OrderKind, layout_pb2.DeviceOrderKind, "DEVICE_ORDER_KIND_"),
        (Role, session_pb2.SessionRole, "SESSION_ROLE_"),
        (Feature, session_pb2.Feature, "FEATURE_"),
    ],
)
def test_enums_have_the_numbers_of_the_wire(ours: Any, wire: Any, prefix: str) -> None:
    assert {one.name: int(one) for one in ours} == {
        name.removeprefix(prefix): number for name, number in wire.items() if number
    }


def test_sparse_counters_have_the_wires_names() -> None:
    names = tuple(field.name for field in sparse_pb2.LayerCounters.DESCRIPTOR.fields)
    assert names == ("layer_index", *SPARSE_COUNTERS)
