"""Tests warm starts: a new node fetches from a shared Valkey what another uses, by a file or
prompts."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotkv_client.admin import AdminClient
from hotkv_client.command import cli, warm_start
from hotkv_client.command.warm_start import CALL_BLOCKS, _calls, export, fetch_prompts
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.keys import token_block_hashes
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.values import HashList
from hotkv_server.tiers.drive import shared as tier_shared
from hotkv_server.warm_start import book as hottest
from hotkv_server.warm_start.book import Warmth
from hotkv_server.warm_start.drive import WarmStart, unrelated
from tests.core.support import evict, words_of
from tests.server.sharing import CHAIN, SharingNode, node
from tests.server.support import PATIENT, hashes
from tests.tiers.nodes import nodes as tier_nodes
from tests.tiers.valkey_support import Server as Valkey
from tests.tiers.valkey_support import running


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with running(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def nodes(valkey: Valkey) -> Iterator[tuple[SharingNode, SharingNode]]:
    """A node with an engine, and a new one."""
    flags = ("--tiers.valkey.address", f"unix:{valkey.path}", *PATIENT)
    with node() as a, node() as b:
        a.start_sharing(*flags)
        b.start(*flags)
        yield a, b


def run(one: SharingNode, *words: str) -> dict[str, Any]:
    assert one.server is not None
    answer: dict[str, Any] = json.loads(one.server.cli(*words, "--json"))
    return answer


@contextlib.contextmanager
def asking(one: SharingNode) -> Iterator[AdminClient]:
    assert one.server is not None
    with AdminClient(one.server.target) as admin:
        yield admin


def space_of(one: SharingNode) -> dict[str, Any]:
    with asking(one) as admin:
        (space,) = [row["key_space"] for row in admin.key_spaces()]
    return dict(space)


def test_a_new_node_fetches_what_its_sibling_uses(
    nodes: tuple[SharingNode, SharingNode], tmp_path: Path
) -> None:
    """Its events show the blocks before an engine connects."""
    (a, b), file = nodes, tmp_path / "blocks"
    cold, hot = hashes(CHAIN), hashes(CHAIN)
    a.fill(cold)
    content = a.fill(hot)
    for _ in range(3):
        assert a.loads(hot, content)
    assert run(a, "export", str(file))["block_count"] == 2 * CHAIN
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    # Each chain begins at its head, and the hot one comes first.
    named = [one for line in lines[1:] for one in line["hashes"]]
    assert named == [one.hex() for one in (*hot, *cold)]
    gib = CHAIN * 2 * (16 << 10) / (1 << 30)
    assert run(a, "export", str(file), "--gib", str(gib))["block_count"] == CHAIN
    with asking(b) as watcher:
        events = watcher.events(0, 60, tiers=True)
        assert next(events) == ([], 0)
        # The new node has seen no engine of this key space.
        fetched = run(b, "import", str(file), "--wait", "5")
        assert fetched["fetched_block_count"] == CHAIN and fetched["absent_block_count"] == 0
        told: list[dict[str, Any]] = []
        while sum(one["block_count"] for one in told if one["event"] == "stored") < CHAIN:
            told += next(events)[0]
    assert told[0]["event"] == "cleared"
    assert run(b, "import", str(file))["present_block_count"] == CHAIN
    b.start_engine()
    assert b.loads(hot, content)
    assert b.counter("shared_fetched_blocks_total") == CHAIN


@pytest.mark.long
def test_blocks_of_prompts_come_before_their_requests(
    nodes: tuple[SharingNode, SharingNode], tmp_path: Path
) -> None:
    a, b = nodes
    space = space_of(a)
    block_tokens = space["hash_block_token_count"]
    tokens = list(range(7, 7 + CHAIN * block_tokens))
    chain = token_block_hashes(tokens, block_tokens, space["hash_algorithm"], space["hash_seed"])
    shared = hashes(CHAIN)
    content, of_shared = a.fill(chain), a.fill(shared)
    like, prompts = tmp_path / "blocks", tmp_path / "prompts"
    run(a, "export", str(like), "--gib", "0.0000001")
    prompts.write_text(f"[1, 2]\n{[*tokens, 1]}\n\n{[9] * block_tokens}\n")
    words = ("prefetch", "--prompts", str(prompts))
    fetched = run(b, *words, "--like", str(like))
    assert fetched["prompt_count"] == 2 and fetched["fetched_block_count"] == CHAIN
    assert fetched["absent_block_count"] == 1 and fetched["short_prompt_count"] == 1
    # The key space is known now, so `--like` is not needed.
    assert run(b, *words)["present_block_count"] == CHAIN
    # A common prefix is fetched once.
    some = [(b"".join(one), b"") for one in (shared, [*shared, *hashes(1)], shared[:2])]
    with asking(b) as admin:
        answer = admin.prefetch_blocks(space, prompts=some, wait_s=5)
    assert answer["fetched_block_count"] == CHAIN and answer["absent_block_count"] == 1
    b.start_engine()
    assert b.loads(chain, content) and b.loads(shared, of_shared)


def test_without_tiers_it_says_what_is_there() -> None:
    chain = hashes(CHAIN)
    with node() as one, asking(one.start_sharing()) as admin:
        answer = admin.prefetch_blocks(1, [(0, b"".join(chain))], wait_s=1)
        assert answer["absent_block_count"] == CHAIN
        for bad, reason in (
            ({"key_space": 0}, Reason.INVALID_FIELD),
            ({"key_space": 99}, Reason.UNKNOWN_KEY_SPACE),
            ({"groups": []}, Reason.INVALID_FIELD),
            ({"groups": [(7, chain[0])]}, Reason.INVALID_FIELD),
            ({"groups": [(0, b"short")]}, Reason.INVALID_HASH),
            ({"groups": [(0, chain[0])] * 9, "wait_s": 61}, Reason.INVALID_FIELD),
            ({"groups": [], "prompts": [(b"", b"odd")]}, Reason.INVALID_FIELD),
        ):
            asked: dict[str, Any] = {"key_space": 1, "groups": [(0, chain[0])], **bad}
            with pytest.raises(HotKVError) as raised:
                admin.prefetch_blocks(**asked)
            assert raised.value.reason is reason, bad
        for number, size in ((99, 0), (1, -1)):
            with pytest.raises(HotKVError):
                list(admin.export_blocks(number, size))


def test_files_without_end_are_not_read_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warm_start, "_block_tokens", lambda *_: 1)
    with pytest.raises(ValueError, match="/dev/zero:1: a JSON list"):
        fetch_prompts(cast(AdminClient, None), Path("/dev/zero"), 1, 0)
    for words in (["import", "/dev/zero"], ["explain", "@/dev/zero"]):
        assert cli.main([*words, "--target", "unix:/nonexistent"]) == 2
        assert "/dev/zero" in capsys.readouterr().err


def test_no_device_or_link_is_replaced(tmp_path: Path) -> None:
    """Such as /dev/stdout. A link stays, and its target is written."""
    client = Mock(export_blocks=lambda *_: iter([{"hash_byte_count": 8}]))
    os.mkfifo(pipe := tmp_path / "pipe")
    with pytest.raises(ValueError, match="is no file: name a file to write"):
        export(client, pipe, 1, 0)
    assert pipe.is_fifo()
    (link := tmp_path / "link").symlink_to(file := tmp_path / "file")
    export(client, link, 1, 0)
    assert link.is_symlink() and file.read_text()


@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.binary(min_size=8, max_size=8)))),
)
def test_calls_name_all_blocks_in_their_order(groups: list[tuple[int, list[bytes]]]) -> None:
    many = [(index, some * 300) for index, some in groups]
    calls = list(_calls(many))
    assert all(sum(len(packed) for _, packed in call) <= 8 * CALL_BLOCKS for call in calls)
    named = [
        (index, packed[at : at + 8])
        for call in calls
        for index, packed in call
        for at in range(0, len(packed), 8)
    ]
    assert named == [(index, one) for index, some in many for one in some]


@given(st.lists(st.tuples(st.floats(-9, 9), st.integers(1, 50)), max_size=40), st.integers(0, 500))
def test_hottest_blocks_lead_the_sorted_list(
    blocks: list[tuple[float, int]], byte_count: int
) -> None:
    numbers = np.arange(len(blocks), dtype=np.uint32)
    heat = np.array([one for one, _ in blocks], np.float64)
    num_bytes = np.array([one for _, one in blocks], np.int64)
    found = Warmth(numbers, numbers, heat, num_bytes).hottest(byte_count)
    order = sorted(range(len(blocks)), key=lambda at: -blocks[at][0])
    taken, room = [], byte_count or 1 << 60
    for at in order:
        room -= blocks[at][1]
        if room < 0:
            break
        taken.append(at)
    assert found.entries.tolist() == taken


async def test_blocks_of_several_prompts_keep_their_depths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hottest, "PART_ENTRIES", 2)
    monkeypatch.setattr(tier_shared, "PROBE_S", 0.0)
    async with tier_nodes() as (one, other):
        await one.share([0, 1, 2, 10, 11, 30, 40])
        prompts = [HashList(0, words_of(numbers)) for numbers in ([0, 1, 2], [0, 10, 11, 99])]
        late = await WarmStart(other.core, other.tiers).prefetch(1, prompts, 0.0)
        assert (late.num_lower, late.num_absent) == (5, 1), "there was no time to ask for them"
        fetched = await WarmStart(other.core, other.tiers).prefetch(1, prompts, 10.0)
        assert fetched.num_fetched == 5
        index = other.core.space.index
        assert index.depths(index.find(1, 0, words_of([0, 1, 2, 10, 11]))).tolist() == [
            0, 1, 2, 1, 2
        ]  # fmt: skip
        # Neighbours of different chains must not be linked.
        await WarmStart(other.core, other.tiers).prefetch(1, [unrelated(0, words_of([30, 40]))], 10)
        (last,) = index.find(1, 0, words_of([40]))
        assert last and not len(other.core.space.chains.ancestors(int(last), 1))
        evict(other.core, 1, 0, words_of([1, 30, 40]))
        parts = [part async for part in WarmStart(other.core, None).export(1, 4 * SLOT_ALIGN)]
        named = np.concatenate([one.hashes for part in parts for one in part])
        assert np.array_equal(np.sort(named, 0), np.sort(words_of([0, 2, 10, 11]), 0))
        warm = hottest.joined([*hottest.warmth(other.core, 1)])
        evict(other.core, 1, 0, words_of([2, 11]))
        other.put([20])
        assert sum(len(one.hashes) for one in hottest.names(other.core, warm)) == 2
