"""The arena of a real server grows and shrinks under an engine, and over restarts."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from demo.processes import Server
from hotkv_client import GroupHashes
from hotkv_client.admin import AdminClient
from hotkv_proto.errors import HotKVError, Reason
from hotkv_server import cli
from tests.server.places import FLAGS, Place, found, opened
from tests.server.support import hashes
from tests.support.waiting import wait_for

MIB = 1 << 20


class Resized(Place):
    """A block has 64 KiB, so 16 MiB hold 256."""

    page_bytes, num_blocks = 32 << 10, 600

    def start(self, *flags: str, arena: str = "16MiB") -> Server:
        most = max(32, int(arena.removesuffix("MiB")))
        return super().start("--arena.max-bytes", f"{most}MiB", *flags, arena=arena)

    def put(self, blocks: list[bytes], content: np.ndarray | None = None) -> np.ndarray:
        """In stores of 50, as one may reserve a quarter of the arena."""
        assert content is None
        parts = [blocks[at : at + 50] for at in range(0, len(blocks), 50)]
        return np.concatenate([super(Resized, self).put(part) for part in parts], axis=1)

    def loads(self, blocks: list[bytes], content: np.ndarray) -> bool:
        return all(
            super(Resized, self).loads(blocks[at : at + 50], content[:, at : at + 50])
            for at in range(0, len(blocks), 50)
        )

    def resize(self, num_mib: int, timeout_s: float = 20.0) -> dict[str, object]:
        assert self.server is not None
        with AdminClient(self.server.target) as admin:
            return admin.resize(num_mib * MIB, timeout_s)

    def until_filled(self, num_mib: int) -> None:
        assert self.server is not None
        with AdminClient(self.server.target) as admin:
            wait_for(
                lambda: admin.tell("tiers")["tiers"][0]["capacity_byte_count"] == num_mib * MIB
            )

    @property
    def memory_bytes(self) -> int:
        return (self.folder / "arena" / "arena").stat().st_blocks * 512


@pytest.fixture
def place() -> Iterator[Resized]:
    with opened(Resized, 160 * MIB) as made:
        yield made


def test_arena_grows_under_an_engine(place: Resized) -> None:
    place.start()
    engine = place.connect()
    first, more = hashes(250), hashes(250)
    content, epoch = place.put(first), engine.session.epoch
    assert place.resize(32)["arena_byte_count"] == 32 * MIB
    place.until_filled(32)
    further = place.put(more)
    assert engine.session.epoch == epoch
    assert place.loads(first, content) and place.loads(more, further)
    with pytest.raises(HotKVError, match=r"can grow to 32 MiB .*its blocks stay") as refused:
        place.resize(33)
    assert refused.value.reason is Reason.INVALID_FIELD


def test_shrinking_keeps_the_hottest(place: Resized) -> None:
    """They lie at the end, and move."""
    place.start(arena="32MiB")
    engine, cold, hot = place.connect(), hashes(400), hashes(100)
    place.put(cold)
    content = place.put(hot)
    for _ in range(3):
        assert place.loads(hot, content)
    place.until_filled(32)
    done = place.resize(16)
    assert done["arena_byte_count"] == 16 * MIB and not done.get("holders")
    assert done["moved_block_count"] >= 100
    left = sum(found(engine, cold))
    assert done["evicted_block_count"] == 400 - left and 140 <= left <= 156
    assert place.loads(hot, content)
    assert place.memory_bytes < 17 * MIB
    assert place.resize(32)["arena_byte_count"] == 32 * MIB
    place.until_filled(32)
    assert place.loads(hot, content)
    again = hashes(250)
    assert place.loads(again, place.put(again)) and all(found(engine, hot))


def test_shrinking_waits_for_pins_and_names_them(place: Resized) -> None:
    place.start(arena="32MiB")
    engine, blocks = place.connect(), hashes(500)
    content = place.put(blocks)
    leased = [GroupHashes(0, blocks[-50:])]
    assert engine.session.acquire("held", leased).result(60).pinned[0].all()
    place.until_filled(32)
    done = place.resize(16, timeout_s=0.3)
    assert 16 * MIB < int(str(done["arena_byte_count"])) <= 32 * MIB
    (holder,) = done["holders"]  # type: ignore[misc]
    assert holder["name"].startswith("read leases of ") and 0 < holder["block_count"] <= 50
    assert place.loads(blocks[-50:], content[:, -50:])
    threading.Timer(0.5, lambda: engine.session.release("held")).start()
    assert place.resize(16)["arena_byte_count"] == 16 * MIB
    assert place.loads(blocks[-50:], content[:, -50:]), "the latest are the hottest"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_restart_with_another_size_keeps_blocks(place: Resized, how: signal.Signals) -> None:
    place.start(arena="32MiB")
    engine, blocks = place.connect(), hashes(500)
    content, epoch = place.put(blocks), engine.session.epoch
    assert place.loads(blocks[-100:], content[:, -100:])
    place.stop(how)
    place.start(arena="128MiB")
    assert engine.session.epoch == epoch and place.loads(blocks, content)
    place.until_filled(128)
    place.stop(how)
    place.start(arena="16MiB")
    place.until_filled(16)
    assert 200 <= sum(found(engine, blocks)) <= 256
    # A killed server has not saved when blocks were last used.
    assert how == signal.SIGKILL or place.loads(blocks[-100:], content[:, -100:])
    wait_for(lambda: place.memory_bytes < 17 * MIB)


def test_check_foretells_what_becomes_of_the_cache(
    place: Resized, capsys: pytest.CaptureFixture[str]
) -> None:
    place.start(arena="32MiB")
    place.connect()
    place.put(hashes(500))
    place.stop()
    where = ["--runtime-dir", str(place.folder / "run"), "--arena.dir", str(place.folder / "arena")]
    for size, words in (
        ("16MiB", "stays; its blocks reach to 31 MiB, so the arena then shrinks to 16 MiB"),
        ("32MiB", "stays\n"),
        ("80MiB", "stays, in an arena of 80 MiB"),
    ):
        assert cli.main(["run", "--check", *where, "--arena.bytes", size, *FLAGS]) == 0
        assert words in capsys.readouterr().err


def test_kill_during_a_shrink_loses_nothing_more(place: Resized) -> None:
    place.start(arena="32MiB")
    engine, blocks = place.connect(), hashes(500)
    content = place.put(blocks)
    place.until_filled(32)
    for delay_s in np.linspace(0, 0.1, 4):
        shrinking = threading.Thread(target=lambda: _ignore(place))
        shrinking.start()
        time.sleep(float(delay_s))
        place.stop()
        shrinking.join()
        place.start(arena="32MiB")
        there = [at for at, is_there in enumerate(found(engine, blocks)) if is_there]
        assert len(there) >= 200
        assert place.loads([blocks[at] for at in there], content[:, there])


def _ignore(place: Resized) -> None:
    with contextlib.suppress(HotKVError):
        place.resize(16)
