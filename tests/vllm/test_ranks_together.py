"""What vLLM's aggregator makes of ranks, and the scheduler side of that."""

import functools
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput

from hotkv_vllm.identity import ranks, rekeying
from hotkv_vllm.identity.ranks import RankNote
from hotkv_vllm.metadata import HotKVHandshake
from hotkv_vllm.worker import rank_loads, rank_stores
from tests.doubles.fake import FakeServer
from tests.vllm.engine_core import Executor
from tests.vllm.harness import prompt
from tests.vllm.oracle import answer_of, audit, check_nothing_left
from tests.vllm.ranked import ContextRankedEngine, RankedEngine
from tests.vllm.specs import full_model, full_spec, hybrid_model, states_and_full_model

PROMPT = prompt(1, 200)
USABLE = 192
Ranked = Callable[..., RankedEngine]
BOTH_MODELS = pytest.mark.parametrize("model", [full_model, hybrid_model])


@pytest.fixture
def ranked(make: Any) -> Ranked:
    return functools.partial(make, RankedEngine)


def settle(server: FakeServer, kind: str, rank: int) -> int:
    """A transfer's name ends with its rank."""
    mine = [one for one in server.held if one[0] == kind and one[1].endswith(f"-k{rank}")]
    later = [one for one in server.held if one not in mine]
    server.held = mine
    num_settled = server.settle()
    server.held += later
    return num_settled


def outputs_of(one: RankedEngine) -> list[KVConnectorOutput]:
    given: list[KVConnectorOutput] = []
    aggregate = one.aggregator.aggregate

    def told(outputs: Any) -> Any:
        joined = aggregate(outputs)
        given.append(joined.kv_connector_output)  # type: ignore[union-attr]
        return joined

    one.aggregator.aggregate = told  # type: ignore[method-assign]
    return given


@pytest.mark.parametrize(("num_ranks", "stages"), [(2, False), (2, True), (3, True)])
@BOTH_MODELS
def test_what_ranks_report_is_summed(
    ranked: Ranked, engine: Any, server: FakeServer, model: Any, num_ranks: int, stages: bool
) -> None:
    first, one = (ranked(specs=model(), num_ranks=num_ranks, stages=stages) for _ in range(2))
    given = outputs_of(one)
    assert first.fill(PROMPT) == answer_of(PROMPT, 4)
    assert one.generate("b", PROMPT, 4) == (answer_of(PROMPT, 4), USABLE)
    found = audit(server, [first, one])
    assert found.num_stored and found.num_cached
    lone = engine(specs=model())
    lone.fill(PROMPT)
    assert first.counters["store_bytes"] == num_ranks * lone.counters["store_bytes"]
    for name in ("stored_blocks", "stores"):
        assert first.counters[name] == lone.counters[name], name
    finished = [output.finished_recving for output in given if output.finished_recving]
    assert finished == [{"b"}] and one.counters["loads"] == 1
    for output in given:
        assert not output.invalid_block_ids and not output.failed_recving
        assert not output.finished_sending


@pytest.mark.parametrize("model", [full_model, states_and_full_model])
def test_ranks_share_out_tokens_of_a_block(make: Any, model: Any) -> None:
    def specs() -> dict[str, Any]:
        full = full_spec()
        found = model().items()
        return {name: replace(one, dcp_sharded=True) if one == full else one for name, one in found}

    first, one = (make(ContextRankedEngine, specs=specs()) for _ in range(2))
    assert first.fill(PROMPT) == answer_of(PROMPT, 4)
    assert one.generate("b", PROMPT, 4) == (answer_of(PROMPT, 4), USABLE)


@pytest.mark.parametrize("stages", [False, True], ids=["tensor", "pipeline"])
@BOTH_MODELS
def test_ranks_that_lag_at_random(
    ranked: Ranked, server: FakeServer, model: Any, stages: bool
) -> None:
    """Transfers end differently in each rank."""
    dice = random.Random(f"{model.__name__}{stages}")
    blocks = 48 if model is hybrid_model else 20
    engines = [
        ranked(specs=model(), stages=stages, blocks=blocks, max_tokens_per_step=128)
        for _ in range(2)
    ]
    server.hold, server.spoil_loads = {"load", "store"}, True
    asked: list[tuple[RankedEngine, str, list[int]]] = []
    for turn in range(60):
        one, name = dice.choice(engines), f"r{turn}"
        tokens = prompt(dice.randrange(2), dice.randrange(20, 250))
        asked.append((one, name, tokens))
        one.add(name, tokens, dice.randrange(1, 30))
        for _ in range(dice.randrange(6)):
            dice.choice(engines).step()
            server.fail_loads, server.fail_stores = dice.random() < 0.4, dice.random() < 0.1
            settle(server, dice.choice(("load", "store")), dice.randrange(2))
        if dice.random() < 0.2:
            other, running, _ = dice.choice(asked)
            other.abort(running)
        if dice.random() < 0.3:
            one.scheduler.reset_prefix_cache()
    server.hold, server.fail_loads, server.fail_stores = set(), False, False
    end_all(server, engines)
    for one, name, tokens in asked:
        if one.finished.get(name) == "length":
            assert one.outputs[name] == answer_of(tokens, one.requests[name].max_tokens)
    found = audit(server, engines)
    assert found.num_stored > 10 and found.num_cached > 10
    assert not server.leases and not server.writes.leases
    assert sum(one.counters.get("failed_loads", 0) for one in engines)
    assert any(one.preemptions for one in engines)
    assert not any("callback_errors" in one.counters for one in engines)


def end_all(server: FakeServer, engines: list[RankedEngine]) -> None:
    for one in engines:
        server.settle()
        one.run()
        one.generate("end", prompt(9, 40), 2)


# ----------------------------------------------------------------------------- steps that fail


@pytest.mark.parametrize("repeats", [1, 3])
def test_hung_loads_blocks_stay_held_over_failures(
    ranked: Ranked, server: FakeServer, monkeypatch: pytest.MonkeyPatch, repeats: int
) -> None:
    """vLLM joins a failed step's outputs with the next; rank 0 repeats that it is done."""
    monkeypatch.setattr(rank_loads, "CANCEL_GRACE_S", 0.0)
    ranked().fill(PROMPT)
    one = ranked(extra={"load_timeout_s": 0.0, "store_timeout_s": 0.0})
    pool, quarantine = one.scheduler.kv_cache_manager.block_pool, quarantine_of(one)
    before = pool.get_num_free_blocks()
    server.hold, server.ack_cancels = {"load"}, False
    one.add("a", PROMPT, 4)
    while len(server.held) < 2:
        one.step()
    server.hold = set()
    while not quarantine.held:
        one.step()
    settle(server, "load", 0)
    one.run()
    for turn in range(repeats):
        one.add(f"failing {turn}", prompt(20 + turn, 40), 8)
        one.steps(2)
        one.is_failing = True
        one.step()
    assert one.generate("b", prompt(30, 400), 8)[0] == answer_of(prompt(30, 400), 8)
    assert quarantine.num_blocks == 6 and pool.get_num_free_blocks() == before - 6
    settle(server, "load", 1)
    end_all(server, [one])
    check_nothing_left(one)


def quarantine_of(one: RankedEngine) -> Any:
    return one.connector._scheduler.requests.loads.quarantine


@pytest.mark.examples
@BOTH_MODELS
@given(seed=st.integers(0, 1 << 16))
def test_failed_steps_change_no_answer_and_leave_nothing(model: Any, seed: int) -> None:
    """`test_ranks_that_lag_at_random`, with hung loads and failing ranks."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(rank_loads, "CANCEL_GRACE_S", 0.0)
        patch.setattr(rekeying, "PATIENCE_S", 60.0)
        server = FakeServer()
        # No revoked store ends, so each wait takes the whole time.
        patch.setattr(rank_stores, "FENCE_GRACE_S", 0.0)
        extra = {"load_timeout_s": 0.0, "store_timeout_s": 0.05}
        one = RankedEngine(server, Path(folder), patch, specs=model(), extra=extra)
        run_with_failures(server, one, random.Random(seed))
        one.shutdown()


def run_with_failures(server: FakeServer, one: RankedEngine, dice: random.Random) -> None:
    server.hold, server.spoil_loads = {"load", "store"}, True
    server.ack_cancels = False
    asked = []
    for turn in range(24):
        name, tokens = f"r{turn}", prompt(dice.randrange(2), dice.randrange(20, 250))
        asked.append((name, tokens))
        one.add(name, tokens, dice.randrange(1, 9))
        for _ in range(dice.randrange(6)):
            one.is_failing = dice.random() < 0.2
            one.step()
            settle(server, dice.choice(("load", "store")), dice.randrange(2))
    one.is_failing = False
    server.resume()
    end_all(server, [one])
    for name, tokens in asked:
        if one.finished.get(name) == "length":
            assert one.outputs[name] == answer_of(tokens, one.requests[name].max_tokens)
    audit(server, [one])
    check_nothing_left(one)
    stores = [call for kind, call in server.calls if kind == "store"]
    assert one.counters.get("stored_blocks", 0) <= len(stores) * 16


Handshakes = dict[tuple[int, int], Any]
STAGES = [(0, 0), (1, 0), (2, 0)]


def other_weights(found: Handshakes) -> Handshakes:
    key_space = replace(found[2, 0].key_space, weights_identity="others")
    return found | {(2, 0): replace(found[2, 0], key_space=key_space)}


CHANGES: list[tuple[Callable[[Handshakes], Handshakes], str]] = [
    (lambda found: found, ""),
    (lambda found: dict(reversed(found.items())), ""),
    (lambda found: {place: found[place] for place in STAGES[:2]}, "2 of 3 ranks have said"),
    (lambda found: {place: found[place] for place in STAGES[1:]}, "2 of 3 ranks have said"),
    (lambda found: found | {(1, 0): HotKVHandshake(None, "no room")}, "no room"),
    (other_weights, "do not agree"),
    (lambda found: found | {(1, 0): replace(found[1, 0], host="elsewhere")}, "different machines"),
    # Another connector's.
    (lambda found: found | {(3, 0): object()}, ""),
]


def test_disabled_rank_tells_others_at_wake_up(
    ranked: Ranked, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, reasons = ranked(), []

    def agree(note: RankNote, *more: Any) -> Any:
        reasons.append(note.why_off)
        return one._agree(note, *more)

    monkeypatch.setattr(ranks, "agree", agree)
    off = [*one.each_worker()][1]._worker
    off.rank.turn_off("it has no room")
    Executor(one).sleep(1)
    Executor(one).wake_up(None)
    assert reasons == ["", "it has no room"]
    assert off.rank.session is None and off.rank.memory is None


def test_handshakes_of_a_pipelines_stages(ranked: Ranked, warnings: list[str]) -> None:
    """hotkv is off, with a warning, if one is missing or contradicts."""
    one = ranked(num_ranks=3, stages=True)
    handshakes = one.handshakes()
    assert [handshake.rank for handshake in handshakes.values()] == [0, 1, 2]
    for change, words in CHANGES:
        warnings.clear()
        connector: Any = KVConnectorFactory.create_connector(
            one.vllm_config, KVConnectorRole.SCHEDULER, one.kv_config
        )
        connector.set_xfer_handshake_metadata_pp_aware(change(dict(handshakes)))
        assert (connector._scheduler.cache is None) == bool(words)
        assert not words or (words in warnings[-1] and "hotkv is off" in warnings[-1]), warnings
        connector.shutdown()
