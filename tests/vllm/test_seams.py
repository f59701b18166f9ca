"""Parts of the connector together."""

from dataclasses import replace
from typing import Any

import pytest

from hotkv_client.fence import SHARED_WORDS, Revocations, SharedFence
from tests.vllm.changing_weights import load
from tests.vllm.harness import Engine, prompt

PROMPT = prompt(1, 200)


def connect_again(one: Engine) -> None:
    """As if a handshake had changed during a sleep."""
    told = replace(one.worker.get_handshake_metadata(), companion=((0, 0),))
    one.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): told})


def test_original_weights_after_second_start_differ(updated: Any) -> None:
    one, two = updated(), updated()
    load(one, 7)
    one.fill(PROMPT)
    connect_again(one)
    one.model.load_weights(two.model.state_dict())
    one.generate("changes", prompt(5, 10), 4)
    one.fill(prompt(4, 200))
    spaces = [each.connector._scheduler.cache.session.config.key_space for each in (one, two)]
    assert spaces[0] == spaces[1] and spaces[0].page_format.startswith("H2N32C64:2;")
    assert two.hit(prompt(4, 200)) == 192


def test_second_starts_old_reports_end_nothing(engine: Any, server: Any) -> None:
    engine().generate("before", PROMPT, 1)
    one = engine()
    server.hold = {"store", "load"}
    one.add("loads", PROMPT, 1)
    one.add("a", prompt(3, 200), 1)
    while "a" not in one.finished:
        one.step()
    worker = one.worker._worker
    assert (before := set(worker.stores.active))
    # As if its session had closed.
    worker.stores.fail_all()
    connect_again(one)
    one.add("b", prompt(2, 100), 3)
    one.step()
    assert len(server.cancelled) == 1
    planner = one.connector._scheduler.cache.planner
    assert set(worker.stores.active) and not before & set(worker.stores.active)
    assert len(planner.in_flight) == len(worker.stores)


def test_awaited_word_is_given_to_nobody_else() -> None:
    page = SharedFence()
    first = Revocations([page.place])
    index = first.take()
    page.hold(index)
    assert not page.is_revoked(index)
    second = Revocations([page.place])
    taken = [second.take() for _ in range(SHARED_WORDS)]
    assert page.is_revoked(index) and index not in taken and taken.count(0) == 2
    page.give_back(index)
    assert second.take() == index and not page.is_revoked(index)


def test_rank_without_new_session_stores_nothing_old(
    updated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old session, of the old weights, is not closed yet."""
    one, two = updated(), updated()
    one.fill(PROMPT)
    worker, closing = one.worker._worker, []
    monkeypatch.setattr(worker.rank.session, "close", lambda: closing.append(1))
    monkeypatch.setattr(worker.rank, "begin", lambda: 1 // 0)
    load(one, 7)
    for _ in range(2):
        assert one.hit(prompt(4, 200)) == 0
    assert one.counters["callback_errors"] and closing
    assert two.hit(prompt(4, 200)) == 0 and not worker.stores
