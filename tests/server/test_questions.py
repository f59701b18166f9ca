"""Tests `check_blocks`, by which a router asks which blocks of a prompt are cached. Dynamo
defines its format."""

import asyncio
import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from demo.processes import Server, runtime_folder
from hotkv_client import BlockResult, BlockRun
from hotkv_client.admin import AdminClient
from hotkv_proto.blocks import RunContent
from hotkv_server.events import questions
from hotkv_server.events.capability import EventsCapability
from hotkv_server.events.contents import Contents
from hotkv_server.events.drive import StoredEvent
from hotkv_server.events.questions import PromptIndex
from hotkv_server.monitoring.http_endpoint import ANSWER_TIMEOUT_S, MAX_BODY_BYTES
from hotkv_server.settings.outlets import EventSettings
from hotkv_server.tiers.drive import breaker
from tests.core.support import words_of
from tests.doubles.memory_tier import MemoryStore
from tests.server.support import FULL, PATIENT, WINDOW, GroupsEngine, hashes, http_port
from tests.support.waiting import WAIT_S, wait_for
from tests.tiers.nodes import Node, SharedNode, made

TOKENS = list(range(100, 228))
"""Eight blocks."""
DYNAMO_HASHES = [
    xxhash.xxh3_64_intdigest(np.array(TOKENS[at : at + 16], "<u4").tobytes(), 1337)
    for at in range(0, 128, 16)
]
"""In Dynamo 1.6.1, `compute_block_hash_for_seq(TOKENS, 16)` begins with 10823191264391160519."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with runtime_folder(128 << 20) as folder:
        flags = ("--events.answers", "true", *PATIENT)
        disk = ("--tiers.disk.path", str(folder / "disk"), "--tiers.disk.bytes", "64MiB")
        with Server(folder, "16MiB", *flags, *disk) as running:
            running.wait_ready()
            yield running


@pytest.fixture(scope="module", autouse=True)
def _questions_read_on() -> Iterator[None]:
    """Also on a busy machine, `PromptIndex.find` has time for all new contents."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(questions, "UPDATE_S", 60.0)
        yield


def ask(server: Server, body: Any, query: str = "?model=m") -> tuple[int, Any]:
    """(HTTP status, ranges or error). `body`: hashes, or raw bytes; None makes a GET."""
    data = body if isinstance(body, bytes) else json.dumps({"block_hashes": body}).encode()
    url = f"http://127.0.0.1:{http_port(server)}/api/v1/check_blocks{query}"
    request = urllib.request.Request(url, None if body is None else data)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, json.loads(answer.read())["ranges"]
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def wait_found(
    server: Server, body: list[int], ranges: list[list[int]], query: str = "?model=m"
) -> None:
    """Asks again, as each call reads new contents for a bounded time."""
    wait_for(lambda: ask(server, body, query) == (200, ranges))


def test_a_prompt_is_found_where_it_lies(server: Server) -> None:
    with closing(GroupsEngine(server.target, (FULL, WINDOW), "m")) as engine:
        stored = hashes(8)
        for first, end in ((0, 5), (6, 8)):
            run = BlockRun(
                0,
                stored[first:end],
                np.arange(end - first, dtype=np.int32),
                parent_hash=stored[first - 1] if first else b"",
                depth=first,
                token_ids=TOKENS[16 * first : 16 * end],
            )
            assert (engine.store(run).results[0] == BlockResult.STORED).all()
        # Without the tokens of block 5, no later prefix can be found.
        wait_found(server, DYNAMO_HASHES, [[0, 5]])
        run = BlockRun(
            0, stored[5:], np.arange(3, dtype=np.int32), stored[4], 5, token_ids=TOKENS[80:]
        )
        engine.store(run)
        wait_found(server, DYNAMO_HASHES[:7], [[0, 6]])
        assert ask(server, [1, *DYNAMO_HASHES]) == (200, [])
        assert ask(server, DYNAMO_HASHES, "?model=other") == (200, [])
        assert ask(server, DYNAMO_HASHES, "?model=m&block_size=32") == (200, [])
        wait_for(lambda: server.counter("tier_demoted_blocks_total") == 8)
        with AdminClient(server.target) as admin:
            admin.evict(everything=True)
            known: dict[int, list[int]] = {}
            for events, lost in admin.events(0, 60, tiers=True, state=True):
                for one in events:
                    assert (one["event"], one["medium"]) == ("stored", "DISK") and not lost
                    known[one["depth"]] = one["token_ids"]
                if sum(map(len, known.values())) == len(TOKENS):
                    break
            assert [token for at in sorted(known) for token in known[at]] == TOKENS
        wait_found(server, DYNAMO_HASHES, [[0, 6]], "?model=m&block_size=16")
        engine.session.flush().result(60)
        assert ask(server, DYNAMO_HASHES) == (200, [])


@pytest.mark.parametrize(
    ("body", "query", "status", "named"),
    [
        (None, "?model=m", 405, ""),
        ([1], "/more?model=m", 405, ""),
        ([1], "", 400, "model"),
        ([1], "?model=m&block_size=x", 400, "block_size"),
        ([-1], "?model=m", 400, "block_hashes"),
        ([1 << 64], "?model=m", 400, "block_hashes"),
        (["1"], "?model=m", 400, "block_hashes"),
        ("1", "?model=m", 400, "block_hashes"),
        (b"{", "?model=m", 400, "block_hashes"),
        (b"[]", "?model=m", 400, "block_hashes"),
        ([1] * 131_073, "?model=m", 400, "block_hashes"),
        (b" " * MAX_BODY_BYTES, "?model=m", 400, "block_hashes"),
        (b" " * (MAX_BODY_BYTES + 1), "?model=m", 413, "bytes"),
        (b" " * (32 << 20), "?model=m", 413, "bytes"),
    ],
)
def test_a_wrong_question_is_refused(
    server: Server, body: Any, query: str, status: int, named: str
) -> None:
    got, text = ask(server, body, query)
    assert got == status and named in text
    assert ask(server, [], "?model=m") == (200, [])


RUNS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 5), st.integers(1, 3), st.sampled_from(["", "a"])),
    max_size=8,
)


@given(RUNS)
def test_blocks_whose_prefix_was_stored_are_found(
    runs: list[tuple[int, int, int, str]],
) -> None:
    """The prompts differ only in their first block."""
    contents = Contents(None, 1 << 20, lambda *_: np.zeros(0, np.bool_))
    index = PromptIndex(contents)
    stored: set[tuple[int, int, str]] = set()
    for prompt, first, count, adapter in runs:
        numbers = range(first, first + count)
        tokens = [100 * at + (prompt if at == 0 else 7) for at in numbers for _ in range(4)]
        salt = 1000 * prompt + (500 if adapter else 0)
        contents.keep(
            b"k" * 32,
            StoredEvent(
                0,
                0,
                words_of([salt + at for at in numbers]),
                words_of([salt + first - 1])[0] if first else None,
                first,
                RunContent(np.array(tokens, np.int32), adapter, ((adapter,),) * count)
                if adapter
                else RunContent(np.array(tokens, np.int32)),
            ),
        )
        stored |= {(prompt, at, adapter) for at in numbers}
    for adapter in ("", "a"):
        for prompt in range(2):
            seed = 1337 + (xxhash.xxh3_64_intdigest(adapter.encode()) if adapter else 0)
            asked = [
                xxhash.xxh3_64_intdigest(
                    np.array([100 * at + (prompt if at == 0 else 7)] * 4, "<u4").tobytes(),
                    seed % (1 << 64),
                )
                for at in range(8)
            ]
            words, known = index.find(b"k" * 32, 0, asked)
            whole = 0
            while (prompt, whole, adapter) in stored:
                whole += 1
            salt = 1000 * prompt + (500 if adapter else 0)
            assert known.tolist() == [at < whole for at in range(8)]
            assert np.array_equal(words[:whole], words_of(range(salt, salt + whole)))


FINGERPRINT = b"k" * 32


def prompt_index(num_blocks: int) -> PromptIndex:
    """An index of TOKENS, with an event for each block."""
    contents = Contents(None, 1 << 20, lambda *_: np.zeros(0, np.bool_))
    for at in range(num_blocks):
        tokens = RunContent(np.array(TOKENS[16 * at : 16 * at + 16], np.int32))
        parent = words_of([at - 1])[0] if at else None
        contents.keep(FINGERPRINT, StoredEvent(0, 0, words_of([at]), parent, at, tokens))
    return PromptIndex(contents)


def test_a_salted_block_is_not_found() -> None:
    index = prompt_index(0)
    tokens = RunContent(np.array(TOKENS[:32], np.int32), "", (None, ("salt",)))
    index._contents.keep(FINGERPRINT, StoredEvent(0, 0, words_of([1, 2]), None, 0, tokens))
    assert index.find(FINGERPRINT, 0, DYNAMO_HASHES[:2])[1].tolist() == [True, False]


Ask = Callable[[], Awaitable[Any]]


def asking(one: Node) -> Ask:
    """Stores the tokens of two blocks, for which the result asks."""
    events = EventsCapability(one, EventSettings())  # type: ignore[arg-type]
    events._settings = EventSettings(answers=True)
    key_space = one.core.key_space(1)
    events.key_space_added(1, key_space, ())
    tokens = RunContent(np.array(TOKENS[:32], np.int32))
    run = StoredEvent(1, 0, words_of([1, 2]), None, 0, tokens)
    events._contents.keep(key_space.fingerprint, run)
    return lambda: events.check_blocks(key_space.model, 16, DYNAMO_HASHES[:2])


@contextlib.asynccontextmanager
async def answering() -> AsyncIterator[tuple[SharedNode, Ask]]:
    """A node with a shared tier, and `asking` of it."""
    one = SharedNode(MemoryStore(places=False), 10.0)
    ask_for_two = asking(one)
    await one.start()
    try:
        yield one, ask_for_two
    finally:
        one.tier.faults.is_hung = False
        await one.tiers.close()


async def test_disk_that_is_down_shows_routers_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(breaker, "RETRY_S", 3600.0)
    async with made() as one:
        ask_for_two = asking(one)
        await one.lie_below([1, 2])
        assert (await ask_for_two()).all() and all(one.in_lower_tiers([1, 2]))
        one.tier.faults.problem = "gone"
        assert one.below.breaker.take_turn()
        assert not (await ask_for_two()).any() and not any(one.in_lower_tiers([1, 2]))
        one.tier.faults.problem = ""


async def test_hung_shared_tier_delays_no_http_answer() -> None:
    async with answering() as (one, ask_for_two):
        one.put([1])
        one.tier.faults.is_hung = True
        times_s = list[float]()
        # The shortest time counts, as a busy machine delays some.
        while not times_s or (min(times_s) > ANSWER_TIMEOUT_S - 0.5 and len(times_s) < 5):
            begun_s = time.monotonic()
            found = await asyncio.wait_for(ask_for_two(), WAIT_S)
            times_s.append(time.monotonic() - begun_s)
            assert found.tolist() == [True, False]
        assert min(times_s) <= ANSWER_TIMEOUT_S - 0.5


async def test_key_space_forgotten_in_question_has_nothing() -> None:
    async with answering() as (one, ask_for_two):
        one.core.close_session(one.number, 0.0)
        asked = asyncio.ensure_future(ask_for_two())
        await asyncio.sleep(0)
        assert one.core.catalog.forget(1)
        assert not (await asked).any()
