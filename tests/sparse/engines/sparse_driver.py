"""`engine_driver` with commands for sparse decode.

select_always: select even if the budget covers the context.
rewrite_always: rewrite also tables that leave out no block.
break_from_now: selections raise.
pool: sketches built per layer, and how many differ from their pages. lose (steps): report bytes in
    host memory as lost after so many steps. move (every): in such steps, move running requests' old
    blocks to host memory.
compare_rows: compare rows that select with those that count as inexact.
called: functions of these modules that requests call, and the number of steps.
break_once: `name` raises once after so many steps.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import engine_driver

from hotkv_sparse.vllm.cpu import worker as cpu_worker


def _worker() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return _first(get_kv_transfer_group())._worker.companion.worker


def _first(connector: Any) -> Any:
    return getattr(connector, "sub_connectors", [connector])[0]


def _scheduler_side(llm: Any) -> Any:
    return _first(llm.llm_engine.engine_core.engine_core.scheduler.connector)._scheduler


engine_driver._scheduler_side = _scheduler_side
cpu_worker.RECALL_STEPS = 4


def sparse(llm: Any) -> dict[str, Any]:
    worker = _worker()
    preempted = sum(
        int(metric.value) for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"
    )
    if worker is None:
        return {"on": False, "preemptions": preempted}
    return {
        "on": True,
        "layers": [layer.index for layer in worker.layers.values()],
        "sequences": len(worker._sequences),
        "preemptions": preempted,
    }


def rewrite_always(llm: Any) -> dict[str, Any]:
    _worker()._leaves_out = lambda row, blocks: True
    return select_always(llm)


def select_always(_: Any) -> dict[str, Any]:
    from hotkv_sparse import SparseConfig

    SparseConfig.covers = lambda *_: False
    return {}


def answer_some(llm: Any, requests: list[dict[str, Any]], aborts: dict[str, int]) -> dict[str, Any]:
    """All at once, each with its own number of tokens. `aborts`: by index, the step before which a
    request is aborted; its answer is what it had."""
    from vllm import SamplingParams

    engine, done = llm.llm_engine, {}
    for number, one in enumerate(requests):
        params = SamplingParams(
            temperature=0, max_tokens=one["max_tokens"], ignore_eos=True, logprobs=1
        )
        named = one.get("adapter")
        lora = None if named is None else engine_driver.lora_request(named)
        prompt = {"prompt_token_ids": one["tokens"]}
        engine.add_request(str(number), prompt, params, lora_request=lora)
    for step in itertools.count():
        if due := [number for number, at in aborts.items() if at == step]:
            engine.abort_request(due)
        if not engine.has_unfinished_requests():
            break
        done |= {output.request_id: output for output in engine.step()}
    nothing = {"tokens": [], "logprobs": [], "ended": "abort", "cached": 0}
    answers = []
    for number in range(len(requests)):
        found = done.get(str(number))
        if found is None:
            answers.append(nothing)
            continue
        made = engine_driver.answer_of([found])
        names = ("tokens", "logprobs", "ended", "cached")
        answers.append({name: made[name][0] for name in names})
    return {"answers": answers}


def break_from_now(_: Any) -> dict[str, Any]:
    def select(*_: Any) -> Any:
        raise RuntimeError("injected")

    _worker()._select = select
    return {}


def pool(_: Any) -> dict[str, Any]:
    import numpy as np

    from hotkv_sparse import build

    worker = _worker()
    built, wrong = {}, 0
    for layer in worker.layers.values():
        rows = np.flatnonzero(worker.sketches.built(layer.index)).astype(np.int32)
        built[layer.index] = len(rows)
        for name, source in worker.sketches.sources(layer.index).items():
            fresh = build(name, layer.keys_of(rows), source.mu, axes=source.axes)
            # Matrix products round by their shape.
            wrong += int(((fresh != source.pool[rows]).mean(axis=(1, 2)) > 0.01).sum())
    return {"built": list(built.values()), "wrong": wrong}


def crowd(llm: Any) -> dict[str, Any]:
    """The most running requests in a step, and the steps, since the last call."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    counts, _running[:] = [*_running], []
    if not hasattr(scheduler, "plain_schedule"):
        scheduler.plain_schedule = scheduler.schedule

        def schedule(*arguments: Any, **named: Any) -> Any:
            output = scheduler.plain_schedule(*arguments, **named)
            if output.num_scheduled_tokens:
                _running.append(len(scheduler.running))
            return output

        scheduler.schedule = schedule
    return {"running": max(counts, default=0), "steps": len(counts)}


_running: list[int] = []


def pace(_: Any, seconds: float) -> dict[str, Any]:
    import time

    worker = _worker()
    original = worker.begin_step

    def begin_step(rows: Any) -> None:
        time.sleep(seconds)
        original(rows)

    worker.begin_step = begin_step
    return {}


def lose(_: Any, steps: list[int]) -> dict[str, Any]:
    """steps: before each report."""
    residents = _worker().residents
    original, left = residents.take_lost, list(steps)

    def take_lost() -> set[int]:
        if left:
            left[0] -= 1
        if left and left[0] <= 0:
            reading = [one for one in residents if one.has_read and not one.is_lost]
            if reading:
                left.pop(0)
                for one in reading:
                    residents.lose(one, "the test says so")
        found: set[int] = original()
        return found

    residents.take_lost = take_lost
    return {}


MOVES_EVERY = [0]
"""Period of `move` in steps; 0: not called yet."""


def move(_: Any, every: int) -> dict[str, Any]:
    """Moves only blocks that host memory has. A later call changes the period."""
    from hotkv_sparse.vllm.scheduler.resident_requests import ResidentRequests

    has_begun, MOVES_EVERY[:] = MOVES_EVERY[0], [every]
    if has_begun:
        return {}
    original, steps = ResidentRequests.make_room, itertools.count(1)

    def make_room(self: Any) -> None:
        original(self)
        pool = self._pool
        for request_id in pool.running_requests() if next(steps) % MOVES_EVERY[0] == 0 else ():
            one = self._residents.get(request_id)
            if one is None or not self._may_move(one):
                continue
            relief = pool.relief(request_id, self.kept_tokens(request_id))
            free = pool._manager.block_pool.get_num_free_blocks()
            if relief is not None and free + relief.freed > 16:
                pool.move(request_id)
                self._stats.add("moved_residencies")

    ResidentRequests.make_room = make_room  # type: ignore[method-assign]
    return {}


def compare_rows(llm: Any) -> dict[str, Any]:
    worker, exactness = _worker(), _scheduler_side(llm).requests._exactness
    taken, counted = exactness.step, []
    select, begin = worker._select, worker.begin_step
    steps: list[tuple[set[str], set[str]]] = []

    def step(scheduled: Any, allocated: Any, sparse: Any) -> None:
        counted.append(set(sparse))
        taken(scheduled, allocated, sparse)

    def begin_step(rows: Any) -> None:
        steps.append((counted.pop(0), set()))
        begin(rows)

    def selected(layer: Any, row: Any, query: Any) -> Any:
        steps[-1][1].add(row.request_id)
        return select(layer, row, query)

    exactness.step, worker.begin_step, worker._select = step, begin_step, selected
    llm.compared = steps
    return {}


def rows(llm: Any) -> dict[str, Any]:
    wrong = [(sorted(a), sorted(b)) for a, b in llm.compared if a != b]
    return {
        "steps": sum(bool(a) for a, _ in llm.compared),
        "rows": sum(len(a) for a, _ in llm.compared),
        "wrong": wrong,
    }


def called(
    llm: Any, modules: list[str], prompts: list[list[list[int]]], max_tokens: int
) -> dict[str, Any]:
    import sys

    from tests.vllm import faults

    known = {code: one for code, one in faults.functions().items() if one.__module__ in modules}
    seen, num_steps = set(), [0]

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in known:
            seen.add(_name(known[frame.f_code]))

    def count() -> None:
        num_steps[0] += 1

    sys.setprofile(profile)
    try:
        with _before_steps(llm, count):
            for batch in prompts:
                engine_driver.generate(llm, batch, max_tokens)
    finally:
        sys.setprofile(None)
    return {"names": sorted(seen), "steps": num_steps[0]}


def break_once(
    llm: Any,
    name: str,
    after_steps: int,
    prompts: list[list[list[int]]],
    max_tokens: int,
    salt: str,
) -> dict[str, Any]:
    from tests.vllm import faults

    (one,) = (one for one in faults.functions().values() if _name(one) == name)
    left, strikes = [after_steps], []
    with contextlib.ExitStack() as stack:

        def arm() -> None:
            if left[0] == 0:
                strikes.append(stack.enter_context(faults.broken(one, only_once=True)))
            left[0] -= 1

        with _before_steps(llm, arm):
            answers = [
                engine_driver.generate(llm, batch, max_tokens, salt=salt) for batch in prompts
            ]
    return {"answers": answers, "strikes": sum(fault.strikes for fault in strikes)}


@contextlib.contextmanager
def _before_steps(llm: Any, call: Callable[[], None]) -> Iterator[None]:
    """Waiting for the server takes empty steps."""
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    original, schedule, is_due = engine.step, scheduler.schedule, [True]

    def step() -> Any:
        if is_due[0]:
            is_due[0] = False
            call()
        return original()

    def scheduled(*arguments: Any, **named: Any) -> Any:
        output = schedule(*arguments, **named)
        is_due[0] |= output.total_num_scheduled_tokens > 0
        return output

    engine.step, scheduler.schedule = step, scheduled
    yield
    engine.step, scheduler.schedule = original, schedule


def _name(one: Any) -> str:
    return f"{one.__module__}:{one.__qualname__}"


engine_driver.OPERATIONS |= {
    "answer_some": answer_some,
    "called": called,
    "crowd": crowd,
    "break_once": break_once,
    "lose": lose,
    "move": move,
    "compare_rows": compare_rows,
    "rows": rows,
    "sparse": sparse,
    "rewrite_always": rewrite_always,
    "select_always": select_always,
    "break_from_now": break_from_now,
    "pool": pool,
    "pace": pace,
}

if __name__ == "__main__":
    engine_driver.main()
