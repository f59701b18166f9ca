"""Enums of the protocol: the code has the same numbers, and users read each value as a word."""

from pathlib import Path
from typing import Any

import pytest

from hotkv_client import Role
from hotkv_client.wire import admin as _admin_wire
from hotkv_proto.blocks import BlockResult, TransferStatus
from hotkv_proto.errors import Reason
from hotkv_proto.groups import GroupKind
from hotkv_proto.messages import fields
from hotkv_proto.order import OrderKind
from hotkv_proto.reports import SPARSE_COUNTERS
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
from hotkv_proto.versions import Feature

ROOT = Path(__file__).resolve().parents[2]
FILES = (admin_pb2, cache_pb2, errors_pb2, events_pb2, layout_pb2, residency_pb2, session_pb2)
FILES += (sparse_pb2,)


def enums() -> list[Any]:
    """Returns descriptors of the wire's enums, except the enums of reasons and roles."""
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


def test_the_client_shows_a_number_that_it_does_not_know() -> None:
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


def test_counters_of_sparse_layers_have_the_names_of_the_wire() -> None:
    names = tuple(field.name for field in sparse_pb2.LayerCounters.DESCRIPTOR.fields)
    assert names == ("layer_index", *SPARSE_COUNTERS)
