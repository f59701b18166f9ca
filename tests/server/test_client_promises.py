"""The server refuses whatever the client and the connector refuse by themselves, since clients may
be written by hand."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from demo.processes import Server, runtime_folder
from hotkv_client import BlockRun, Role, SelectConfig, SessionConfig
from hotkv_client.wire import requests as _wire
from hotkv_client.wire import sparse as _sparse_wire
from hotkv_proto.blocks import NO_OPTIONS
from hotkv_proto.errors import Reason
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace, Representation
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor
from hotkv_proto.order import NO_ORDER
from hotkv_proto.v1 import session_pb2
from hotkv_server.testing.with_devices import FakeDevices
from tests.robustness.raw_client import RawSession
from tests.server.devices_support import DeviceServer, FakeAllocation
from tests.server.sparse_support import CONFIG, HEAD_SIZE, KV_HEADS, LAYERS
from tests.server.support import FULL, NUM_BLOCKS, PAGE_BYTES, WINDOW, hashes

SPACE = KeySpace("promises", "w", "bfloat16", (FULL,), 16)
LAYOUT = Layout(
    0,
    NUM_BLOCKS,
    (MemoryHandle("kv", NUM_BLOCKS * PAGE_BYTES),),
    (PageTensor(0, "kv", 0, PAGE_BYTES, PAGE_BYTES, 0),),
)
Open = Callable[..., RawSession]


@pytest.fixture
def raw(server: Server) -> Iterator[Open]:
    """Opens sessions by hand; closes them."""
    opened: list[RawSession] = []
    with grpc.insecure_channel(server.target) as channel:

        def make(space: KeySpace = SPACE, kinds: tuple[Representation, ...] = ()) -> RawSession:
            opening = _wire.open_session(
                SessionConfig(server.target, os.urandom(4).hex(), Role.WORKER, space, kinds)
            )
            opened.append(RawSession(channel, server.target, opening))
            assert not opened[-1].why_not
            return opened[-1]

        yield make
        for one in opened:
            one.close()


def refusal(session: RawSession, request: session_pb2.ConnectRequest) -> tuple[Reason, str]:
    word, answer = session.ask(request)
    assert word not in ("answered", "ended"), answer
    return Reason(int(answer.error.reason)), answer.error.message


def test_memory_of_a_device_needs_the_link() -> None:
    """The client refuses it over TCP; without the link nothing tells an engine when a dead server
    has let go of its memory."""
    space = KeySpace("m", "w", "bfloat16", (FULL,), 16)
    with runtime_folder(64 << 20) as folder, DeviceServer(folder, FakeDevices(1, 3)) as server:
        server.wait_ready()
        memory = FakeAllocation(NUM_BLOCKS * PAGE_BYTES, 0)
        handle = MemoryHandle("kv", NUM_BLOCKS * PAGE_BYTES, 0, memory.handle, memory.device_uuid)
        request = _wire.register_memory(
            Layout(0, NUM_BLOCKS, (handle,), LAYOUT.tensors, "x"), NO_ORDER
        )
        with grpc.insecure_channel(server.target) as channel:
            session = RawSession(
                channel,
                server.target,
                _wire.open_session(SessionConfig(server.target, "e", Role.WORKER, space)),
            )
            reason, message = refusal(session, request)
            assert (
                reason is Reason.INVALID_LAYOUT
                and "layout.handles: memory of a device needs the session's link" in message
            )
            assert server.num_held() == 0
            assert session.link({}) == "answered"
            assert session.ask(request)[0] == "answered" and server.num_held() == 1
            session.close()
        memory.close()


def test_a_transfers_id_is_no_line_of_the_log(server: Server, raw: Open) -> None:
    session, fd = raw(), os.memfd_create("kv")
    os.posix_fallocate(fd, 0, NUM_BLOCKS * PAGE_BYTES)
    assert session.link({"kv": fd}) == "answered"
    flags = session.ask(_wire.register_memory(LAYOUT, NO_ORDER))
    assert flags[0] == "answered"
    # Cut short while the transfers run; one of many meets it.
    ids = np.arange(NUM_BLOCKS, dtype=np.int32)
    for number in range(50):
        os.posix_fallocate(fd, 0, NUM_BLOCKS * PAGE_BYTES)
        name = f"{number}\nERROR forged {number}"
        asked = session.put(
            _wire.store(
                name, f"l{number}", [BlockRun(0, hashes(NUM_BLOCKS), ids)], 20, NO_OPTIONS, 0, 32
            )
        )
        os.truncate(fd, 0)
        session.answers({asked})
    os.close(fd)
    assert not re.search(r"^ERROR forged", Path(server.log).read_text(), re.MULTILINE)


def test_handle_ids_are_no_longer_than_other_ids(raw: Open) -> None:
    """Messages repeat them."""
    session, long, fd = raw(), "k" * 257, os.memfd_create("kv")
    os.posix_fallocate(fd, 0, NUM_BLOCKS * PAGE_BYTES)
    assert session.link({long: fd}) == "TOO_LARGE"
    assert session.link({long[1:]: fd}) == "answered"
    os.close(fd)


@pytest.mark.parametrize(
    "group",
    [
        WINDOW,
        GroupSpec(GroupKind.CHUNKED_LOCAL, 16, (PAGE_BYTES,), 32),
        GroupSpec(GroupKind.MAMBA, 16, (PAGE_BYTES,)),
    ],
)
def test_selections_are_from_groups_that_attend_to_everything(raw: Open, group: GroupSpec) -> None:
    """The connector makes sparse no others."""
    space = KeySpace(f"select {group.kind}", "w", "bfloat16", (FULL, group), 16)
    kind = Representation(1, "mean", 0, (64,))
    session = raw(space, (kind,))
    config = SelectConfig(CONFIG, 2, LAYERS, KV_HEADS, HEAD_SIZE)
    reason, message = refusal(session, _sparse_wire.create_sequence("s", 1, hashes(2), config, 32))
    assert reason is Reason.INVALID_FIELD
    assert (
        message.startswith(f"group_index is 1, a group of {group.kind.name}")
        and "select from a group of FULL_ATTENTION or MLA" in message
    )
    # Where the engine selects by itself the server only counts.
    assert session.ask(_sparse_wire.create_sequence("s", 1, hashes(2), None, 32))[0] == "answered"
