"""A disk that stores blocks encoded: more of them fit, all come back byte for byte, whatever the
server before or after it was told; what can't be encoded lies there as it is."""

import argparse
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from hotkv_client import GroupHashes
from hotkv_client.admin import AdminClient
from hotkv_client.command import cli
from hotkv_client.command.tables import show_status
from hotkv_server.tiers.compression.form import room_bytes
from tests.server.support import hashes
from tests.server.tiered import CHAIN, LAYERS, PAGE_BYTES, SLOT_BYTES, Tiered, tiered
from tests.tiers.encodings import encode, keys_and_values

ROOM_BYTES = room_bytes(SLOT_BYTES)
DISK_BYTES = 64 << 20
AUTO, OFF = ("--tiers.disk.compress", "auto"), ("--tiers.disk.compress", "off")


def values(count: int, seed: int = 1) -> np.ndarray:
    """Bytes [layer, block, byte] of blocks as models make them."""
    made: np.ndarray = keys_and_values(LAYERS * count * PAGE_BYTES, seed)
    return made.reshape(LAYERS, count, PAGE_BYTES)


def noise(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (LAYERS, count, PAGE_BYTES), np.uint8)


@pytest.fixture
def place() -> Iterator[Tiered]:
    with tiered() as made:
        yield made


def lose_arena(place: Tiered) -> None:
    """As a reboot does; the server is not there."""
    for path in (place.folder / "arena").iterdir():
        path.unlink()


def test_a_disk_holds_more_blocks_and_gives_each_back(place: Tiered) -> None:
    place.start_tiered(*AUTO)
    place.connect()
    chains = [hashes(CHAIN) for _ in range(20)]
    num_blocks = len(chains) * CHAIN
    assert DISK_BYTES // SLOT_BYTES * 1.15 < num_blocks < DISK_BYTES // ROOM_BYTES
    contents = [place.fill(chain, values(CHAIN, at)) for at, chain in enumerate(chains)]
    for chain, content in zip(chains, contents, strict=True):
        assert place.loads(chain, content)
    assert place.counter("tier_encoded_blocks_total") == num_blocks
    assert place.counter("tier_used_bytes") == num_blocks * ROOM_BYTES
    assert place.counter("tier_capacity_bytes") == DISK_BYTES
    assert place.counter("tier_written_bytes_total") == num_blocks * ROOM_BYTES
    num_up = place.counter("tier_promoted_blocks_total")
    assert num_up > num_blocks / 2
    assert place.counter("tier_read_bytes_total") == num_up * ROOM_BYTES
    assert not place.counter("tier_lost_blocks_total")


def test_what_cannot_be_encoded_lies_there_as_it_is(place: Tiered) -> None:
    place.start_tiered(*AUTO, "--tiers.disk.write-gb-per-day", "1e5")
    place.connect()
    chains = [hashes(CHAIN) for _ in range(8)]
    contents = []
    for at, chain in enumerate(chains):
        mixed = values(CHAIN, at)
        mixed[:, ::3] = noise(CHAIN)[:, ::3]
        contents.append(place.fill(chain, noise(CHAIN) if at < 2 else mixed))
    num_plain = 2 * CHAIN + 6 * CHAIN // 3
    num_encoded = 8 * CHAIN - num_plain
    stored_bytes = num_plain * SLOT_BYTES + num_encoded * ROOM_BYTES
    assert place.counter("tier_encoded_blocks_total") == num_encoded
    assert place.counter("tier_written_bytes_total") == stored_bytes
    assert place.counter("tier_used_bytes") == stored_bytes
    assert place.counter("tier_budget_left_bytes") == 10**14 - stored_bytes
    assert not place.counter("tier_failed_blocks_total")
    assert not place.counter("tier_refused_blocks_total")
    for chain, content in zip(chains, contents, strict=True):
        assert place.loads(chain, content)
    assert place.server is not None
    with AdminClient(place.server.target) as admin:
        status = cli.status(admin, argparse.Namespace())
    row = next(line for line in show_status(status).splitlines() if line.startswith("disk "))
    assert row.split()[1:6] == ["up", f"{stored_bytes / 2**20:.1f}", "MiB", "64.0", "MiB"]


@pytest.mark.long
@pytest.mark.parametrize(
    "first, then",
    [
        (AUTO, OFF),
        pytest.param(OFF, AUTO, marks=pytest.mark.long),
        pytest.param(AUTO, AUTO, marks=pytest.mark.long),
    ],
)
def test_a_killed_server_is_followed_by_one_of_either_setting(
    place: Tiered, first: tuple[str, ...], then: tuple[str, ...]
) -> None:
    place.start_tiered(*first)
    place.connect()
    chains = [hashes(CHAIN) for _ in range(5)]
    contents = [place.fill(chain, values(CHAIN, at)) for at, chain in enumerate(chains[:-1])]
    contents.append(place.fill(chains[-1]))
    used_bytes = place.counter("tier_used_bytes")
    place.stop(signal.SIGKILL)
    lose_arena(place)
    place.start_tiered(*then)
    assert place.counter("tier_used_bytes") == used_bytes
    for chain, content in zip(chains, contents, strict=True):
        assert place.loads(chain, content)
    more = hashes(CHAIN)
    assert place.loads(more, place.fill(more, values(CHAIN, 9)))
    num_encoded = place.counter("tier_encoded_blocks_total")
    assert num_encoded == (CHAIN if then == AUTO else 0)
    size = ROOM_BYTES if then == AUTO else SLOT_BYTES
    assert place.counter("tier_used_bytes") == used_bytes + CHAIN * size
    assert not place.counter("tier_lost_blocks_total")


def test_an_encoded_block_that_changed_on_the_disk_is_a_miss(place: Tiered) -> None:
    place.start_tiered(*AUTO)
    engine = place.connect()
    chain, content = hashes(CHAIN), values(CHAIN)
    place.fill(chain, content)
    for _ in range(6):
        place.fill(hashes(CHAIN))
    used, room = encode(np.ascontiguousarray(content[:, 7]).reshape(-1), ROOM_BYTES)
    assert 0 < used < ROOM_BYTES
    slabs = np.memmap(place.folder / "disk" / "slabs", np.uint8, "r+")
    at = slabs.tobytes().find(room.tobytes())
    assert at >= 0
    # Behind the form, where no byte means anything.
    slabs[at + ROOM_BYTES - 1] ^= 1
    slabs.flush()
    grant = engine.session.acquire("a", [GroupHashes(0, chain)]).result(60)
    assert [at for at, good in enumerate(grant.pinned[0]) if not good] == [7]
    engine.session.release("a")
    assert place.counter("tier_lost_blocks_total") == 1
    good = [block for at, block in enumerate(chain) if at != 7]
    assert place.loads(good, np.delete(content, 7, axis=1))


def test_a_flush_reaches_encoded_blocks(place: Tiered) -> None:
    place.start_tiered(*AUTO)
    engine = place.connect()
    chains = [hashes(CHAIN) for _ in range(6)]
    for chain in chains:
        place.fill(chain, values(CHAIN))
    engine.session.flush().result(60)
    assert not place.counter("tier_used_bytes")
    place.stop(signal.SIGKILL)
    place.start_tiered(*AUTO)
    for chain in chains:
        assert not engine.session.lookup([GroupHashes(0, chain)]).result(60)[0].any()
