"""Where hotkv has nothing to do it costs next to nothing, and leaves nothing out. Counts calls,
which do not depend on the machine."""

import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hotkv_client
import hotkv_proto
import hotkv_vllm
from hotkv_vllm.metadata import HotKVMetadata
from hotkv_vllm.scheduler.step_planner import StepPlanner
from hotkv_vllm.worker.side import HotKVWorker
from tests.vllm.harness import prompt
from tests.vllm.oracle import check_nothing_left, reports_to
from tests.vllm.tiny import BLOCK_TOKENS

OURS = tuple(str(Path(one.__path__[0])) for one in (hotkv_vllm, hotkv_client, hotkv_proto))
DOUBLES = str(Path(hotkv_client.__path__[0]) / "testing")


def calls_of(run: Callable[[], Any]) -> Counter[str]:
    calls = Counter[str]()

    def count(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS):
            calls[code.co_qualname] += not code.co_filename.startswith(DOUBLES)

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def life(one: Any, name: str, num_tokens: int, answer_tokens: int) -> Counter[str]:
    def run() -> None:
        one.add(name, prompt(sum(map(ord, name)), num_tokens), answer_tokens)
        one.run()

    one.run()
    return calls_of(run)


def test_a_short_request_costs_few_calls(engine: Any, server: Any) -> None:
    one = engine()
    life(one, "first", 10, 1)
    calls = life(one, "short", 10, 1)
    assert calls.total() <= 80, calls.most_common()
    assert (reports_to(server)[-1].prompt_tokens, one.counters["reported_requests"]) == (10, 2)
    check_nothing_left(one)


def test_each_idle_decode_step_costs_few_calls(engine: Any) -> None:
    one = engine(blocks=512, max_num_seqs=64, max_tokens_per_step=2048)
    for index in range(40):
        one.add(f"r{index}", prompt(index, 33), 25)
    one.steps(4)
    calls = calls_of(lambda: one.steps(10))
    assert len(one.scheduler.running) == 40 and calls.total() <= 30 * 10, calls.most_common()


def test_a_check_of_the_weights_leaves_steps_idle(updated: Any) -> None:
    """Each later step repeats the check's result."""
    one = updated()
    one.generate("first", prompt(1, 40), 4)
    one.scheduler.reset_prefix_cache(reset_connector=True)
    one.generate("checks", prompt(2, 40), 12)
    one.add("r", prompt(3, 33), 25)
    one.steps(4)
    assert one.connector._scheduler.sharing.weights.question
    calls = calls_of(lambda: one.steps(10))
    assert one.metas[-1].weights is not None and calls.total() <= 32 * 10, calls.most_common()


# --------------------------------------------------------------------------- nothing is left out


def state(planner: Any) -> str:
    """What a step of a `StepPlanner` may change."""
    requests, cache = planner._requests, planner._sharing.cache
    patience, others = cache.finder.patience, requests.others
    parts = requests, cache.planner, cache.reset, patience, others, requests.failed_loads
    return f"{parts} {requests.room} {planner._sharing} {planner._exactness} {planner._adapters}"


def watch(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Plans quiet steps and runs resting workers' callbacks after all. Counts, as an exception
    would not leave the callback."""
    is_quiet, plan, rests = StepPlanner._is_quiet, StepPlanner.plan, HotKVWorker.rests
    take_report, take_results = HotKVWorker.take_report, HotKVWorker.take_results
    checked, resting = Counter[str](), set[int]()

    def planned(planner: Any, output: Any) -> HotKVMetadata:
        quiet = plan(planner, output)
        if not quiet.is_quiet:
            return quiet
        checked["plans"] += 1
        before = state(planner)
        monkeypatch.setattr(StepPlanner, "_is_quiet", lambda *_: False)
        try:
            full = plan(planner, output)
        finally:
            monkeypatch.setattr(StepPlanner, "_is_quiet", is_quiet)
        checked["left out"] += full != HotKVMetadata(weights=quiet.weights)
        checked["changed"] += before != state(planner)
        return quiet

    def rested(worker: Any, meta: HotKVMetadata) -> bool:
        resting.discard(id(worker))
        if rests(worker, meta):
            resting.add(id(worker))
        return False

    def reported(worker: Any, meta: Any) -> Any:
        found = take_report(worker, meta)
        if id(worker) in resting:
            checked["reports"] += 1
            checked["left out"] += found is not None
        return found

    def ended(worker: Any) -> Any:
        found = take_results(worker)
        checked["left out"] += id(worker) in resting and found != (set(), set())
        return found

    monkeypatch.setattr(StepPlanner, "plan", planned)
    monkeypatch.setattr(HotKVWorker, "rests", rested)
    monkeypatch.setattr(HotKVWorker, "take_report", reported)
    monkeypatch.setattr(HotKVWorker, "take_results", ended)
    return checked


def traffic(one: Any, server: Any, seed: int) -> None:
    chance = random.Random(seed)
    alive: list[str] = []
    for number in range(60):
        match chance.randrange(12):
            case 0:
                server.hold = chance.choice([set(), {"store"}, {"load"}, {"acquire"}])
            case 1:
                server.hold = set()
                server.resume()
            case 2 if alive:
                one.abort(alive.pop(chance.randrange(len(alive))))
            case 3:
                one.scheduler.reset_prefix_cache(reset_connector=chance.random() < 0.5)
            case 4:
                (server.die if server.up else server.come_back)()
            case _:
                name, length = f"r{number}", chance.choice([5, 10, 31, 32, 33, 64, 150, 300])
                one.add(name, prompt(chance.randrange(4), length), chance.choice([1, 2, 20, 40]))
                alive.append(name)
        one.steps(chance.randrange(6))
        alive = [name for name in alive if name not in one.finished]
    server.resume()
    if not server.up:
        server.come_back()
    one.run()
    one.generate("last", prompt(9, 40), 40)


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_a_quiet_step_leaves_nothing_out(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch, seed: int, pipelined: bool
) -> None:
    checked = watch(monkeypatch)
    one = engine(blocks=24, pipelined=pipelined, max_tokens_per_step=128)
    traffic(one, server, seed)
    assert checked["plans"] and checked["reports"], checked
    assert not checked["left out"] and not checked["changed"], checked
    assert "callback_errors" not in one.counters


# ------------------------------------------------------------------------------------ short or not


@pytest.mark.parametrize(
    ("num_tokens", "answer_tokens", "is_short"),
    [
        (10, 1, True),
        (10, BLOCK_TOKENS - 10, True),
        (10, BLOCK_TOKENS - 9, False),
        (BLOCK_TOKENS - 1, 1, True),
        (BLOCK_TOKENS, 1, False),
    ],
)
def test_request_filling_no_block_is_short(
    engine: Any, server: Any, num_tokens: int, answer_tokens: int, is_short: bool
) -> None:
    one = engine()
    one.add("a", prompt(1, num_tokens), answer_tokens)
    assert ("a" in one.connector._scheduler.requests.short) == is_short
    one.run()
    one.generate("reports", prompt(2, 10), 2)
    assert (not server.blocks) == is_short


@pytest.mark.parametrize(
    "more",
    [{"transfer": {"hotkv.session": "chat"}}, {"resumable": True}],
    ids=["hints", "streamed"],
)
def test_request_with_hints_or_input_is_followed(engine: Any, more: Any) -> None:
    one = engine()
    one.add("a", prompt(1, 10), 1, **more)
    assert "a" in one.connector._scheduler.requests.states
