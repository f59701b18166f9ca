"""Hints where a disk lies below host memory: prefetch brings sessions up, demotion frees memory."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from hotkv_client import GroupHashes, RequestReport
from hotkv_client.hints import HintClient
from tests.server.support import hashes
from tests.server.tiered import CHAIN, Tiered, tiered
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def place() -> Iterator[Tiered]:
    with tiered() as made:
        made.start_tiered()
        made.connect()
        yield made


def report(place: Tiered, chain: list[bytes], session_id: str) -> None:
    assert place.engine is not None
    block_tokens = place.engine.key_space.hash_block_tokens
    place.engine.session.report_requests(
        [RequestReport(chain, len(chain) * block_tokens, 0, 0, 0.0, session_id=session_id)]
    )
    place.engine.session.ping(10)


def send(place: Tiered, kind: str, blocks: list[bytes] | None = None, **payload: Any) -> str:
    """Sends an envelope of one action, on the blocks of a prompt or a session; its message's
    id."""
    assert place.server is not None
    message = os.urandom(6).hex()
    action = {"action_id": "a", "action_type": kind, "payload": payload}
    with HintClient(place.server.target) as client:
        client.send({"message_id": message, "actions": [action]}, int(bool(blocks)), blocks or ())
    return message


def outcome(place: Tiered, message_id: str) -> dict[str, Any]:
    assert place.server is not None
    with HintClient(place.server.target) as client:
        return client.outcomes(message_id)[0][0]


def in_memory(place: Tiered, chain: list[bytes]) -> int:
    assert place.engine is not None
    return int(place.engine.session.probe(0, chain).sum())


def test_a_prefetch_brings_a_session_up_before_it_resumes(place: Tiered) -> None:
    chain = hashes(CHAIN)
    content = place.fill(chain)
    report(place, chain, "paused")
    place.forget()
    message = send(place, "prefetch", session_id="paused", deadline_s=20)
    wait_for(lambda: outcome(place, message)["status"] != "deferred")
    result = outcome(place, message)
    assert (result["status"], result["done_block_count"]) == ("accepted", CHAIN)
    assert in_memory(place, chain) == CHAIN and place.loads(chain, content)


def test_a_prefetch_of_what_lies_nowhere_is_missing(place: Tiered) -> None:
    report(place, hashes(5), "never stored")
    message = send(place, "prefetch", session_id="never stored", deadline_s=5)
    wait_for(lambda: outcome(place, message)["status"] == "missing")


def test_demotion_frees_memory_of_what_the_disk_has(place: Tiered) -> None:
    chain = hashes(CHAIN)
    content = place.fill(chain)
    report(place, chain, "over")
    message = send(place, "demote", session_id="over")
    assert outcome(place, message)["status"] == "accepted" and not in_memory(place, chain)
    engine = place.engine
    assert engine is not None
    assert engine.session.lookup([GroupHashes(0, chain)]).result(60)[0].all()
    assert place.loads(chain, content)


def test_a_block_that_is_named_twice_is_given_up_once(place: Tiered) -> None:
    chain = hashes(2)
    content = place.fill(chain)
    message = send(place, "demote", [*chain, *chain])
    assert outcome(place, message)["done_block_count"] == 2 and not in_memory(place, chain)
    assert place.loads(chain, content)
