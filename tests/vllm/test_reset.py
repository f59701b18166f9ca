"""After a reset no lookup finds earlier blocks, and no store brings them back."""

from typing import Any

import pytest

from hotkv_vllm.compat import checks
from hotkv_vllm.compat.events import DeviceClears
from hotkv_vllm.scheduler import reset
from tests.vllm.harness import Engine, prompt
from tests.vllm.specs import full_model, hybrid_model

PROMPT, OTHER = prompt(1, 200), prompt(2, 40)


def resets(one: Engine, **more: Any) -> bool:
    return bool(one.scheduler.reset_prefix_cache(reset_connector=True, **more))


def under_way(one: Engine) -> bool:
    return bool(one.connector._scheduler.cache.reset.under_way)


@pytest.fixture
def filled(engine: Any) -> Any:
    """Has stored PROMPT."""

    def make(**settings: Any) -> Engine:
        one: Engine = engine(**settings)
        one.fill(PROMPT)
        return one

    return make


@pytest.mark.parametrize("model", [full_model, hybrid_model])
def test_reset_empties_the_cache_and_it_fills_again(
    filled: Any, engine: Any, server: Any, model: Any
) -> None:
    red = engine(specs=model(), extra={"tenant": "red"})
    red.generate("a", PROMPT)
    others = set(server.blocks)
    one = filled(specs=model())
    before = set(server.blocks)
    assert resets(one) and set(server.blocks) == others, "another key space keeps its blocks"
    assert one.hit(PROMPT) == 0
    one.fill(OTHER, 1)
    assert before < set(server.blocks) and one.counters["resets"] == 1
    assert engine(specs=model()).hit(PROMPT) == 192


def test_a_reset_of_the_device_is_noticed_once(engine: Any) -> None:
    one, clears = engine(), DeviceClears()
    manager = one.scheduler.kv_cache_manager
    assert not clears.since_last(None) and not clears.since_last(manager)
    one.generate("a", PROMPT)
    assert not clears.since_last(manager)
    assert one.scheduler.reset_prefix_cache()
    assert clears.since_last(manager) and not clears.since_last(manager)


def test_hit_from_before_a_reset_isnt_loaded(filled: Any, server: Any) -> None:
    """The lease still pins its blocks."""
    one = filled()
    one.drop_local()
    server.hold = {"acquire"}
    one.add("w", PROMPT, 4)
    one.steps(2)
    asked = server.count("acquire")
    server.resume()
    assert asked and resets(one)
    one.run()
    assert not server.count("load") and one.counters["resets"] == 1


def test_reset_without_an_answer_is_not_a_success(
    filled: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reset, "RETRY_S", 0.0)
    one = filled(extra={"reset_timeout_s": 0.01})
    server.hold = {"flush"}
    assert not resets(one)
    # Unanswered: blocks are neither loaded nor stored.
    stores = server.count("store")
    assert one.hit(PROMPT) == 0 and server.count("store") == stores
    assert server.count("flush") == 1, "its answer is awaited"
    server.resume()
    assert resets(one)
    one.fill(PROMPT)
    assert one.hit(PROMPT) == 192


@pytest.mark.parametrize("trouble", ["absent", "refused"])
def test_a_reset_that_failed_is_made_good_later(
    filled: Any, server: Any, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """The flush is owed, or repeated."""
    monkeypatch.setattr(reset, "RETRY_S", 0.0)
    one = filled()
    if trouble == "absent":
        server.die(empty=False)
    server.fail_flushes = trouble == "refused"
    assert resets(one) == (trouble == "absent") and server.blocks
    server.come_back()
    if trouble == "refused":
        assert under_way(one) and one.hit(PROMPT) == 0
        server.fail_flushes = False
    one.generate("d", prompt(3, 40), 4)
    assert server.flushes == 1 and not under_way(one)
    assert one.hit(PROMPT) == 0


@pytest.mark.parametrize("how", ["kept", "computed anew", "broken"])
def test_a_request_that_goes_on_over_a_reset(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The request's KV builds on KV from before, and later hits on that.

    how: "kept": vLLM keeps its cache; "computed anew": it empties it; "broken": hotkv's callback
        raises.
    """
    one, is_computed_anew = engine(), how == "computed anew"
    one.add("a", prompt(1, 100), 60)
    one.steps(5)
    with monkeypatch.context() as patch:
        if how == "broken":
            patch.setattr(one.connector._scheduler, "reset_cache", lambda: 1 // 0)
        assert resets(one, reset_running_requests=is_computed_anew) == is_computed_anew
    assert checks.is_device_empty(one.scheduler.kv_cache_manager) == is_computed_anew
    assert bool(server.blocks) == (how == "broken")
    one.add("hits", prompt(1, 200), 2)
    one.run()
    one.generate("b", prompt(4, 10), 2)
    assert len(server.blocks) == (7 if is_computed_anew else 0)
    assert one.outputs["a"] == engine().generate("c", prompt(1, 100), 60)[0]


@pytest.mark.parametrize("how", ["cancelled", "loaded", "on the device"])
def test_a_request_that_loads_during_a_reset(
    filled: Any, engine: Any, server: Any, how: str
) -> None:
    """With a cancelled load all is computed after the reset."""
    one = filled(pipelined=True)
    one.drop_local()
    one.add("other", prompt(5, 10), 15)
    if how == "on the device":
        one.generate("b", PROMPT[:100])
    server.hold = {"load"}
    one.add("a", PROMPT, 60)
    one.steps(2)
    assert server.held
    if how == "loaded":
        server.resume()
        one.step()
    assert not resets(one) and not server.blocks
    server.resume()
    one.run()
    assert one.external["a"] == (192 if how == "loaded" else 0)
    one.generate("reports", prompt(4, 10), 2)
    assert len(server.blocks) == (8 if how == "cancelled" else 0)
    assert one.outputs["a"] == engine().generate("c", PROMPT, 60)[0]


def test_idle_engines_reset_ends_before_next_request(engine: Any, server: Any) -> None:
    """Else the next request would delete what another engine stored since."""
    one, other = engine(), engine()
    server.hold = {"store"}
    one.generate("a", PROMPT)
    server.resume()
    assert resets(one) and not server.blocks and under_way(one)
    one.run()
    assert not under_way(one)
    other.fill(PROMPT)
    one.generate("b", prompt(3, 10))
    assert engine().hit(PROMPT) == 192


def test_late_confirmed_reset_is_not_repeated(engine: Any, server: Any) -> None:
    """A repeated one would delete what another engine stored since."""
    one, other = engine(extra={"reset_timeout_s": 0.01}), engine()
    one.fill(PROMPT)
    server.hold = {"flush"}
    assert not resets(one) and under_way(one)
    server.resume()
    assert server.flushes == 1 and not server.blocks
    other.fill(PROMPT)
    one.generate("b", prompt(3, 10))
    assert not under_way(one) and server.flushes == 1
    assert engine().hit(PROMPT) == 192


def test_tiers_still_pending_a_flush_are_named(
    engine: Any, server: Any, warnings: list[str]
) -> None:
    one = engine()
    server.pending_tiers = ("valkey",)
    assert resets(one) and "not yet in the tiers valkey" in warnings[-1]
