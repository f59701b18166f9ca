"""Tests `explain` and `evict` with the first digits of hashes, and `evict --dry-run`."""

import json
from collections.abc import Callable

import pytest

from demo.processes import Server
from hotkv_client import GroupHashes
from hotkv_client.admin import AdminClient
from hotkv_client.paged_engine import PagedEngine
from tests.server.commands import Run, runner
from tests.server.places import store
from tests.server.support import number_of

HASHES = [
    bytes.fromhex(digits.ljust(64, "7")) for digits in ("abcd12", "abcd1f", "4bcdef", "123456789")
]
BLOCK_BYTES = 2 * 4096


@pytest.fixture
def stocked(own_server: Server, engine: Callable[..., PagedEngine]) -> tuple[Server, PagedEngine]:
    one = engine(own_server.target, model_names=["tiny"])
    store(one, HASHES)
    return own_server, one


@pytest.fixture
def run(stocked: tuple[Server, PagedEngine], capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys, stocked[0].target)


@pytest.mark.parametrize(
    "word", ["4bcd", "4BCDE", HASHES[2].hex(), HASHES[2].hex()[:16], HASHES[2].hex()[:63]]
)
def test_a_unique_prefix_names_the_block(run: Run, word: str) -> None:
    assert "key space 1 (tiny): all 16 of 16 whole-block tokens hit" in run("explain", word)[1]
    assert "evicted 1 block, kept 0" in run("evict", word)[1]
    assert run("blocks")[1].count("tiny") == 3


@pytest.mark.parametrize("command", ["explain", "evict"])
def test_an_ambiguous_prefix_lists_what_it_fits(run: Run, command: str) -> None:
    status, printed, said = run(command, "abcd1")
    assert status == 2 and not printed
    assert said.splitlines() == [
        "hotkv: abcd1 fits several blocks; give more digits:",
        "  abcd127777777777  key space 1 (tiny), group 0, block 0, ready",
        "  abcd1f7777777777  key space 1 (tiny), group 0, block 1, ready",
    ]
    assert run("blocks")[1].count("tiny") == 4


@pytest.mark.parametrize("command", ["explain", "evict"])
def test_an_unknown_prefix_lists_the_closest(run: Run, command: str) -> None:
    status, _, said = run(command, "abcd2")
    assert status == 2
    head, *lines = said.splitlines()
    assert (
        head == "hotkv: no block in the server has a hash that begins with abcd2; with abcd begin:"
    )
    assert [line.split()[0] for line in lines] == ["abcd127777777777", "abcd1f7777777777"]
    status, _, said = run(command, "ffff", "--key-space", "1")
    assert said == (
        "hotkv: no block in key space 1 has a hash that begins with ffff; `hotkv blocks` lists "
        "hashes\n"
    )


@pytest.mark.parametrize("command", ["explain", "evict"])
def test_one_number_is_the_beginning_of_a_hash(run: Run, command: str) -> None:
    assert "123456" in run("explain", "1234")[1]
    status, _, said = run(command, "523280")
    assert status == 2 and "no block in the server has a hash that begins with 523280" in said
    assert "evicted 1 block, kept 0" in run("evict", "123456")[1]


def test_several_numbers_are_tokens(run: Run) -> None:
    assert "shorter than a block" in run("explain", "523280", "4711")[1]
    assert "shorter than a block" in run("explain", "12")[1], "too short for a hash"


def test_absent_whole_hash_is_no_error(run: Run) -> None:
    assert "evicted 0 blocks, kept 0" in run("evict", "f" * 64)[1]
    assert "would evict 0 blocks" in run("evict", "f" * 64, "--group", "7", "--dry-run")[1]


def test_prefix_names_blocks_per_key_space_group(
    stocked: tuple[Server, PagedEngine], engine: Callable[..., PagedEngine], run: Run
) -> None:
    server, _ = stocked
    other = engine(server.target, model="other", windows=(0, 32))
    store(other, [HASHES[0], b"\xee" * 32])
    assert "; with e begin:\n  eeeeeeeeeeeeeeee  key space" in run("evict", "efff")[2]
    with AdminClient(server.target) as admin:
        number = number_of(admin, "other")
    assert "would evict 2 blocks" in run("evict", "abcd12", "--dry-run")[1]
    assert "would evict 0 blocks" in run("evict", HASHES[0].hex(), "--group", "1", "--dry-run")[1]
    assert "evicted 1 block" in run("evict", "abcd12", "--key-space", str(number))[1]
    assert "evicted 1 block" in run("evict", HASHES[0].hex())[1]


def test_dry_run_names_victims_and_drops_nothing(
    stocked: tuple[Server, PagedEngine], run: Run
) -> None:
    _, one = stocked
    one.session.acquire("held", [GroupHashes(0, HASHES[:1])]).result(60)
    for words in (["--all"], [one_hash.hex()[:12] for one_hash in HASHES]):
        _, printed, _ = run("evict", *words, "--dry-run")
        assert printed == (
            "would evict 3 blocks (24.0 KiB) and keep 1 pinned or being written; nothing "
            "was dropped\n"
        )
    said = json.loads(run("evict", "--all", "--dry-run", "--json")[1])
    assert said["evicted_byte_count"] == 3 * BLOCK_BYTES
    assert run("blocks")[1].count("tiny") == 4
    done = json.loads(run("evict", "--all", "--json")[1])
    counts = "evicted_block_count", "kept_block_count"
    assert [done[name] for name in counts] == [said[name] for name in counts] == [3, 1]
