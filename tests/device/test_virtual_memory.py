"""Engines whose KV lies in CUDA's virtual memory, which has no IPC handle: by the server's and the
client's real code, on a driver without a GPU."""

import contextlib
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demo.processes import runtime_folder
from hotkv_client.cuda_export import CudaExport, CudaExportError
from hotkv_client.targets import descriptor_socket
from hotkv_proto.cuda_memory import FABRIC
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.layout import MAX_BACKINGS, Layout, MemoryHandle, PageTensor
from hotkv_proto.order import OrderKind
from hotkv_proto.v1 import session_pb2
from hotkv_server.device.devices import Devices
from tests.device.timed_gpu import TimedGpus, needs_c_compiler
from tests.device.timed_world import World
from tests.device.virtual_memory import (
    BACKING_BYTES,
    VirtualEngine,
    VirtualPool,
    engine_gpus,
    export,
    num_descriptors,
)
from tests.doubles.device import FakeRuntime
from tests.doubles.device_memory import uuid_of
from tests.doubles.with_constants import copies_by
from tests.server.devices_support import PAGE, AnyDeviceServer, block_ids, done
from tests.server.nodes import SPACE, live_node, memory_file
from tests.server.support import hashes
from tests.support.waiting import wait_for

pytestmark = needs_c_compiler
IDS = block_ids(0, 1, 2, 3)
UNKNOWN = 999


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with runtime_folder(64 << 20) as folder, contextlib.ExitStack() as stack:
        yield World(stack, folder, num_devices=2).start(*copies_by("batch"))


@pytest.fixture
def engine(world: World) -> Iterator[Callable[..., VirtualEngine]]:
    """At the end, nothing of the engines is left in the server or in this process."""
    with contextlib.ExitStack() as stack:

        def make(**wanted: object) -> VirtualEngine:
            one = VirtualEngine(world.server.target, **wanted)  # type: ignore[arg-type]
            return stack.enter_context(contextlib.closing(one))

        yield make
    wait_for(lambda: nothing_is_left(world), "the server unmaps")
    assert engine_gpus().virtual_memory() == {}


def nothing_is_left(world: World) -> bool:
    return not (world.gpus.virtual_memory() or world.server.num_held() or descriptors(world))


def descriptors(world: World) -> int:
    """Of engines' memory, in the server."""
    return num_descriptors(world.server.pid, "hotkv-device", "test")


def there_and_back(one: VirtualEngine) -> None:
    names = hashes(4)
    one.fill(IDS, 1)
    content = one.content(IDS)
    done(one.store(names, IDS)[1])
    one.fill(IDS, 2)
    before = one.content(IDS)
    done(one.load(names, IDS + 8)[1])
    assert one.content(IDS + 8) == content and one.content(IDS) == before


# Copies


@pytest.mark.parametrize("shape", ["BLHNC", "LHBNC"])
@pytest.mark.parametrize(("num_backings", "size"), [(16, BACKING_BYTES), (80, PAGE)])
def test_bytes_return_over_many_backings(
    world: World, engine: Callable[..., VirtualEngine], shape: str, num_backings: int, size: int
) -> None:
    """A packet takes 64."""
    one = engine(shape=shape, num_backings=num_backings, backing_bytes=size).connected()
    left = world.gpus.virtual_memory()
    assert left["mapped"] == left["backings"] == len(one.exported.fds) > 1
    assert left["reserved"] == 1 and descriptors(world) == left["backings"]
    there_and_back(one)


def test_both_kinds_lie_in_one_layout(world: World, engine: Callable[..., VirtualEngine]) -> None:
    """Two ranges share a backing, whose descriptor is sent once."""
    one = engine(
        shape="an allocation a layer", virtual=frozenset({"l0", "l2"}), offers=["flags"]
    ).connected()
    assert one.session.order_kind is OrderKind.FLAGS, one.session.order_message
    mapped = world.gpus.virtual_memory()["mapped"]
    assert world.gpus.virtual_memory()["reserved"] == 2 and len(one.exported.fds) < mapped
    assert world.gpus.num_calls("cuIpcOpenMemHandle_v2") > 0
    there_and_back(one)
    one.fill(IDS, 3)
    names = hashes(4)
    _, store = one.store(names, IDS, one.after(0, 1))
    one.fill(IDS, 4)
    content = one.content(IDS)
    one.words[0] = 1
    done(store)
    done(one.load(names, IDS + 8)[1])
    assert one.content(IDS + 8) == content


@pytest.mark.parametrize("call", ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemUnmap"])
def test_a_hanging_call_delays_no_ping(
    world: World, engine: Callable[..., VirtualEngine], call: str
) -> None:
    other, one = engine(virtual=frozenset()).connected(), None
    if call == "cuMemUnmap":
        one = engine().connected()
    asked = world.gpus.num_calls(call)
    with world.gpus.held(call):
        if one is None:
            one = engine()
        else:
            one.sleep()
        wait_for(lambda: world.gpus.num_calls(call) > asked, call)
        assert other.session.ping(60) >= 0
    if call == "cuMemUnmap":
        one.wake()
    there_and_back(one.connected())


# Ends


def test_a_sleeping_engine_gets_its_memory_back(
    world: World, engine: Callable[..., VirtualEngine]
) -> None:
    one, names = engine().connected(), hashes(4)
    one.fill(IDS, 1)
    content = one.content(IDS)
    done(one.store(names, IDS)[1])
    for _ in range(2):
        one.sleep()
        assert nothing_is_left(world), "the end of the session comes after the unmapping"
        assert set(engine_gpus().virtual_memory()) == {"reserved"}
        one.wake()
        assert not any(one.content(IDS))
        done(one.connected().load(names, IDS)[1])
        assert one.content(IDS) == content


def test_a_killed_engines_memory_is_unmapped(world: World) -> None:
    command = [sys.executable, "-m", "tests.device.virtual_memory", world.server.target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "stored\n"
        assert not nothing_is_left(world)
        child.kill()
    wait_for(lambda: nothing_is_left(world), "the server unmaps")


# Refusals


def test_calls_that_fail_leave_nothing_mapped(
    world: World, engine: Callable[..., VirtualEngine]
) -> None:
    """The session is opened again."""
    one = engine(shape="an allocation a layer", virtual=frozenset({"l0", "l1", "l2"})).connected()
    for call, skip in (
        ("cuMemAddressReserve", 2),
        ("cuMemImportFromShareableHandle", 7),
        ("cuMemMap", 7),
        ("cuMemSetAccess", 1),
    ):
        one.sleep()
        wait_for(lambda: nothing_is_left(world), "the server unmaps")
        world.gpus.fail(call, UNKNOWN, skip=skip)
        one.said.clear()
        one.wake()
        wait_for(lambda: one.said, "the refusal")
        assert "can't be mapped: " + call in one.said[0], one.said
        there_and_back(one.connected())


Alter = Callable[[MemoryHandle, dict[str, int]], MemoryHandle]


def no_cuda_memory(handle: MemoryHandle, fds: dict[str, int]) -> MemoryHandle:
    os.dup2(spare := memory_file(BACKING_BYTES), fds["kv.1"])
    os.close(spare)
    return handle


def another_size(handle: MemoryHandle, fds: dict[str, int]) -> MemoryHandle:
    first = replace(handle.backings[0], num_bytes=1 << 20)
    return replace(handle, backings=(first, *handle.backings[1:]))


def two_sizes(handle: MemoryHandle, fds: dict[str, int]) -> MemoryHandle:
    again = replace(handle.backings[0], num_bytes=1)
    return replace(handle, backings=(*handle.backings, again))


def too_short(handle: MemoryHandle, fds: dict[str, int]) -> MemoryHandle:
    return replace(handle, backings=handle.backings[:-1])


def too_many(handle: MemoryHandle, fds: dict[str, int]) -> MemoryHandle:
    return replace(handle, backings=handle.backings[:1] * (MAX_BACKINGS + 1))


def too_large(handle: MemoryHandle, fds: dict[str, int]) -> MemoryHandle:
    return replace(handle, backings=(replace(handle.backings[0], num_bytes=1 << 41),))


def another_device(handle: MemoryHandle, fds: dict[str, int]) -> MemoryHandle:
    return replace(handle, device_uuid=uuid_of(1))


@pytest.mark.parametrize(
    ("alter", "said"),
    [
        (no_cuda_memory, "'kv' can't be mapped: cuMemImportFromShareableHandle on device 0, back"),
        (another_size, "cuMemMap on device 0, backing 0: CUDA_ERROR_INVALID_VALUE"),
        (two_sizes, r"handles\[0\].cuda_range.backings\[15\].byte_count is 1"),
        (too_short, r"handles\[0\].byte_count: 'kv' ends at byte 296448, beyond the"),
        (too_many, f"are {MAX_BACKINGS + 1} of .* at most {MAX_BACKINGS}"),
        (too_large, "are 1 of 2199023255552 bytes"),
        (another_device, "device_uuid is that of device 1, and the memory of backing 0 is of devi"),
    ],
)
def test_what_can_not_be_mapped_is_refused(
    world: World, engine: Callable[..., VirtualEngine], alter: Alter, said: str
) -> None:
    one = engine(alter=alter)
    wait_for(lambda: one.said, "the refusal")
    assert re.search(said, one.said[0]), one.said
    one.session.close()
    wait_for(lambda: nothing_is_left(world), "the server closes what it got")
    there_and_back(engine().connected())


def test_waiting_descriptors_leave_half_to_others() -> None:
    with runtime_folder(64 << 20) as folder, contextlib.ExitStack() as stack:
        gpus = TimedGpus(folder)
        few = ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh"]
        server = stack.enter_context(AnyDeviceServer(folder, [*few, *gpus.command()]))
        server.wait_ready()
        one = VirtualEngine(server.target, num_backings=80, backing_bytes=PAGE)
        stack.enter_context(contextlib.closing(one))
        wait_for(lambda: one.said, "the refusal")
        assert "may use half of" in one.said[0] and gpus.virtual_memory() == {}


@pytest.mark.parametrize(
    ("ids", "num_fds", "handle_ids", "said"),
    [
        (["a", "b"], 1, [], "names 2 backings for 1 descriptors"),
        (["a", "a"], 2, [], "names 2 backings for 2 descriptors"),
        (["a"], 1, ["kv"], "beside 1 handle_ids"),
        (["a" * 300], 1, [], "longer than 256"),
        (["a"], 1, [], "come before the link"),
    ],
)
def test_packets_that_pass_nothing_are_refused(
    world: World,
    engine: Callable[..., VirtualEngine],
    ids: list[str],
    num_fds: int,
    handle_ids: list[str],
    said: str,
) -> None:
    one = engine().connected()
    assert one.session._life.connection is not None
    request = session_pb2.LinkRequest(
        session_id=one.session._life.connection.session_id, backing_ids=ids, handle_ids=handle_ids
    )
    held = descriptors(world)
    fd = memory_file(1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(str(descriptor_socket(world.server.target)))
        socket.send_fds(peer, [request.SerializeToString()], [fd] * num_fds)
        answer = session_pb2.LinkResponse.FromString(peer.recv(1 << 16))
        assert not answer.linked and said in answer.error.message
    os.close(fd)
    wait_for(lambda: descriptors(world) == held, "the server closes what it got")
    there_and_back(one)


@pytest.fixture
def two_ranges() -> Iterator[tuple[Layout, CudaExport]]:
    """They share a backing."""
    pool, exported = VirtualPool([PAGE] * 3), export()
    handles = [
        exported.export(name, pool.address + at, 2 * PAGE, uuid_of(0))
        for name, at in (("kv", 0), ("more", PAGE))
    ]
    yield Layout(0, 2, tuple(handles), (PageTensor(0, "kv", 0, PAGE, PAGE, 0),)), exported
    exported.close()
    pool.close()
    assert engine_gpus().virtual_memory() == {}


async def test_a_registration_takes_exactly_what_has_come(
    tmp_path: Path, two_ranges: tuple[Layout, CudaExport]
) -> None:
    runtime, (layout, exported) = FakeRuntime(), two_ranges
    async with live_node(tmp_path, devices=Devices(runtime, runtime.devices())) as node:
        for num_sent, reason in ((1, Reason.UNKNOWN_HANDLE), (4, Reason.INVALID_LAYOUT)):
            session = await node.sessions.open("e", "worker", SPACE, "test")
            sent = {f"kv.{at}": os.dup(exported.fds["kv.0"]) for at in range(num_sent)}
            session.receive_backings(sent)
            with pytest.raises(HotKVError, match="before; send each once"):
                session.receive_backings(dict(sent))
            with pytest.raises(HotKVError, match=f"at most {MAX_BACKINGS} are accepted"):
                session.receive_backings(dict.fromkeys(map(str, range(MAX_BACKINGS)), -1))
            session.close_link = lambda: None
            with pytest.raises(HotKVError) as refused:
                await node.sessions.register_memory(session, layout)
            assert refused.value.reason is reason, refused.value
            await node.sessions.close(session)
            for fd in sent.values():
                with pytest.raises(OSError, match="Bad file descriptor"):
                    os.fstat(fd)
        assert node.devices.num_open == 0 and not runtime.held()
    runtime.close()


# Exports


@pytest.mark.parametrize(
    ("handle_types", "said"),
    [(0, "not made to be shared"), (FABRIC, "NVIDIA_IMEX_CHANNELS"), (2, "requestedHandleTypes")],
)
def test_memory_that_is_not_exportable_says_why(handle_types: int, said: str) -> None:
    pool, exported = VirtualPool([PAGE] * 2, handle_types=handle_types), export()
    assert exported.is_virtual(pool.address + PAGE)
    with pytest.raises(CudaExportError, match=said):
        exported.export("kv", pool.address, PAGE, uuid_of(0))
    assert not exported.fds
    pool.sleep()
    assert not exported.is_virtual(pool.address)
    with pytest.raises(CudaExportError, match="cuMemGetAddressRange_v2: CUDA_ERROR_INVALID_VALUE"):
        exported.export("kv", pool.address, PAGE, uuid_of(0))
    pool.close()
    assert engine_gpus().virtual_memory() == {}


def test_an_export_that_breaks_off_closes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, exported = VirtualPool([PAGE] * 4), export()
    before = num_descriptors(os.getpid())
    for call in ("cuMemExportToShareableHandle", "cuMemGetAllocationPropertiesFromHandle"):
        engine_gpus().fail(call, UNKNOWN, skip=2)
        with pytest.raises(CudaExportError, match=f"{call}: unknown .999."):
            exported.export("kv", pool.address, 4 * PAGE, uuid_of(0))
        assert len(exported.fds) == 2
        exported.close()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, limits[1]))
    with pytest.raises(CudaExportError, match="may have 64; raise the limit"):
        exported.export("kv", pool.address, 4 * PAGE, uuid_of(0))
    exported.close()
    assert num_descriptors(os.getpid()) == before
    pool.close()
    assert engine_gpus().virtual_memory() == {}
    with pytest.raises(CudaExportError, match="can't export memory"):
        CudaExport("kv", "libhotkv-none.so")


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_backings_cover_each_range_once(sizes: list[int], data: st.DataObject) -> None:
    pool, exported = VirtualPool([PAGE * size for size in sizes]), export()
    ends = [sum(sizes[: i + 1]) * PAGE for i in range(len(sizes))]
    try:
        for _ in range(data.draw(st.integers(1, 4))):
            begin = data.draw(st.integers(0, pool.num_bytes - 1))
            num_bytes = data.draw(st.integers(1, pool.num_bytes - begin))
            handle = exported.export("kv", pool.address + begin, num_bytes, uuid_of(0))
            first = next(i for i, end in enumerate(ends) if begin < end)
            last = next(i for i, end in enumerate(ends) if begin + num_bytes <= end)
            assert [one.num_bytes for one in handle.backings] == [
                PAGE * size for size in sizes[first : last + 1]
            ]
            assert handle.base_offset_bytes == begin - (ends[first] - PAGE * sizes[first])
            for one in handle.backings:
                assert os.fstat(exported.fds[one.backing_id]).st_size == one.num_bytes
        files = {os.fstat(fd).st_ino for fd in exported.fds.values()}
        assert len(files) == len(exported.fds) <= len(sizes)
    finally:
        exported.close()
        pool.close()
    assert engine_gpus().virtual_memory() == {}
