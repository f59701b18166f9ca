"""An engine whose weights' files are still being read shares only afterwards."""

import itertools
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from vllm import envs

from hotkv_vllm import file_digests
from hotkv_vllm.compat import Unsupported, model_weights
from hotkv_vllm.scheduler import sharing
from hotkv_vllm.worker import layout
from tests.support.waiting import wait_for
from tests.vllm.changing_weights import load
from tests.vllm.checkpoint import write_weights
from tests.vllm.engine_core import Core
from tests.vllm.harness import Engine, prompt
from tests.vllm.lora_manager import lora, with_adapters
from tests.vllm.other_connectors import beside
from tests.vllm.processes import PATIENT, Daemon, Engines
from tests.vllm.ranked import RankedEngine
from tests.vllm.tiny import write_model

PROMPT = prompt(1, 200)
HIT_TOKENS = 192
FILES = "of the files"


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> "Future[str]":
    """The reading of engines that don't name their weights."""
    found: Future[str] = Future()
    begin = model_weights.begin_reading
    monkeypatch.setattr(layout, "READ_WAIT_S", 0.0)
    monkeypatch.setattr(model_weights, "weights_may_be_older", lambda _: False)
    monkeypatch.setattr(
        model_weights, "begin_reading", lambda _, named="": begin(None, named) if named else found
    )
    return found


@pytest.fixture
def known(updated: Any, reading: Any) -> Any:
    """This engine has stored PROMPT."""
    one = updated(extra={"weights_identity": FILES})
    one.fill(PROMPT)
    return one


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("is_child", [False, True])
def test_an_engine_shares_once_its_files_are_read(
    make: Any, reading: Any, ranks: int, is_child: bool
) -> None:
    within = {"within": beside("LoadingConnector", ours_first=True)} if is_child else {}
    kind, more = (Engine, {}) if ranks == 1 else (RankedEngine, {"num_ranks": ranks})
    make(kind, extra={"weights_identity": FILES}, **more).fill(PROMPT)
    one = make(kind, **within, **more)
    assert one.hit(PROMPT) == 0
    one.fill(prompt(2, 200))
    reading.set_result(FILES)
    one.drop_local()
    assert one.hit(PROMPT) == HIT_TOKENS
    other = make(kind, extra={"weights_identity": FILES}, **more)
    assert other.hit(prompt(2, 200)) == 0, "blocks of before may not be stored"
    one.fill(prompt(3, 200))
    assert other.hit(prompt(3, 200)) == HIT_TOKENS


def test_running_request_is_stored_once_files_are_read(
    updated: Any, known: Any, reading: Any
) -> None:
    one = updated()
    one.add("a", prompt(2, 150), max_tokens=60)
    one.steps(5)
    reading.set_result(FILES)
    one.run()
    assert known.hit([*prompt(2, 150), *one.outputs["a"]]) >= HIT_TOKENS


def test_the_log_says_once_what_is_awaited(
    updated: Any, reading: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(sharing.logger, "info", lambda text, *a: said.append(text % a))
    one = updated()
    for seed in range(3):
        one.fill(prompt(seed, 100))
    assert said.count(model_weights.SAYS_UNREAD) == 1
    del said[:]
    reading.set_result(FILES)
    one.fill(PROMPT)
    assert len(said) == 1 and said[0].startswith("hotkv on")


def test_unreadable_files_leave_engine_without_hotkv(
    updated: Any, known: Any, reading: Any, warnings: list[str]
) -> None:
    one = updated()
    reading.set_exception(Unsupported("no weights files"))
    assert one.hit(PROMPT) == 0 and one.hit(PROMPT) == 0
    why = "no weights files"
    assert warnings == [
        f"hotkv is off in this worker: {why}",
        f"hotkv is off: {why}; the engine runs without it",
    ]


def test_a_reset_before_files_are_read_flushes_afterwards(
    updated: Any, known: Any, reading: Any
) -> None:
    one = updated()
    assert one.connector.reset_cache()
    reading.set_result(FILES)
    assert one.hit(PROMPT) == 0
    known.drop_local()
    one.drop_local()
    assert one.hit(prompt(5, 200)) == 0 and known.hit(prompt(5, 200)) == HIT_TOKENS


@pytest.mark.parametrize("is_noticed", [False, True])
def test_weights_written_while_reading_get_their_name(
    updated: Any, known: Any, reading: Any, is_noticed: bool
) -> None:
    one = updated()
    one.fill(prompt(6, 100))
    load(one, 7, quietly=not is_noticed)
    if not is_noticed:
        one.connector.reset_cache()
    reading.set_result(FILES)
    assert one.hit(PROMPT) == 0
    one.fill(prompt(7, 200))
    known.drop_local()
    assert known.hit(prompt(7, 200)) == 0


def test_files_changed_meanwhile_dont_name_weights(
    updated: Any, known: Any, reading: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = updated()
    monkeypatch.setattr(model_weights, "weights_may_be_older", lambda _: True)
    reading.set_result(FILES)
    assert one.hit(PROMPT) == 0
    one.fill(prompt(8, 200))
    assert known.hit(prompt(8, 200)) == 0


# ------------------------------------------------------------------------------------ with adapters


def adapted(one: Any, name: str, tokens: list[int], lora_id: int = 1, max_tokens: int = 4) -> int:
    """Runs a request with the adapter at /a. Returns its tokens that came from hotkv."""
    one.add(name, tokens, max_tokens, lora_request=lora(lora_id))
    one.run()
    return int(one.external.get(name, 0))


@pytest.mark.parametrize("ranks", [1, 2])
def test_requests_of_adapters_share_once_files_are_read(
    make: Any, reading: Any, ranks: int
) -> None:
    kind, more = (Engine, {}) if ranks == 1 else (RankedEngine, {"num_ranks": ranks})
    other, one = make(kind, extra={"weights_identity": FILES}, **more), make(kind, **more)
    for each in (other, one):
        with_adapters(each, {"/a": 1})
    adapted(other, "before", PROMPT)
    assert adapted(one, "unread", PROMPT) == 0
    adapted(one, "unread too", prompt(2, 200))
    one.add("long", prompt(3, 150), 60, lora_request=lora())
    one.steps(5)
    num_steps = len(one.metas)
    reading.set_result(FILES)
    one.run()
    for each in (other, one):
        each.drop_local()
    assert adapted(one, "read", PROMPT) == HIT_TOKENS
    assert adapted(other, "of before", prompt(2, 200)) == 0
    assert adapted(other, "running", [*prompt(3, 150), *one.outputs["long"]]) >= HIT_TOKENS
    assert any(1 in meta.adapters.released for meta in one.metas[num_steps:])
    assert one.counters.get("hook_errors", 0) == 0


@pytest.mark.parametrize("lora_id", [1, 2])
def test_an_adapter_that_changed_before_shares_nothing(
    engine: Any, reading: Any, lora_id: int
) -> None:
    """vLLM's own prefix cache may have blocks of the adapter's earlier bytes."""
    one, other = engine(), engine(extra={"weights_identity": FILES})
    with_adapters(other, {"/a": 2})
    manager = with_adapters(one, {"/a": 1})
    adapted(one, "earlier", PROMPT)
    manager.files["/a"] = 2
    manager.loaded.clear()
    adapted(one, "later", prompt(2, 200), lora_id)
    reading.set_result(FILES)
    one.fill(prompt(3, 40))
    adapted(one, "read", prompt(4, 200), lora_id)
    one.fill(prompt(5, 40))
    assert adapted(other, "other", prompt(4, 200)) == 0


# --------------------------------------------------------------------------------- asleep, on ranks

MOMENTS = ("before", "asleep", "after")
ALL_MOMENTS = list(itertools.product(MOMENTS, MOMENTS))
USUAL = [(*both, "keep", True) for both in ALL_MOMENTS]
OTHERS = [
    (*both, mode, has_hooks)
    for mode, has_hooks in (("abort", True), ("abort", False), ("keep", False))
    for both in ALL_MOMENTS
]


@pytest.mark.parametrize(
    ("first", "second", "mode", "has_hooks"),
    [*USUAL, *(pytest.param(*one, marks=pytest.mark.campaign) for one in OTHERS)],
)
def test_ranks_that_sleep_share_once_files_are_read(
    make: Any,
    reading: Any,
    monkeypatch: pytest.MonkeyPatch,
    first: str,
    second: str,
    mode: str,
    has_hooks: bool,
) -> None:
    """Two ranks' files are read before, during or after a sleep. CPU workers call no hooks."""
    other = make(RankedEngine, num_ranks=2, extra={"weights_identity": FILES})
    other.fill(PROMPT)
    whens = [first, second, max(first, second, key=MOMENTS.index)]
    readings: list[Future[str]] = [Future() for _ in whens]
    begun = iter(readings)
    monkeypatch.setattr(model_weights, "begin_reading", lambda *_: next(begun))
    one = make(RankedEngine, num_ranks=2)
    core = Core(one)
    if not has_hooks:
        monkeypatch.setattr(core.core.model_executor, "sleep", lambda _: None)
        monkeypatch.setattr(core.core.model_executor, "wake_up", lambda _: None)

    def read(moment: str) -> None:
        for one_reading, when in zip(readings, whens, strict=True):
            if when == moment:
                one_reading.set_result(FILES)

    one.fill(prompt(2, 40))
    one.add("kept", prompt(3, 150), 60)
    one.steps(5)
    read("before")
    one.steps(3)
    core.sleep(mode)
    read("asleep")
    core.wake_up()
    one.steps(3)
    read("after")
    one.run()
    assert one.hit(PROMPT) == HIT_TOKENS
    one.fill(prompt(4, 200))
    assert other.hit(prompt(4, 200)) == HIT_TOKENS
    if mode == "keep":
        assert other.hit([*prompt(3, 150), *one.outputs["kept"]]) >= HIT_TOKENS
    # A second sleep finds the files read.
    core.sleep()
    core.wake_up()
    assert one.hit(prompt(4, 200)) == HIT_TOKENS
    assert one.counters.get("hook_errors", 0) == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_engines_share_once_their_files_are_read(
    engines: Engines, daemon: Daemon, tmp_path: Path
) -> None:
    """Another process reads the file."""
    target = daemon.start().target
    model = write_weights(write_model(tmp_path / "model"))
    folder = Path(envs.VLLM_CACHE_ROOT) / "hotkv" / "weights"
    place = file_digests._place(folder, (model / "model.safetensors").resolve())
    assert place is not None
    settings = {"dtype": "float32", "load_format": "auto"}
    first, second = ([seed, *range(3, 200)] for seed in (1, 2))
    with file_digests._turn(place.with_suffix(".lock")):
        one = engines.start(model, target, constants=PATIENT, **settings)
        before = one.ask("generate", prompts=[first], max_tokens=8)
        assert model_weights.SAYS_UNREAD in one.log()
        assert daemon.counter("stored_blocks_total") == 0

    def stores() -> bool:
        one.ask("generate", prompts=[second], max_tokens=8, salt=f"{time.monotonic()}")
        return daemon.counter("stored_blocks_total") > 0

    wait_for(stores, "blocks of an engine that has read its files")
    one.ask("generate", prompts=[second], max_tokens=8)
    two = engines.start(model, target, **settings)
    after = two.ask("generate", prompts=[second, first], max_tokens=8)
    assert after["cached"][0] > 0
    assert after["tokens"][1] == before["tokens"][0]
