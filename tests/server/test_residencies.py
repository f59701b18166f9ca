"""Tests residencies on a real server, also while it is killed, and operators' figures."""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hotkv_client import (
    Arena,
    BlockResult,
    BlockRun,
    GroupHashes,
    ResidencyOpened,
    Role,
    Session,
    SessionConfig,
    SessionLostError,
)
from hotkv_client.admin import AdminClient
from hotkv_client.paged_engine import PagedEngine
from hotkv_proto.blocks import StoreOptions
from hotkv_proto.errors import HotKVError, Reason
from tests.server.places import LAYERS, NUM_BLOCKS, PAGE_BYTES, Place, place
from tests.server.refusals import refused
from tests.server.support import block_ids, hashes
from tests.support.waiting import wait_for

SLOT_BYTES = LAYERS * PAGE_BYTES
__all__ = ["place"]
GRACE = ("--residency.grace-s", "3")
TIMEOUT_S = 20


class Reader:
    """Reads a residency's blocks in the arena, and knows their bytes."""

    def __init__(self, session: Session, name: str, num_blocks: int) -> None:
        arena = session.arena()
        assert arena is not None
        self.session, self.name, self.arena = session, name, arena
        self.opened = session.open_residency(name, {0: num_blocks}).result(TIMEOUT_S)
        self.expected: dict[int, NDArray[np.uint8]] = {}

    def extend(self, first: int, blocks: list[bytes]) -> list[int]:
        found = self.session.extend_residency(self.name, 0, first, blocks).result(TIMEOUT_S)
        return list(found.offsets.tolist())

    def check(self) -> bool:
        """Whether the residency is still valid. While it is, no byte may have changed, so this
        is asked last."""
        is_as_stored = all(
            np.array_equal(self.arena.memory[offset : offset + SLOT_BYTES], pages)
            for offset, pages in self.expected.items()
        )
        holds = self.arena.holds(self.opened)
        assert is_as_stored or not holds, "blocks changed under a reader that holds"
        return holds


class Writer:
    """A thread that stores new blocks, also to the next server."""

    def __init__(self, target: str) -> None:
        self.engine = PagedEngine(
            target, layers=LAYERS, num_blocks=NUM_BLOCKS, page_bytes=PAGE_BYTES, engine_id="writer"
        ).connect()
        self.engine.kv[:] = 0xEE
        self.num_stored = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Writer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self.engine.close()

    def _run(self) -> None:
        while not self._ends.is_set():
            try:
                results = store_to(self.engine, hashes(NUM_BLOCKS))
                self.num_stored += results.count(BlockResult.STORED)
            except (SessionLostError, HotKVError):
                time.sleep(0.01)

    def fill(self, num_bytes: int) -> None:
        """Stores enough to evict all that is not pinned."""
        enough = self.num_stored + 4 * num_bytes // SLOT_BYTES
        wait_for(lambda: self.num_stored > enough, within_s=120)


def store_to(engine: PagedEngine, blocks: list[bytes], residency_id: str = "") -> list[int]:
    """Stores the engine's first blocks; a result for each."""
    name, run = os.urandom(8).hex(), BlockRun(0, blocks, block_ids(len(blocks)), depth=0)
    options = StoreOptions(residency_id=residency_id)
    done = engine.session.store(name, name, [run], TIMEOUT_S, options).result(TIMEOUT_S)
    return list(done.results[0].tolist())


def resident(place: Place, count: int = 40, name: str = "r") -> tuple[Reader, list[bytes]]:
    """Stores blocks in a new residency. (Reader, hashes)."""
    engine = place.engine or place.connect()
    reader, blocks = Reader(engine.session, name, count), hashes(count)
    assert set(store_to(engine, blocks, name)) == {BlockResult.STORED}
    for at, offset in enumerate(reader.extend(0, blocks)):
        assert offset >= 0
        reader.expected[offset] = engine.kv[:, at].reshape(-1).copy()
    assert reader.check()
    return reader, blocks


def test_store_pins_in_its_ready_step(place: Place) -> None:
    server = place.start()
    reader, blocks = resident(place)
    with Writer(server.target) as writer:
        writer.fill(16 << 20)
        assert reader.check()
        assert reader.extend(0, blocks) == list(reader.expected)
        reader.session.close_residency(reader.name)
        writer.fill(16 << 20)
    found = reader.session.lookup([GroupHashes(0, blocks)]).result(TIMEOUT_S)
    assert not found[0].any(), "what was given back is evicted"


def test_same_call_gets_same_answer_unknown_reason(place: Place) -> None:
    place.start()
    reader, blocks = resident(place, 4)
    session = reader.session
    assert session.open_residency("r", {0: 4}).result(TIMEOUT_S) == reader.opened
    # test_refusals tests invalid fields.
    for future, reason in [
        (session.open_residency("r", {0: 3}), Reason.DUPLICATE_ID),
        (session.open_residency("", {0: 5}), Reason.INVALID_FIELD),
        (session.open_residency("s", {}), Reason.INVALID_FIELD),
        (session.extend_residency("s", 0, 0, blocks), Reason.UNKNOWN_RESIDENCY),
        (session.extend_residency("r", 0, 1, blocks), Reason.DUPLICATE_ID),
        (session.extend_residency("r", 1, 0, blocks), Reason.INVALID_FIELD),
        (session.extend_residency("r", 0, -1, blocks), Reason.INVALID_FIELD),
    ]:
        assert refused(future).reason is reason
    assert reader.extend(2, [*blocks[2:], *hashes(3)]) == [*list(reader.expected)[2:], -1, -1, -1]


def test_open_residency_grows_or_stays(place: Place) -> None:
    server = place.start()
    reader, blocks = resident(place, 4)
    session, more = reader.session, [*blocks, *hashes(8)]
    store_to(place.engine or place.connect(), more)
    assert refused(session.extend_residency("r", 0, 0, more)).reason is Reason.INVALID_FIELD
    with AdminClient(server.target) as admin:

        def stays_at(reserved: int, asked: int) -> Reason:
            """The refusal must be listed, and change nothing. Its reason."""
            error = refused(session.open_residency("r", {0: asked}))
            told = admin.residencies()
            assert [one["residency_id"] for one in told["refusals"]] == ["r"]
            (mine,) = (one for one in told["residencies"] if one["residency_id"] == "r")
            assert mine["reserved_block_count"] == reserved
            return error.reason

        assert stays_at(4, 1 << 20) is Reason.RESIDENCY_TOO_LARGE
        assert session.open_residency("r", {0: 12}).result(TIMEOUT_S) == reader.opened
        assert not admin.residencies()["refusals"]
        assert min(reader.extend(0, more)) >= 0
        session.open_residency("other", {0: 900}).result(TIMEOUT_S)
        assert stays_at(12, 1200) is Reason.NO_ROOM_FOR_RESIDENCY
        assert reader.check()
        session.close_residency("r")
        wait_for(lambda: not admin.residencies()["refusals"])


def test_refusal_names_amount_and_holder_for_operators(place: Place) -> None:
    server = place.start()
    session = resident(place, 128)[0].session
    session.open_residency("more", {0: 872}).result(TIMEOUT_S)
    error = refused(session.open_residency("big", {0: 1 << 20}))
    assert error.reason is Reason.RESIDENCY_TOO_LARGE and not error.retryable
    assert "arena.bytes" in error.message and str(SLOT_BYTES << 20) in error.message
    for _ in range(2):
        error = refused(session.open_residency("later", {0: 700}))
        assert error.reason is Reason.NO_ROOM_FOR_RESIDENCY and error.retryable
    room = int(0.8 * (16 << 20)) - 1000 * SLOT_BYTES
    for number in (700 * SLOT_BYTES, room, 1000 * SLOT_BYTES):
        assert str(number) in error.message
    with AdminClient(server.target) as admin:
        told, (row,) = admin.residencies(), admin.sessions()
        (_, mine), (waiting,) = told["residencies"], told["refusals"]
        assert (mine["residency_id"], mine["block_count"]) == ("r", 128)
        assert (waiting["residency_id"], waiting["attempt_count"]) == ("later", 2)
        asked, available = waiting["asked_byte_count"], waiting["available_byte_count"]
        assert (asked, available) == (700 * SLOT_BYTES, room)
        assert told["pinned_byte_count"] == 128 * SLOT_BYTES
        assert told["promised_byte_count"] == 872 * SLOT_BYTES
        assert row["residency_count"] == 2
        assert "later" in server.cli("residencies") and "residencies 2" in server.cli("status")
        session.close_residency("more")
        session.open_residency("later", {0: 700}).result(TIMEOUT_S)
        assert not admin.residencies()["refusals"], "it waits no longer"
        refused(session.open_residency("big", {0: 1 << 20}))
        session.close_residency("big")
        wait_for(lambda: not admin.residencies()["refusals"], "its request has ended")


def test_a_session_that_ends_tells_its_readers_first(place: Place) -> None:
    place.start()
    reader, _ = resident(place)
    reader.session.close()
    assert not reader.arena.holds(reader.opened), "a closed session has told its readers"
    again = Reader(place.connect().session, "r", 4)
    assert again.check() and not reader.arena.holds(reader.opened)


@pytest.mark.long
def test_resized_arena_leaves_old_one_to_readers(place: Place) -> None:
    place.start(*GRACE)
    reader, _ = resident(place)
    place.stop()
    with Writer(place.start(*GRACE, arena="24MiB").target) as writer:
        writer.fill(12 << 20)
        assert reader.check(), "nobody writes into a file that was not taken over"


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_readers_outlive_their_server_for_the_grace(place: Place, how: signal.Signals) -> None:
    server = place.start(*GRACE)
    reader, blocks = resident(place)
    flushed, _ = resident(place, 24, "flushed")
    session = reader.session
    assert session.flush().result(TIMEOUT_S) == 64
    # The index has only these.
    kept, names = resident(place, 30, "kept")
    with Writer(server.target) as writer:
        wait_for(lambda: writer.num_stored > NUM_BLOCKS)
        place.stop(how)
        assert reader.check() and flushed.check() and kept.check(), "nobody is there to write"
        place.start(*GRACE)
        with AdminClient(server.target) as admin:
            told = admin.residencies()
        assert told["grace_byte_count"] == 94 * SLOT_BYTES and 0 < told["grace_s"] <= 3
        # Within the grace time, the slots must be the same.
        back = Reader(session, "kept", 30)
        assert back.opened.start_number == kept.opened.start_number + 1
        assert back.extend(0, names) == list(kept.expected)
        back.expected = dict(kept.expected)
        stored = writer.num_stored
        while reader.check():
            # They need not be valid: the grace time may end between two checks.
            flushed.check()
            kept.check()
            assert back.check()
        assert writer.num_stored > stored, "others stored all the time"
        # They are revoked one after the other.
        wait_for(lambda: not flushed.check() and not kept.check())
        wait_for(lambda: place.counter("residency_grace_bytes") == 0)
        writer.fill(16 << 20)
        assert back.check(), "what was leased anew stays"
        assert not reader.check()
    assert refused(session.extend_residency("r", 0, 0, blocks)).reason is Reason.UNKNOWN_RESIDENCY


def test_no_residency_over_tcp_or_without_words(place: Place, tmp_path: Path) -> None:
    server, key_space = place.start(), place.connect().key_space
    session = Session(SessionConfig(server.target, "e", Role.SCHEDULER, key_space, use_table=False))
    session.start()
    assert session.wait_connected(TIMEOUT_S) and session.arena() is None
    assert refused(session.open_residency("r", {0: 1})).reason is Reason.NOT_ALLOWED
    session.close()
    path = tmp_path / "arena"
    path.write_bytes(bytes(4096))
    with open(path, "rb") as file:
        arena = Arena(file.fileno(), 4096)
    assert not arena.holds(ResidencyOpened("r", 1, 1, 1))
