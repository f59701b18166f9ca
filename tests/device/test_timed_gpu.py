"""Tests the server's real CUDA code, in a real server, on a driver whose copies take time."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from demo.processes import runtime_folder
from hotkv_client.types import TransferStatus
from hotkv_proto.order import OrderKind
from hotkv_server.dataplane.cuda.calibration import PAGE_BYTES
from tests.device.timed_gpu import needs_c_compiler
from tests.device.timed_world import World
from tests.doubles.with_constants import copies_by
from tests.server.devices_support import SHAPES, block_ids, done
from tests.server.page_support import get
from tests.server.support import hashes, http_port
from tests.support.waiting import wait_for

pytestmark = needs_c_compiler
IDS = block_ids(0, 1, 2, 3)
UNKNOWN = 999


Make = Callable[..., World]


@pytest.fixture
def make() -> Iterator[Make]:
    with runtime_folder(64 << 20) as folder, contextlib.ExitStack() as stack:
        yield lambda **gpus: World(stack, folder, **gpus)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Two devices, which loads and stores reach by batches."""
    with runtime_folder(64 << 20) as folder, contextlib.ExitStack() as stack:
        yield World(stack, folder, num_devices=2).start(*copies_by("batch"))


@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_return_in_every_layout(world: World, shape: str) -> None:
    one, names = world.engine(shape=shape), hashes(4)
    one.fill(IDS, 1)
    content = one.content(IDS)
    done(one.store(names, IDS)[1])
    one.fill(IDS, 2)
    done(one.load(names, IDS + 8)[1])
    assert one.content(IDS + 8) == content


@pytest.mark.parametrize("method", ["memcpy", "kernel", "staged"])
def test_bytes_return_by_every_method(make: Make, method: str) -> None:
    world = make().start(*copies_by(method))
    one, names = world.engine(shape="LHBNC"), hashes(4)
    one.fill(IDS, 1)
    done(one.store(names, IDS)[1])
    done(one.load(names, IDS + 8)[1])
    assert one.content(IDS + 8) == one.content(IDS)


@pytest.mark.parametrize(
    ("offers", "kind"),
    [
        (("events",), OrderKind.EVENTS),
        (("flags",), OrderKind.FLAGS),
        (("events", "flags"), OrderKind.FLAGS),
    ],
)
def test_a_store_waits_for_its_mark(world: World, offers: tuple[str, ...], kind: OrderKind) -> None:
    one, names = world.engine(offers=offers), hashes(4)
    assert one.session.order_kind is kind
    one.fill(IDS, 1)
    for event in one.events:
        event.record()
    _, store = one.store(names, IDS, one.after(0, 1))
    asked = world.gpus.num_calls("cuEventQuery")
    if kind is OrderKind.EVENTS:
        polls = lambda: world.gpus.num_calls("cuEventQuery") > asked + 3  # noqa: E731
        wait_for(lambda: polls() or store.done(), "polls")
    else:
        for _ in range(3):
            one.session.ping(60)
        assert world.gpus.num_calls("cuEventQuery") == asked, "reading a word needs no driver"
    assert not store.done(), store.result()
    one.fill(IDS, 2)
    content = one.content(IDS)
    if kind is OrderKind.EVENTS:
        one.events[0].reach()
    else:
        one.words[0] = 1
    done(store)
    done(one.load(names, IDS + 8)[1])
    assert one.content(IDS + 8) == content


def test_a_failing_call_fails_only_its_transfer(world: World) -> None:
    one, names = world.engine(), hashes(4)
    for name in ("cuMemcpyBatchAsync_v2", "cuMemcpyAsync"):
        world.gpus.fail(name, UNKNOWN)
    failed = one.store(names, IDS)[1].result(60)
    assert failed.status is TransferStatus.FAILED
    assert "cuMemcpyAsync on device 0: unknown (999)" in failed.message
    done(one.store(names, IDS)[1])


def test_a_method_that_fails_is_replaced_and_said(make: Make) -> None:
    world = make(num_devices=2).start(*copies_by("batch"))
    one, two, names = world.engine(), world.engine(device=1), hashes(4)
    world.gpus.fail("cuMemcpyBatchAsync_v2", UNKNOWN, times=3)
    one.fill(IDS, 1)
    for _ in range(3):
        done(one.store(hashes(4), IDS)[1])
    done(one.store(names, IDS)[1])
    done(two.load(names, IDS)[1])
    assert two.content(IDS) == one.content(IDS)
    assert "device 0 stores by memcpy, because batch has failed" in world.server.cli("devices")
    text = get(http_port(world.server), "/metrics").text
    for name, value in (
        ('method_demoted{device="0",direction="store",method="batch"}', 1.0),
        ('method_failures_total{device="0",direction="store",method="batch"}', 3.0),
        ('retried_jobs_total{device="0"}', 3.0),
        ('retried_jobs_total{device="1"}', 0.0),
        ('failed_jobs_total{device="0"}', 0.0),
    ):
        assert f"hotkv_device_{name} {value}" in text, name


def test_a_hanging_copy_delays_no_ping(world: World) -> None:
    one, other, names = world.engine(), world.engine(device=1), hashes(4)
    asked = world.gpus.num_calls("cuMemcpyBatchAsync_v2")
    with world.gpus.held("cuMemcpyBatchAsync_v2"):
        _, store = one.store(names, IDS)
        wait_for(lambda: world.gpus.num_calls("cuMemcpyBatchAsync_v2") > asked, "the copy")
        assert other.session.ping(60) >= 0 and not store.done()
    done(store)


def test_a_hanging_poll_delays_no_ping(world: World) -> None:
    one, other = world.engine(offers=("events",)), world.engine(device=1)
    for event in one.events:
        event.record()
    asked = world.gpus.num_calls("cuEventQuery")
    with world.gpus.held("cuEventQuery"):
        _, store = one.store(hashes(4), IDS, one.after(0, 1))
        wait_for(lambda: world.gpus.num_calls("cuEventQuery") > asked, "the poll")
        assert other.session.ping(60) >= 0 and not store.done()
    for event in one.events:
        event.reach()
    done(store)


def test_transfers_go_on_while_the_arena_is_pinned(make: Make) -> None:
    """The first transfers copy memory that is not pinned yet."""
    world = make(register_s=0.2).start(*copies_by("batch"))
    one = world.engine(offers=["events"])
    one.fill(IDS, 1)
    pinned = lambda: world.gpus.num_calls("cuMemHostRegister_v2")  # noqa: E731
    while pinned() < 8:
        names = hashes(4)
        done(one.store(names, IDS, one.after(0))[1])
        done(one.load(names, IDS + 8, one.after(0))[1])
        assert one.content(IDS + 8) == one.content(IDS)


def test_copies_take_the_time_of_the_link(make: Make) -> None:
    """48 KiB at 1 MB/s: what is faster than that has not waited for the device."""
    world = make(bytes_per_s=1e6).start(*copies_by("batch"))
    one = world.engine()
    world.gpus.forget_times()
    result = done(one.store(hashes(4), IDS)[1])
    first_ns, last_ns = world.gpus.times_ns("store")
    assert first_ns > 0 and last_ns - first_ns >= 0.99 * result.num_bytes / 1e6 * 1e9
    assert np.array_equal(world.gpus.times_ns("load"), (0, 0))


@pytest.mark.long
def test_equal_devices_choose_the_same_methods(make: Make) -> None:
    """They are measured beside the load of this machine."""
    world = make(num_devices=3, moved_bytes=0).start()

    def devices() -> list[dict[str, Any]]:
        return [one for one in world.server.status()["devices"]["devices"] if one["speeds"]]

    wait_for(lambda: len(devices()) == 3, "the measurements")
    chosen = {
        tuple((s["direction"], s["page_byte_count"], s["method"]) for s in speeds if s["is_chosen"])
        for speeds in (one["speeds"] for one in devices())
    }
    assert len(chosen) == 1 and len(chosen.pop()) == 2 * len(PAGE_BYTES), chosen
