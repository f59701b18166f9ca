"""vLLM's reset of external caches: what was computed before is found nowhere afterwards, and no
store under way brings it back."""

from typing import Any

import pytest

from hotkv_vllm.scheduler import reset
from tests.vllm.harness import prompt
from tests.vllm.specs import full_model, hybrid_model

PROMPT = prompt(1, 200)
RESET = {"reset_connector": True}


def keys(server: Any) -> set[Any]:
    return set(server.blocks)


@pytest.mark.parametrize("model", [full_model, hybrid_model])
def test_reset_empties_the_cache_and_it_fills_again(engine: Any, server: Any, model: Any) -> None:
    one = engine(specs=model())
    answer, _ = one.generate("a", PROMPT, 4)
    one.generate("b", prompt(2, 40))
    before = keys(server)
    assert one.scheduler.reset_prefix_cache(**RESET) and not server.blocks
    assert one.generate("c", PROMPT, 4) == (answer, 0)
    one.generate("d", prompt(2, 40))
    assert keys(server) == before and one.counters["resets"] == 1
    assert engine(specs=model()).generate("e", PROMPT, 4)[1] == 192


def test_other_key_spaces_keep_their_blocks(engine: Any, server: Any) -> None:
    blue, red = engine(extra={"tenant": "blue"}), engine(extra={"tenant": "red"})
    blue.generate("a", PROMPT)
    red.generate("b", PROMPT)
    assert blue.scheduler.reset_prefix_cache(**RESET)
    assert {space for space, _, _ in server.blocks} == {
        red.connector._scheduler.cache.session.space
    }


def test_reset_without_an_answer_is_not_a_success(engine: Any, server: Any) -> None:
    one = engine(extra={"reset_timeout_s": 0.01})
    answer, _ = one.generate("a", PROMPT, 4)
    one.generate("b", prompt(2, 10))
    server.hold = {"flush"}
    assert not one.scheduler.reset_prefix_cache(**RESET)
    # Until a flush was answered nothing is taken from the cache, nor put there.
    stores = server.count("store")
    assert one.generate("c", PROMPT, 4) == (answer, 0) and server.count("store") == stores
    server.hold = set()
    server.settle()
    assert one.scheduler.reset_prefix_cache(**RESET)
    assert one.generate("d", PROMPT, 4) == (answer, 0)
    one.generate("e", prompt(2, 10))
    one.drop_local()
    assert one.generate("f", PROMPT, 4) == (answer, 192)


@pytest.mark.parametrize("trouble", ["absent", "refused"])
def test_a_reset_that_failed_is_made_good_later(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """Without a server the reset is a success: nothing can be loaded until the flush that is owed
    was answered."""
    monkeypatch.setattr("hotkv_vllm.scheduler.reset.RETRY_S", 0.0)
    one = engine()
    answer, _ = one.generate("a", PROMPT, 4)
    one.generate("b", prompt(2, 10))
    if trouble == "absent":
        server.die(empty=False)
    server.fail_flushes = trouble == "refused"
    assert one.scheduler.reset_prefix_cache(**RESET) == (trouble == "absent") and server.blocks
    assert one.connector._scheduler.cache.reset.under_way
    server.come_back()
    if trouble == "refused":
        assert one.generate("c", PROMPT, 4) == (answer, 0)
        one.drop_local()
        server.fail_flushes = False
    one.generate("d", prompt(3, 40), 4)
    assert server.flushes == 1 and not one.connector._scheduler.cache.reset.under_way
    assert one.generate("e", PROMPT, 4) == (answer, 0)


@pytest.mark.parametrize("pipelined", [False, True], ids=["sync", "async"])
def test_stores_under_way_do_not_bring_old_blocks_back(
    engine: Any, server: Any, pipelined: bool
) -> None:
    """A store that the server hears of after the flush: it is ended, and a second flush takes what
    it brought."""
    one = engine(pipelined=pipelined)
    server.late = {"store"}
    one.generate("a", PROMPT, 1)
    planner = one.connector._scheduler.cache.planner
    assert len(planner.in_flight)
    held, server.held = server.held, []
    assert one.scheduler.reset_prefix_cache(**RESET)
    for kind, name, future, act in held:
        future.set_result(act())
        assert (kind, bool(name)) == ("store", True)
    assert server.blocks and one.connector._scheduler.cache.reset.under_way
    old = keys(server)
    server.late = set()
    one.generate("b", prompt(2, 100), 4)
    assert not one.connector._scheduler.cache.reset.under_way and not old & keys(server)
    one.generate("c", prompt(4, 10), 1)
    one.drop_local()
    assert one.generate("d", PROMPT)[1] == 0


def test_a_hung_store_is_ended_after_the_reset(engine: Any, server: Any) -> None:
    one = engine(extra={"store_timeout_s": 0.05})
    server.hold = {"store"}
    one.generate("a", PROMPT, 1)
    assert one.scheduler.reset_prefix_cache(**RESET)
    one.generate("b", prompt(2, 10), 3)
    assert (
        server.count("cancel") == 1
        and not one.connector._scheduler.cache.reset.under_way
        and not server.blocks
    )


def test_tails_that_wait_for_the_next_step_are_dropped(engine: Any, server: Any) -> None:
    one = engine(pipelined=True)
    one.add("a", prompt(3, 60), 5)
    planner = one.connector._scheduler.cache.planner
    while not planner.tails.waiting:
        one.step()
    assert one.scheduler.reset_prefix_cache(**RESET) and not planner.tails.waiting
    one.generate("b", prompt(4, 10), 3)
    assert not server.blocks


def test_a_request_that_goes_on_over_a_reset_stores_nothing_more(engine: Any, server: Any) -> None:
    """vLLM did not empty its own cache, so it builds on KV from before."""
    one = engine()
    one.add("a", prompt(1, 100), 60)
    for _ in range(5):
        one.step()
    assert not one.scheduler.reset_prefix_cache(**RESET) and not server.blocks
    one.run()
    one.generate("b", prompt(4, 10), 2)
    assert not server.blocks


def test_a_request_that_is_computed_anew_after_the_reset_is_stored(
    engine: Any, server: Any
) -> None:
    one = engine()
    one.add("a", prompt(1, 100), 60)
    for _ in range(5):
        one.step()
    assert (
        one.scheduler.reset_prefix_cache(reset_running_requests=True, **RESET) and not server.blocks
    )
    one.run()
    one.generate("b", prompt(4, 10), 2)
    assert (
        len(server.blocks) == 4
        and one.outputs["a"] == engine().generate("c", prompt(1, 100), 60)[0]
    )


def test_a_load_under_way_is_given_up(engine: Any, server: Any) -> None:
    answer, _ = engine().generate("a", PROMPT, 4)
    one = engine()
    server.hold = {"load"}
    one.add("b", PROMPT, 4)
    for _ in range(4):
        one.step()
    assert not one.scheduler.reset_prefix_cache(**RESET)
    one.run()
    assert (
        one.outputs["b"] == answer
        and server.count("cancel") == 1
        and one.counters["failed_loads"] == 1
    )
    assert not server.leases and not server.blocks


def test_leases_are_given_back(engine: Any, server: Any) -> None:
    engine().generate("a", PROMPT, 4)
    one = engine()
    server.hold = {"acquire"}
    one.add("b", PROMPT, 4)
    one.step()
    assert one.scheduler.reset_prefix_cache(**RESET)
    server.hold = set()
    server.settle()
    one.run()
    assert one.external["b"] == 0 and not server.leases


def test_reset_of_an_engine_without_hotkv_is_a_success(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotkv_vllm.compat import Unsupported, kv_groups

    monkeypatch.setattr(
        kv_groups, "cache_groups", lambda *_: (_ for _ in ()).throw(Unsupported("told to"))
    )
    assert engine().scheduler.reset_prefix_cache(**RESET)


def test_a_reset_that_breaks_is_not_a_success_and_is_made_good(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of before is loaded while the server has not flushed it."""
    one = engine()
    answer, _ = one.generate("a", PROMPT, 4)
    one.generate("b", prompt(2, 10))
    monkeypatch.setattr(one.connector._scheduler, "reset_cache", lambda: 1 // 0)
    assert not one.scheduler.reset_prefix_cache(**RESET) and server.blocks
    one.drop_local()
    assert one.generate("c", PROMPT, 4) == (answer, 0)
    assert server.flushes == 1


def test_tiers_that_a_flush_is_not_in_yet_are_named(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(reset.logger, "warning", lambda text, *words: said.append(text % words))
    one = engine(specs=full_model())
    server.pending_tiers = ("valkey",)
    assert one.scheduler.reset_prefix_cache(**RESET)
    (pending,) = [text for text in said if "emptied" in text]
    assert "not yet in the tiers valkey" in pending
