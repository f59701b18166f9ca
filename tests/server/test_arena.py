"""The arena in an engine's process: leased blocks are read in place through the mapping that the
link hands out."""

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest

from demo.processes import Server
from hotkv_client import Arena, BlockResult, GroupHashes, LeaseGrant, Role, Session, SessionConfig
from hotkv_client.testing import PagedEngine
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.v1 import cache_pb2, cache_pb2_grpc
from tests.server.places import LAYERS, PAGE_BYTES, Place, found, place, spoil, store
from tests.server.support import hashes

__all__ = ["place"]
SLOT_BYTES = LAYERS * PAGE_BYTES


def leased(session: Session, blocks: list[bytes], name: str) -> LeaseGrant:
    return session.acquire(name, [GroupHashes(0, blocks)], wants_offsets=True).result(60)


def in_place(arena: Arena, grant: LeaseGrant) -> np.ndarray:
    """uint8 [blocks, layers, page bytes] of the pinned blocks."""
    offsets = grant.offsets[0][grant.pinned[0]]
    return np.stack(
        [arena.memory[at : at + SLOT_BYTES].reshape(LAYERS, PAGE_BYTES) for at in offsets.tolist()]
    )


def expected(engine: PagedEngine, count: int) -> np.ndarray:
    return engine.kv[:, :count].swapaxes(0, 1)


def mapped(session: Session) -> Arena:
    arena = session.arena()
    assert arena is not None
    return arena


def num_open(file_id: tuple[int, int]) -> int:
    """Descriptors of a file that this process has."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.fstat(int(fd))
            found += (status.st_dev, status.st_ino) == file_id
    return found


def num_mapped(file_id: tuple[int, int]) -> int:
    """Mappings of a file that this process has."""
    return sum(
        line.split()[4] == str(file_id[1])
        for line in Path("/proc/self/maps").read_text().splitlines()
    )


def test_leased_blocks_are_read_in_place(
    server: Server, engine: Callable[..., PagedEngine]
) -> None:
    one, other = (engine(layers=LAYERS, page_bytes=PAGE_BYTES) for _ in range(2))
    one.kv[:] = np.random.default_rng(5).integers(0, 256, one.kv.shape, np.uint8)
    blocks = hashes(20)
    assert store(one, blocks) == {BlockResult.STORED}
    asked = [*blocks[:7], *hashes(2), *blocks[7:]]
    grant = leased(other.session, asked, "mine")
    arena = mapped(other.session)
    assert arena is other.session.arena() and arena.memory.size == 64 << 20
    assert grant.offsets[0].dtype == np.int64 and np.array_equal(
        grant.offsets[0] == -1, ~grant.pinned[0]
    )
    assert (
        grant.pinned[0].sum() == 20 and len(set(grant.offsets[0][grant.pinned[0]].tolist())) == 20
    )
    assert np.array_equal(in_place(arena, grant), expected(one, 20))
    again = leased(other.session, asked, "mine")
    assert np.array_equal(again.offsets[0], grant.offsets[0])
    assert other.session.acquire("plain", [GroupHashes(0, blocks)]).result(60).offsets == ()
    with pytest.raises(ValueError, match="read-only"):
        arena.memory[0] = 1
    for lease_id in ("mine", "plain"):
        other.session.release(lease_id)


def test_a_mapping_outlives_its_session(server: Server, engine: Callable[..., PagedEngine]) -> None:
    one, other = (
        engine(layers=LAYERS, page_bytes=PAGE_BYTES),
        engine(layers=LAYERS, page_bytes=PAGE_BYTES),
    )
    one.kv[:] = 7
    blocks = hashes(3)
    store(one, blocks)
    held = leased(one.session, blocks, "held")
    session, arena = other.session, mapped(other.session)
    assert num_open(arena.file_id) == 2 and num_mapped(arena.file_id) == 1, (
        "a link's descriptor each; the mapping needs none"
    )
    session.close()
    assert session.arena() is None
    assert np.array_equal(in_place(arena, held), expected(one, 3)), (
        "under another session's lease it is still the same memory"
    )
    file_id = arena.file_id
    assert num_open(file_id) == 1 and num_mapped(file_id) == 1
    del arena
    assert num_open(file_id) == 1 and not num_mapped(file_id)


def mapped_as(arena: Arena) -> set[str]:
    """Access rights of the arena's mappings in this process, as /proc names them."""
    return {
        line.split()[1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.split()[4] == str(arena.file_id[1])
    }


@pytest.mark.parametrize("is_trusted", [True, False])
def test_who_is_trusted_with_the_arena_maps_it_writable(place: Place, is_trusted: bool) -> None:
    uid = os.getuid() if is_trusted else os.getuid() + 1
    place.start("--security.arena-writers", f"[{uid}]")
    engine = place.connect()
    blocks = hashes(5)
    store(engine, blocks)
    arena = mapped(engine.session)
    assert arena.is_writable is is_trusted
    assert mapped_as(arena) == {"rw-s" if is_trusted else "r--s"}
    with pytest.raises(ValueError, match="read-only"):
        arena.memory[0] = 1
    grant = leased(engine.session, blocks, "mine")
    assert np.array_equal(in_place(arena, grant), expected(engine, 5))


def test_a_session_without_a_link_has_no_arena(
    server: Server, engine: Callable[..., PagedEngine]
) -> None:
    one = engine(layers=LAYERS, page_bytes=PAGE_BYTES)
    blocks = hashes(2)
    store(one, blocks)
    bare = Session(SessionConfig(server.target, "bare", Role.TOOL, one.key_space, use_table=False))
    bare.start()
    assert bare.wait_connected(10) and bare.arena() is None
    with pytest.raises(HotKVError, match=r"wants_offsets.*load the blocks") as caught:
        leased(bare, blocks, "x")
    assert caught.value.reason is Reason.NOT_ALLOWED
    assert bare.acquire("x", [GroupHashes(0, blocks[:1])]).result(60).pinned[0].all(), (
        "the refused call took no lease"
    )
    bare.close()


def test_a_new_server_gives_a_new_arena(place: Place) -> None:
    """Over the file of the one before, unless that has another size."""
    place.start()
    engine, blocks = place.connect(), hashes(10)
    store(engine, blocks)
    grant, old = leased(engine.session, blocks, "old"), mapped(engine.session)
    for size, is_kept in ((16, True), (32, False)):
        place.stop(signal.SIGKILL)
        assert engine.session.arena() is None
        assert np.array_equal(in_place(old, grant), expected(engine, 10)), "who holds it reads on"
        place.start(arena=f"{size}MiB")
        new = mapped(engine.session)
        assert new is not old and (new.file_id == old.file_id) == is_kept
        assert new.memory.size == size << 20
        assert is_kept == all(found(engine, blocks))
        store(engine, blocks)
        again = leased(engine.session, blocks, f"new {size}")
        assert np.array_equal(in_place(new, again), expected(engine, 10))


def test_what_came_back_is_compared_before_it_is_read_in_place(place: Place) -> None:
    place.start("--integrity.check", "full")
    engine = place.connect()
    blocks = hashes(20)
    store(engine, blocks)
    place.stop()
    spoil(place, engine.kv[0, 3])
    spoil(place, engine.kv[0, 11])
    place.start("--integrity.check", "full", "--integrity.start-check-s", "0")
    good = np.array([number not in (3, 11) for number in range(20)])
    assert engine.session._connection is not None
    groups = [cache_pb2.GroupHashes(group_index=0, hashes=b"".join(blocks[:10]))]
    request = cache_pb2.AcquireLeaseRequest(
        session_id=engine.session._connection.session_id,
        lease_id="unary",
        groups=groups,
        wants_offsets=True,
    )
    with grpc.insecure_channel(engine.session.config.target) as channel:
        answer = cache_pb2_grpc.CacheServiceStub(channel).AcquireLease(request, timeout=10)
    assert (
        answer.groups[0].flags == good[:10].tobytes()
        and place.counter("condemned_blocks_total") == 1
    )
    for _ in range(2):
        grant = leased(engine.session, blocks, "mine")
        assert (
            np.array_equal(grant.pinned[0], good)
            and np.array_equal(grant.offsets[0] == -1, ~good)
            and 0 < grant.ttl_s <= 30
        )
        assert np.array_equal(in_place(mapped(engine.session), grant), expected(engine, 20)[good])
    assert found(engine, blocks) == good.tolist() and place.counter("condemned_blocks_total") == 2
