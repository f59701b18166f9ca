"""Tests that only versions and features that both sides have are used."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo.processes import Server, runtime_folder
from hotkv_client import Role, SessionConfig
from hotkv_client.wire import call_messages as _wire
from hotkv_proto import versions
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace, Sketch, signed_salt, unsigned_salt
from hotkv_proto.v1 import session_pb2, session_pb2_grpc

FULL = GroupSpec(GroupKind.FULL_ATTENTION, 16, (4096,))
WINDOW = GroupSpec(GroupKind.SLIDING_WINDOW, 32, (4096,), 64)
SPACE = KeySpace("m", "w", "bfloat16", (FULL, WINDOW), 16)
KINDS = tuple(Sketch(group, "mean", 3, (64,)) for group in range(2))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with runtime_folder(64 << 20) as folder, Server(folder, "16MiB") as running:
        running.wait_ready()
        yield running


@given(st.integers(-5, 20), st.integers(-5, 20))
def test_agreed_version_is_spoken_by_both(oldest: int, newest: int) -> None:
    mine = range(versions.OLDEST_VERSION, versions.NEWEST_VERSION + 1)
    common = set(mine) & set(range(oldest, newest + 1))
    assert versions.agreed_version(oldest, newest) == max(common, default=None)


def open_with(server: Server, **changes: Any) -> session_pb2.SessionOpened:
    config = SessionConfig(server.target, "e", Role.TOOL, SPACE, KINDS)
    assert [*map(config.sketch_group, KINDS)] == [2, 3], "the places of their salts"
    request = _wire.open_session(config)
    for name, value in changes.items():
        if isinstance(value, list):
            getattr(request.open_session, name)[:] = value
        else:
            setattr(request.open_session, name, value)
    with grpc.insecure_channel(server.target) as channel:
        call = session_pb2_grpc.SessionServiceStub(channel).Connect(iter([request]))
        return next(call).session_opened


@pytest.mark.parametrize("newest", [0, 1, 9])
def test_a_session_speaks_the_newest_common_version(server: Server, newest: int) -> None:
    opened = open_with(server, protocol_version=1, newest_protocol_version=newest)
    assert opened.protocol_version == 1


@pytest.mark.parametrize(
    ("named", "used"), [([], []), ([1], [1]), ([99, 1, -3], [1]), ([0], []), ([1, 1], [1])]
)
def test_only_features_that_both_know_are_used(
    server: Server, named: list[int], used: list[int]
) -> None:
    opened = open_with(server, features=named)
    assert list(opened.features) == used


def test_salts_are_the_servers_table_salts(server: Server) -> None:
    salts = [*map(SPACE.group_salt, range(2)), *map(SPACE.sketch_salt, KINDS)]
    assert [unsigned_salt(salt) for salt in open_with(server).salts] == salts


@given(st.integers(0, (1 << 64) - 1))
def test_a_salt_comes_through_as_a_signed_number(salt: int) -> None:
    opened = session_pb2.SessionOpened(salts=[signed_salt(salt)])
    read = session_pb2.SessionOpened.FromString(opened.SerializeToString())
    assert unsigned_salt(read.salts[0]) == salt
