"""A disk that stores blocks encoded: more of them fit, all come back byte for byte, whatever the
server before or after it was told; what can't be encoded lies there as it is."""

import signal
from collections.abc import Iterator

import numpy as np
import pytest

from hotkv_server.tiers.compression.form import room_bytes
from tests.server.support import hashes
from tests.server.tiered import CHAIN, LAYERS, PAGE_BYTES, SLOT_BYTES, Tiered, tiered
from tests.tiers.encodings import keys_and_values

ROOM_BYTES = room_bytes(SLOT_BYTES)
DISK_BYTES = 64 << 20
AUTO, OFF = ("--tiers.disk.compress", "auto"), ("--tiers.disk.compress", "off")


def values(count: int, seed: int = 1) -> np.ndarray:
    """Bytes [layer, block, byte] of blocks as models make them."""
    made: np.ndarray = keys_and_values(LAYERS * count * PAGE_BYTES, seed)
    return made.reshape(LAYERS, count, PAGE_BYTES)


@pytest.fixture
def place() -> Iterator[Tiered]:
    with tiered() as made:
        yield made


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


@pytest.mark.long
@pytest.mark.parametrize("first, then", [(AUTO, OFF), (OFF, AUTO)])
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
    place.lose_arena()
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
