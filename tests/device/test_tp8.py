"""An engine of eight ranks on eight devices, which the server numbers otherwise. Faults of one
rank or device affect no other: `tests.device.ranks`."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from demo.processes import runtime_folder
from hotkv_client.types import TransferStatus
from hotkv_proto.layout import MemoryHandle
from tests.device.ranks import (
    HERE,
    NUM_BLOCKS,
    NUM_RANKS,
    THERE,
    RankProcess,
    Ranks,
    acquire,
    is_loaded,
    load,
    rank_of,
    store,
)
from tests.device.timed_gpu import needs_c_compiler
from tests.device.timed_world import World
from tests.device.virtual_memory import VirtualEngine
from tests.doubles.with_constants import copies_by
from tests.server.devices_support import DeviceEngine, done
from tests.server.support import hashes
from tests.support.waiting import wait_for

pytestmark = needs_c_compiler

PLACES = (3, 6, 1, 0, 7, 2, 5, 4)
"""Number in the machine, and so the rank, of each device as the server numbers it."""
SLOW_BYTES_PER_S = 1e6
"""96 KiB, which a rank stores or loads, take a tenth of a second."""


class Freed(DeviceEngine):
    """Its memory can't be opened."""

    def _handle(self, name: str, num_bytes: int, *, in_file: bool) -> MemoryHandle:
        return replace(super()._handle(name, num_bytes, in_file=in_file), cuda_handle=bytes(64))


def without_one(handle: MemoryHandle, fds: dict[str, int]) -> MemoryHandle:
    del fds[f"{handle.handle_id}.3"]
    return handle


def said(one: DeviceEngine, why: str) -> bool:
    return any(why in reason for reason in one.said)


@contextlib.contextmanager
def eight_devices() -> Iterator[World]:
    with runtime_folder(64 << 20) as folder, contextlib.ExitStack() as stack:
        made = World(
            stack, folder, num_devices=NUM_RANKS, bytes_per_s=SLOW_BYTES_PER_S, places=PLACES
        )
        yield made.start(*copies_by("batch"))


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with eight_devices() as made:
        yield made


@pytest.fixture
def fresh() -> Iterator[World]:
    """To be broken."""
    with eight_devices() as made:
        yield made


def test_a_killed_rank_leaves_the_others_loads(world: World) -> None:
    killed, names = 5, hashes(NUM_BLOCKS)
    ranks = world.add(Ranks(world.server.target, apart=[killed]))
    child = RankProcess(world.server.target, ranks.engine_id, killed)
    child.tell("store", "first", *(name.hex() for name in names))
    for future in ranks.store("first", names).values():
        done(future)
    child.expect("store")
    assert acquire(ranks.all[0], "read", names) == NUM_BLOCKS
    device = PLACES.index(killed)
    with world.gpus.hung(device):
        child.tell("load", "read")
        flying = ranks.load("read")
        wait_for(lambda: world.gpus.num_hung(device), "the copy of the rank to be killed")
        child.kill()
        for future in flying.values():
            done(future)
    assert all(map(is_loaded, ranks))
    again = ranks.add(killed).connected()
    done(load(again, "read"))
    assert is_loaded(again)
    ranks.close()
    world.check_nothing_leaks()


def test_a_rank_whose_memory_is_gone_stops_no_other(world: World) -> None:
    """Nor does one on a device that the server does not see. Blocks become ready with the last
    shard."""
    gone, unseen, names = 2, 6, hashes(NUM_BLOCKS)
    ranks = world.add(Ranks(world.server.target, apart=[gone, unseen]))
    absent = Freed(world.server.target, device=gone, engine_id=ranks.engine_id)
    foreign = DeviceEngine(world.server.target, device=12, engine_id=ranks.engine_id)
    for one, why in ((absent, "cuIpcOpenMemHandle_v2"), (foreign, "none that this server sees")):
        wait_for(partial(said, one, why), why)
        one.close()
    for future in ranks.store("write", names).values():
        done(future)
    assert acquire(ranks.all[0], "too early", names) == 0
    for rank in (gone, unseen):
        done(store(ranks.add(rank).connected(), "write", names))
    assert acquire(ranks.all[0], "read", names) == NUM_BLOCKS
    for future in ranks.load("read").values():
        done(future)
    assert all(map(is_loaded, ranks))
    ranks.close()
    world.check_nothing_leaks()


def test_a_rank_without_all_descriptors_stops_no_other(world: World) -> None:
    """Two ranks have virtual memory, and one of them sends a backing too few."""
    short, whole, names = 7, 1, hashes(NUM_BLOCKS)
    ranks = world.add(Ranks(world.server.target, apart=[short, whole]))
    ranks.add(whole, VirtualEngine).connected()
    lacking = rank_of(world.server.target, ranks.engine_id, short, VirtualEngine, alter=without_one)
    wait_for(partial(said, lacking, "no descriptor for 'kv.3' has come"), "the refusal")
    for future in ranks.store("write", names).values():
        done(future)
    assert acquire(ranks.all[whole], "too early", names) == 0
    lacking.close()
    done(store(ranks.add(short, VirtualEngine).connected(), "write", names))
    assert acquire(ranks.all[0], "read", names) == NUM_BLOCKS
    for future in ranks.load("read").values():
        done(future)
    assert all(map(is_loaded, ranks))
    ranks.close()
    world.check_nothing_leaks()
    assert not any(world.gpus.virtual_memory().values())


def test_a_hanging_device_delays_only_its_rank(world: World) -> None:
    names, hung = hashes(NUM_BLOCKS), 4
    ranks = world.add(Ranks(world.server.target))
    for future in ranks.store("write", names).values():
        done(future)
    assert acquire(ranks.all[0], "read", names) == NUM_BLOCKS
    with world.gpus.hung(PLACES.index(hung)):
        waiting = load(ranks.all[hung], "read")
        for one in ranks:
            if one.rank != hung:
                done(load(one, "read"))
                assert is_loaded(one)
        assert not waiting.done()
    done(waiting)
    assert is_loaded(ranks.all[hung])
    ranks.close()
    world.check_nothing_leaks()


def test_a_lost_device_fails_only_what_touched_it(fresh: World) -> None:
    names, lost = hashes(NUM_BLOCKS), 3
    device = PLACES.index(lost)
    ranks = fresh.add(Ranks(fresh.server.target))
    single = fresh.engine(device=lost + 1)
    for future in ranks.store("write", names).values():
        done(future)
    assert acquire(ranks.all[0], "read", names) == NUM_BLOCKS
    flying = ranks.load("read")
    fresh.gpus.lose(device)
    failed = flying.pop(lost).result(60)
    assert failed.status is TransferStatus.FAILED and f"on device {device}:" in failed.message
    for future in flying.values():
        done(future)
    # The rank's session ends, others' go on.
    wait_for(partial(said, ranks.all[lost], f"device {device} is lost"), "the reason")
    wait_for(partial(said, ranks.all[lost], "does not work"), "a refusal")
    for one in ranks:
        if one.rank != lost:
            one.fill(THERE, 200)
            done(load(one, "read"))
            assert is_loaded(one)
    own = hashes(NUM_BLOCKS)
    done(single.store(own, HERE)[1])
    done(single.load(own, THERE)[1])
    assert is_loaded(single)
    status = fresh.server.status()
    assert status["state"] == "ready" and not status["problems"]
    assert [f"device {device} is lost" in limit for limit in status["limits"]] == [True]
    usable = [not found["problem"] for found in status["devices"]["devices"]]
    assert usable == [number != device for number in range(NUM_RANKS)]
    assert f"ready; device {device} is lost" in fresh.server.cli("status")
    fresh.server.cli("ping", "--live")
    # Now a restart would help all engines and harm none.
    single.close()
    wait_for(lambda: fresh.server.status()["state"] == "unhealthy", "the end of the last one")


def test_an_error_of_all_devices_is_a_fault_of_the_server(fresh: World) -> None:
    """Devices that no engine uses are asked when one is lost."""
    one = fresh.engine(device=PLACES[0])
    names = hashes(NUM_BLOCKS)
    done(one.store(names, HERE)[1])
    for device in range(NUM_RANKS):
        fresh.gpus.lose(device)
    assert one.store(hashes(NUM_BLOCKS), HERE)[1].result(60).status is TransferStatus.FAILED

    def lost() -> list[str]:
        return [device for device in fresh.server.status()["limits"] if "is lost" in device]

    wait_for(lambda: len(lost()) == NUM_RANKS, "all devices")
    assert fresh.server.status()["state"] == "unhealthy"
