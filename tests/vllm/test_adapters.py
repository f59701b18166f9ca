"""Workers identify adapters by their bytes: who shares, and what happens when the bytes change."""

import functools
import itertools
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.v1.outputs import KVConnectorOutput

from hotkv_client.types import BlockRun
from hotkv_proto.blocks import NO_RETENTION
from hotkv_proto.reports import Miss
from hotkv_vllm.identity.adapter_watch import AdapterWatch, watch_adapters
from hotkv_vllm.identity.adapters import LATER, UNKNOWN, AdapterReport, AdapterWork
from hotkv_vllm.metadata import HotKVWorkerMetadata, StepReport
from tests.vllm.harness import prompt
from tests.vllm.lora_manager import Manager, lora, with_adapters
from tests.vllm.oracle import reports_to
from tests.vllm.tiny import BLOCK_TOKENS

PROMPT = prompt(1, 200)
LONG = pytest.mark.long
HIT = 192


# --------------------------------------------------------------------------------------- the worker


def answers(watch: AdapterWatch, **work: Any) -> dict[int, dict[int, str]]:
    watch.before_step(AdapterWork(**work))
    report = watch.take_report()
    return {} if report is None else report.answers


def ask(watch: AdapterWatch, request: LoRARequest) -> str:
    return answers(watch, asked=((1, request),))[1][0]


def test_identity_depends_on_bytes_alone() -> None:
    files = {"/a": 1, "/b": 1, "/c": 2}
    names = [
        ask(AdapterWatch(Manager(files)), lora(number, path[1:], path))
        for number, path in enumerate(files, 1)
    ]
    assert names[0] == names[1] != names[2] != UNKNOWN
    assert ask(AdapterWatch(Manager(files), settings="other"), lora()) != names[0]


@pytest.mark.parametrize(
    "place", ["rank", "scaling", "lora_a", "lora_a in parts", "lora_a without bytes", "another"]
)
def test_whatever_a_read_gives_counts(place: str) -> None:
    class Other(Manager):
        def _load_adapter(self, request: LoRARequest) -> Any:
            model = super()._load_adapter(request)
            if place == "rank":
                model.rank = 4
            elif place == "another":
                model.loras["k"] = model.loras["q"]
            else:
                weights = model.loras["q"]
                others = {
                    "scaling": 1.0,
                    "lora_a": weights.lora_a.to(torch.bfloat16),
                    "lora_a in parts": list(weights.lora_a),
                    "lora_a without bytes": weights.lora_a.to("meta"),
                }
                setattr(weights, place.split()[0], others[place])
            return model

    found = ask(AdapterWatch(Other({"/a": 1})), lora())
    assert found != ask(AdapterWatch(Manager({"/a": 1})), lora())
    assert (found == UNKNOWN) == place.endswith("without bytes")


@pytest.mark.parametrize("how", ["evicted", "in place", "asked"])
def test_changed_bytes_under_known_id_are_reported(how: str) -> None:
    manager = Manager({"/a": 1, "/b": 1}, capacity=1)
    watch = AdapterWatch(manager)
    ask(watch, lora())
    manager.add_adapter(lora())
    watch.before_step(AdapterWork(released=(1,)))
    manager.files["/a"] = 2
    if how != "in place":
        manager.add_adapter(lora(2, "b", "/b"))
    assert watch.is_trusted
    if how == "asked":
        assert ask(watch, lora()) == UNKNOWN
    else:
        assert manager.add_adapter(lora(load_inplace=how == "in place")) == 2
    for _ in range(2):
        assert not watch.is_trusted
        report = watch.take_report()
        assert report == AdapterReport({}, frozenset({1}))
    watch.before_step(AdapterWork(acknowledged=frozenset({1})))
    assert watch.is_trusted and watch.take_report() is None
    # vLLM's own cache may have KV of the other content.
    manager.files["/a"] = 1
    assert manager.add_adapter(lora(load_inplace=True)) == 1 and ask(watch, lora()) == UNKNOWN


def test_reload_in_place_reads_the_files_again() -> None:
    manager = Manager({"/a": 1})
    watch = AdapterWatch(manager)
    ask(watch, lora(load_inplace=True))
    manager.files["/a"] = 2
    assert manager.add_adapter(lora(load_inplace=True)) == 2 and not watch.is_trusted


def test_few_adapters_are_read_ahead_others_named() -> None:
    manager = Manager({f"/{number}": number for number in range(1, 8)})
    watch = AdapterWatch(manager, max_ahead=2)
    requests = [lora(number, str(number), f"/{number}") for number in range(1, 8)]
    found = answers(watch, asked=tuple(enumerate(requests, 1)))
    assert [number for number, answer in found.items() if answer[0] == LATER] == [3, 4, 5, 6, 7]
    assert not answers(watch) and manager.num_reads == 2
    manager.add_adapter(requests[0])
    manager.add_adapter(requests[5])
    found = answers(watch, released=(4,))
    assert set(found) == {3, 6} and LATER not in (found[3][0], found[6][0])
    assert set(answers(watch, released=(2, 3))) == {5, 7}


def test_what_cant_be_read_or_found_is_unknown(caplog: Any) -> None:
    assert ask(AdapterWatch(None), lora()) == UNKNOWN
    with caplog.at_level(logging.ERROR):
        assert ask(AdapterWatch(Manager({})), lora()) == UNKNOWN
    assert "'a' could not be read" in caplog.text
    manager = Manager({"/a": 1})
    manager.add_adapter(lora())
    assert ask(AdapterWatch(manager), lora()) == UNKNOWN


def test_manager_of_the_registering_worker_is_found() -> None:
    class Runner:
        vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(rank=3), lora_config=SimpleNamespace(max_loras=1)
        )
        lora_manager: Any = Manager({"/a": 1})

        def get_model(self) -> None: ...

        def initialize(self) -> AdapterWatch:
            return watch_adapters(self.vllm_config)

    watch = Runner().initialize()
    assert watch.is_watching and answers(watch, asked=((1, lora()),))[1][3] != UNKNOWN
    Runner.lora_manager = None
    assert not Runner().initialize().is_watching
    assert not watch_adapters(Runner.vllm_config).is_watching


# ------------------------------------------------------------------------------ in vLLM's scheduler


def generate(
    one: Any,
    name: str,
    adapter: LoRARequest | None,
    tokens: list[int] = PROMPT,
    max_tokens: int = 2,
) -> int:
    """Tokens from hotkv; the harness checks the KV."""
    one.add(name, tokens, max_tokens, lora_request=adapter)
    one.run()
    return int(one.external.get(name, 0))


@pytest.mark.parametrize("pipelined", [False, True])
def test_engines_share_an_adapter_by_its_content(engine: Any, server: Any, pipelined: bool) -> None:
    one, other = engine(pipelined=pipelined), engine(pipelined=pipelined)
    with_adapters(one, {"/a": 1, "/b": 2})
    with_adapters(other, {"/a": 1, "/b": 3})
    cases = ((None, HIT), (lora(), HIT), (lora(2, "b", "/b"), 0), (lora(2, "c", "/a"), 0))
    for number, (adapter, _) in enumerate(cases[:3]):
        assert generate(one, f"cold{number}", adapter) == 0
    one.run()
    for number, (adapter, expected) in enumerate(cases):
        assert generate(other, f"warm{number}", adapter) == expected
    # Reports have the hashes of the stores; without an adapter vLLM's.
    stores = (runs for kind, runs in server.calls if kind == "store")
    stored = {bytes(h) for runs in stores for run in runs for h in run.hashes}
    batches = [batch for kind, batch in server.calls if kind == "report_requests"]
    reported = list(itertools.chain(*batches))
    assert len(reported) == 7 and all(set(report.hashes) <= stored for report in reported)
    assert set(one.requests["cold0"].block_hashes[: HIT // BLOCK_TOKENS]) <= stored


def test_without_a_manager_adapters_bypass_said_once(engine: Any, server: Any, caplog: Any) -> None:
    one = engine()
    with caplog.at_level(logging.WARNING):
        for name in "ab":
            assert generate(one, name, lora()) == 0
    assert server.count("store") == 0 and one.counters.keys() <= {"reported_requests"}
    # The tokens count as missed, without hashes.
    said = [(report.miss, len(report.hashes)) for report in reports_to(server)]
    assert said == [(Miss.NOT_ASKED, 0)] * 2
    assert caplog.text.count("the workers can't tell") == 1


def test_files_changing_before_first_step_change_nothing(engine: Any) -> None:
    one, other = engine(), engine()
    with_adapters(one, {"/a": 1})
    manager = with_adapters(other, {"/a": 1})
    generate(one, "cold", lora())
    one.run()
    other.before_forward = lambda: manager.files.update({"/a": 2} if manager.num_reads else {})
    assert generate(other, "warm", lora()) == HIT and manager.num_reads == 1
    # Evicted and unused, so the next request loads the changed files.
    generate(other, "between", None, prompt(3, 40))
    assert [meta.adapters.released for meta in other.metas if meta.adapters.released] == [(1,)]
    manager.loaded.clear()
    assert generate(other, "later", lora(), prompt(2, 100)) == 0
    assert other.contents == {"warm": 1, "later": 2}


def test_plans_on_old_bytes_drop_with_notice(engine: Any, server: Any) -> None:
    one, other = engine(), engine()
    for each in (one, other):
        with_adapters(each, {"/a": 1})
    generate(one, "cold", lora())
    one.generate("stores end", prompt(9, 40))
    server.hold = {"load"}
    for name, adapter in (("adapter", lora()), ("base", None)):
        other.add(name, PROMPT if adapter else prompt(9, 40), 2, lora_request=adapter)
    other.steps(10)
    scheduler = other.connector._scheduler
    assert {state.hit.phase.name for state in scheduler.requests.states.values()} == {"LOADING"}
    scheduler.cache.planner.tails.add(NO_RETENTION, [BlockRun(0, [b"a" * 32])])
    told = HotKVWorkerMetadata({(0, 0): StepReport(adapters=AdapterReport(changed=frozenset({1})))})
    other.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=told))
    assert not scheduler.cache.planner.tails.waiting
    assert scheduler.requests.loads.cancelled == ["adapter"]
    server.resume()
    other.run()


def rewrite_at(count: Iterator[int], step: int, manager: Manager) -> None:
    if next(count) == step:
        manager.files["/a"] = 2
        manager.loaded.clear()


@pytest.mark.parametrize(
    ("length", "pipelined"),
    [
        (70, True),
        (200, False),
        pytest.param(64, True, marks=LONG),
        pytest.param(64, False, marks=LONG),
        pytest.param(70, False, marks=LONG),
        pytest.param(200, True, marks=LONG),
    ],
)
def test_no_block_of_other_bytes_is_stored(engine: Any, pipelined: bool, length: int) -> None:
    """A request with the adapter runs all the time, so the scheduler has no reason to ask again."""
    settings = {"pipelined": pipelined, "blocks": 96}
    fresh = [engine(**settings) for _ in range(2)]
    for content, one in enumerate(fresh, 1):
        with_adapters(one, {"/a": content})
    for steps in range(6):
        one = engine(**settings)
        manager = with_adapters(one, {"/a": 1})
        one.add("long", prompt(100 + steps, 40), 60, lora_request=lora())
        one.steps(4)
        one.add("new", prompt(steps, length), 3 + steps, lora_request=lora())
        one.before_forward = functools.partial(rewrite_at, itertools.count(), steps, manager)
        one.run()
        assert manager.num_reads == 2 and one.counters.get("callback_errors", 0) == 0
        for other in fresh:
            generate(other, f"new{steps}", lora(), prompt(steps, length))
            generate(other, f"long{steps}", lora(), prompt(100 + steps, 40))
