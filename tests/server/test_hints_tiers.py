"""Hints where a disk lies below host memory: prefetch brings sessions up, demotion frees memory."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from hotkv_client import GroupHashes, RequestReport
from hotkv_client.hints import HintClient
from hotkv_client.testing import PagedEngine
from tests.server.support import hashes
from tests.server.tiered import CHAIN, Tiered, tiered
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def place() -> Iterator[Tiered]:
    with tiered() as made:
        made.start_tiered()
        made.connect()
        yield made


def engine(place: Tiered) -> PagedEngine:
    assert place.engine is not None
    return place.engine


def report(place: Tiered, chain: list[bytes], session_id: str) -> None:
    tokens = len(chain) * engine(place).key_space.hash_block_tokens
    said = RequestReport(chain, tokens, 0, 0, 0.0, session_id=session_id)
    engine(place).session.report_requests([said])
    engine(place).session.ping(10)


def settled(
    place: Tiered, kind: str, blocks: list[bytes] | None = None, **payload: Any
) -> dict[str, Any]:
    """Sends an action, on the blocks of a prompt or a session. Returns its outcome in the end."""
    assert place.server is not None
    message, outcomes = os.urandom(6).hex(), list[dict[str, Any]]()
    action = {"action_id": "a", "action_type": kind, "payload": payload}
    with HintClient(place.server.target) as client:
        client.send({"message_id": message, "actions": [action]}, int(bool(blocks)), blocks or ())

        def is_settled() -> bool:
            outcomes[:] = client.outcomes(message)[0]
            return bool(outcomes[0]["status"] != "deferred")

        wait_for(is_settled)
    return outcomes[0]


def in_memory(place: Tiered, chain: list[bytes]) -> int:
    found = engine(place).session.probe(0, chain)
    assert found is not None
    return int(found.sum())


def test_a_prefetch_brings_a_session_up_before_it_resumes(place: Tiered) -> None:
    chain = hashes(CHAIN)
    content = place.fill(chain)
    report(place, chain, "paused")
    place.forget()
    result = settled(place, "prefetch", session_id="paused", deadline_s=20)
    assert (result["status"], result["done_block_count"]) == ("accepted", CHAIN)
    assert in_memory(place, chain) == CHAIN and place.loads(chain, content)
    report(place, hashes(5), "never stored")
    missing = settled(place, "prefetch", session_id="never stored", deadline_s=5)
    assert missing["status"] == "missing"


def test_demotion_frees_memory_of_what_the_disk_has(place: Tiered) -> None:
    chain = hashes(CHAIN)
    content = place.fill(chain)
    report(place, chain, "over")
    assert settled(place, "demote", session_id="over")["status"] == "accepted"
    assert not in_memory(place, chain)
    assert engine(place).session.lookup([GroupHashes(0, chain)]).result(60)[0].all()
    assert place.loads(chain, content)


def test_a_block_that_is_named_twice_is_given_up_once(place: Tiered) -> None:
    chain = hashes(2)
    content = place.fill(chain)
    assert settled(place, "demote", [*chain, *chain])["done_block_count"] == 2
    assert not in_memory(place, chain)
    assert place.loads(chain, content)
