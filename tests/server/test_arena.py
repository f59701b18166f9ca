"""Tests an arena that an engine has mapped to read leased blocks in place."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from demo.processes import Server
from hotkv_client import Arena, BlockResult, GroupHashes, LeaseGrant, Session
from hotkv_client.paged_engine import PagedEngine
from tests.server.places import LAYERS, PAGE_BYTES, Place, found, place, store
from tests.server.support import hashes

__all__ = ["place"]
SLOT_BYTES = LAYERS * PAGE_BYTES


def leased(session: Session, blocks: list[bytes], name: str) -> LeaseGrant:
    return session.acquire(name, [GroupHashes(0, blocks)], wants_offsets=True).result(60)


def in_place(arena: Arena, grant: LeaseGrant) -> np.ndarray:
    """Reads the pinned blocks in the mapped arena: uint8 [blocks, layers, page bytes]."""
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


def mappings(file_id: tuple[int, int]) -> list[str]:
    """The access rights of each mapping of a file (device, inode) in this process."""
    device, inode = file_id
    of_file = [f"{os.major(device):02x}:{os.minor(device):02x}", str(inode)]
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    rows = [line.split() for line in lines]
    return [row[1] for row in rows if row[3:5] == of_file]


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
    offsets, pinned = grant.offsets[0], grant.pinned[0]
    assert offsets.dtype == np.int64 and np.array_equal(offsets == -1, ~pinned)
    assert pinned.sum() == 20 and len(set(offsets[pinned].tolist())) == 20
    assert np.array_equal(in_place(arena, grant), expected(one, 20))
    again = leased(other.session, asked, "mine")
    assert np.array_equal(again.offsets[0], grant.offsets[0])
    assert other.session.acquire("plain", [GroupHashes(0, blocks)]).result(60).offsets == ()
    with pytest.raises(ValueError, match="read-only"):
        arena.memory[0] = 1
    for lease_id in ("mine", "plain"):
        other.session.release(lease_id)


def test_a_mapping_outlives_its_session(server: Server, engine: Callable[..., PagedEngine]) -> None:
    one, other = (engine(layers=LAYERS, page_bytes=PAGE_BYTES) for _ in range(2))
    one.kv[:] = 7
    blocks = hashes(3)
    store(one, blocks)
    held, arena = leased(one.session, blocks, "held"), mapped(other.session)
    other.session.close()
    assert other.session.arena() is None and len(mappings(arena.file_id)) == 1
    # The closed session's mapping lasts as long as `arena`.
    assert np.array_equal(in_place(arena, held), expected(one, 3))
    file_id = arena.file_id
    del arena
    assert not mappings(file_id)


@pytest.mark.parametrize("is_trusted", [True, False])
def test_trusted_arena_writers_map_it_writable(place: Place, is_trusted: bool) -> None:
    uid = os.getuid() if is_trusted else os.getuid() + 1
    place.start("--security.arena-writers", f"[{uid}]")
    engine = place.connect()
    blocks = hashes(5)
    store(engine, blocks)
    arena = mapped(engine.session)
    assert arena.is_writable is is_trusted
    assert mappings(arena.file_id) == ["rw-s" if is_trusted else "r--s"]
    with pytest.raises(ValueError, match="read-only"):
        arena.memory[0] = 1
    grant = leased(engine.session, blocks, "mine")
    assert np.array_equal(in_place(arena, grant), expected(engine, 5))


def test_a_new_server_gives_a_new_mapping(place: Place) -> None:
    """The old one stays readable."""
    place.start()
    engine, blocks = place.connect(), hashes(10)
    store(engine, blocks)
    grant, old = leased(engine.session, blocks, "old"), mapped(engine.session)
    for size in (16, 32):
        place.stop(signal.SIGKILL)
        assert engine.session.arena() is None
        assert np.array_equal(in_place(old, grant), expected(engine, 10)), "who holds it reads on"
        place.start(arena=f"{size}MiB")
        new = mapped(engine.session)
        assert new is not old and new.file_id == old.file_id
        assert new.memory.size == size << 20
        assert all(found(engine, blocks))
        again = leased(engine.session, blocks, f"new {size}")
        assert np.array_equal(in_place(new, again), expected(engine, 10))
