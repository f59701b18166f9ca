"""Residency with other features in real engines: tokens equal those of full attention."""

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hotkv_client.admin import AdminClient
from hotkv_client.command import warm_start
from tests.doubles.otlp_receiver import OtlpReceiver
from tests.pairs.features import Disk, Shared, Tier, wait_for_copies
from tests.pairs.servers import lose_disk
from tests.sparse.engines.resident_runs import CHUNK, CONTEXT, EXACT, EXACT_POOL, prompts
from tests.sparse.engines.sparse_runs import References
from tests.support.waiting import WAIT_S, wait_for
from tests.tiers.valkey_support import running
from tests.vllm.checkpoint import write_weights
from tests.vllm.processes import Daemon, EngineProcess, Engines, own_daemon
from tests.vllm.runs import same, settled
from tests.vllm.tiny import transfer_config, write_model
from tests.vllm.tokenizer import write_tokenizer
from tests.vllm.vision import IMAGE_TOKEN, write_vision_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LENGTH = 1720
"""More than half of the device; the answer begins another block, which needs room."""
TOKENS = 12
MOVE_STEPS = 5


def begin(
    engines: Engines,
    *,
    model: Path,
    connector: dict[str, Any],
    role: str = "kv_both",
    **more: Any,
) -> EngineProcess:
    settings: dict[str, Any] = {
        "load_format": "auto",
        "dtype": "float32",
        "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": CONTEXT // 2,
        "max_num_batched_tokens": CHUNK,
        "max_num_seqs": 4,
        "driver": "every_driver.py",
        "skip_tokenizer_init": not (model / "tokenizer.json").exists(),
    }
    ours = {"lookup_timeout_s": 60.0} | connector
    transfer = transfer_config(**ours) | {"kv_role": role}
    return engines.start(model, None, kv_transfer_config=transfer, **settings | more)


class Models:
    """With reference answers of engines without residency."""

    def __init__(self, folder: Path, engines: Engines) -> None:
        self.model = write_weights(write_tokenizer(write_model(folder / "model")), seed=1)
        self.other = write_weights(write_model(folder / "other"), seed=2)
        self.vision = write_vision_model(folder / "vision")
        absent = {"target": f"unix:{folder}/none.sock", "startup_wait_s": 0.0}
        self.dense = References(functools.partial(begin, engines, connector=absent))

    def ask(self, operation: str = "generate", *, engine: Any = None, **asked: Any) -> Any:
        return self.dense.ask(operation, engine={"model": self.model} | (engine or {}), **asked)


class Stage:
    """Resident engines at a server with disk and Valkey, started at first use."""

    def __init__(
        self, folder: Path, stack: contextlib.ExitStack, models: Models, moves: bool = False
    ) -> None:
        """moves: requests begin on the device and soon move."""
        self.folder, self._moves, self.models = folder, moves, models
        self.collector = stack.enter_context(OtlpReceiver())
        valkey = stack.enter_context(running(folder / "valkey"))
        self.daemon = stack.enter_context(own_daemon())
        self.daemon.flags = ["--tiers.disk.path", str(folder / "disk")]
        self.daemon.flags += ["--tiers.disk.bytes", "256MiB"]
        self.daemon.flags += ["--tiers.valkey.address", f"unix:{valkey.path}"]
        self.daemon.flags += ["--tiers.lookup-wait-ms", "20000"]
        self.daemon.start()
        self._engines = Engines(folder)
        stack.callback(self._engines.stop)
        self._made: dict[str, EngineProcess] = {}

    def engine(self, name: str, **settings: Any) -> EngineProcess:
        if name not in self._made:
            self._made[name] = self.start(**settings)
        return self._made[name]

    def start(
        self,
        *,
        model: Path | None = None,
        connector: dict[str, Any] | None = None,
        **more: Any,
    ) -> EngineProcess:
        mode = {"residency": "auto"} if self._moves else {}
        ours = {"target": self.daemon.target, "startup_wait_s": 20.0, "sparse": EXACT | mode}
        made = begin(
            self._engines,
            model=model or self.models.model,
            connector=ours | (connector or {}),
            num_gpu_blocks_override=2 * EXACT_POOL,
            quantum=0,
            **more,
        )
        if "tensor_parallel_size" not in more:
            # Tables are rewritten in every step, which several ranks can't.
            made.ask("rewrite_always")
            if self._moves:
                made.ask("move", every=MOVE_STEPS)
        return made

    @property
    def one(self) -> EngineProcess:
        traced = {"tracing": self.collector.url, "tracing_sample_ratio": 1.0}
        return self.engine("one", connector={"tenant": "t", "load": "auto", **traced})

    def check(self, engine: EngineProcess, seed: int, length: int = LENGTH) -> dict[str, Any]:
        batch = prompts(seed, length)
        found: dict[str, Any] = engine.ask("generate", prompts=batch, max_tokens=TOKENS)
        assert same(found, self.models.ask(prompts=batch, max_tokens=TOKENS))
        return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    folder = tmp_path_factory.mktemp("models")
    engines = Engines(folder)
    yield Models(folder, engines)
    engines.stop()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, models: Models) -> Iterator[Stage]:
    with contextlib.ExitStack() as stack:
        yield Stage(tmp_path_factory.mktemp("resident"), stack, models)


@pytest.fixture(scope="module")
def moving(tmp_path_factory: pytest.TempPathFactory, models: Models) -> Iterator[Stage]:
    with contextlib.ExitStack() as stack:
        yield Stage(tmp_path_factory.mktemp("moving"), stack, models, moves=True)


# ------------------------------------------------------------------------------------- one engine


def hints_and_sessions(stage: Stage) -> None:
    """The first hint pins, the second releases."""
    (text,) = prompts(31, LENGTH)
    expected = stage.models.ask(prompts=[text], max_tokens=TOKENS)
    for kind, payload in (("pin", {"ttl_s": 600}), ("release", {})):
        action = {"action_id": "a", "action_type": kind, "action_version": "1.0"}
        asked = {
            "protocol_version": "0.1",
            "message_id": kind,
            "actions": [{**action, "payload": payload}],
        }
        found = stage.one.ask("hinted", prompt=text, max_tokens=TOKENS, hints=asked, session="chat")
        assert found["tokens"] == expected["tokens"][0]
    settled(stage.one)

    def have_come() -> bool:
        outcomes = stage.daemon.admin("hints")["outcomes"]
        return {"pin", "release"} <= {one["message_id"] for one in outcomes}

    wait_for(have_come, "both hints")


def load_choice(stage: Stage) -> None:
    stage.check(stage.one, 32)
    stage.one.ask("reset")
    stage.check(stage.one, 32)
    counted = settled(stage.one)
    assert counted.get("loads", 0) + counted.get("left_requests", 0) > 0


def reset(stage: Stage) -> None:
    stage.check(stage.one, 33)
    assert stage.one.ask("reset", connector=True)["done"]
    assert stage.check(stage.one, 33)["cached"] == [0]


def weights(stage: Stage) -> None:
    batch = prompts(34, LENGTH)
    other = stage.models.other
    expected = stage.models.ask(engine={"model": other}, prompts=batch, max_tokens=TOKENS)
    engine = stage.engine("weights")
    first = stage.check(engine, 34)["tokens"]
    engine.ask("reload", path=str(other))
    engine.ask("reset")
    found = engine.ask("generate", prompts=batch, max_tokens=TOKENS)
    assert same(found, expected)
    assert found["cached"] == [0] and found["tokens"] != first
    engine.ask("reload", path=str(stage.models.model))
    engine.ask("reset")
    stage.check(engine, 34)


def sleep(stage: Stage) -> None:
    stage.check(stage.one, 35)
    stage.one.ask("pause")
    stage.check(stage.one, 35)


def tenants(stage: Stage) -> None:
    stage.check(stage.one, 36)
    settled(stage.one)
    spaces = stage.daemon.admin("key_spaces")
    assert any(one["key_space"]["tenant"] == "t" and one["block_count"] for one in spaces)
    other = stage.engine("other tenant", connector={"tenant": "u"})
    assert stage.check(other, 36)["cached"] == [0]


def tracing(stage: Stage) -> None:
    stage.check(stage.one, 37)

    def has_come() -> bool:
        settled(stage.one)
        return any(span.name == "hotkv.request" for span in stage.collector.spans)

    wait_for(has_come, "the span of a request")


def slow(stage: Stage) -> None:
    batch = prompts(38, LENGTH)
    pid = stage.daemon.pid
    stage.one.begin("generate", prompts=batch, max_tokens=TOKENS)
    time.sleep(0.1)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(pid, signal.SIGCONT)
    assert same(stage.one.answer(), stage.models.ask(prompts=batch, max_tokens=TOKENS))


def disk(stage: Stage) -> None:
    from_a_tier(stage, Disk, lambda daemon: None)


def shared(stage: Stage) -> None:
    from_a_tier(stage, Shared, lose_disk)


def warm(stage: Stage) -> None:
    engine = stage.engine("tiers")
    stage.check(engine, 39)
    daemon, file = stage.daemon, stage.folder / "blocks"
    until_s, fetched = time.monotonic() + WAIT_S, 0
    while not fetched:
        assert time.monotonic() < until_s, "nothing was fetched"
        with AdminClient(daemon.target, WAIT_S) as client:
            named = [
                warm_start.export(client, file, one["key_space_id"], 0)
                for one in client.key_spaces()
                if one["block_count"] and not one["key_space"].get("tenant")
            ]
        assert named
        daemon.lose_arena()
        lose_disk(daemon)
        daemon.start()
        with AdminClient(daemon.target, WAIT_S) as client:
            fetched = warm_start.fetch(client, file, 5.0)["fetched_block_count"]
        engine.ask("wait", connected=True, timeout_s=WAIT_S)
        engine.ask("reset")
        stage.check(engine, 39)


def from_a_tier(stage: Stage, tier: type[Tier], lose: Callable[[Daemon], None]) -> None:
    """Repeats if the tier had no copy yet when host memory was lost."""
    engine, daemon = stage.engine("tiers"), stage.daemon
    stage.check(engine, 40)
    until_s = time.monotonic() + 2 * WAIT_S
    while True:
        wait_for_copies(daemon, tier)
        daemon.lose_arena()
        lose(daemon)
        daemon.start()
        engine.ask("wait", connected=True, timeout_s=WAIT_S)
        engine.ask("reset")
        stage.check(engine, 40)
        if daemon.counter(tier.came):
            return
        assert time.monotonic() < until_s, f"{tier.came} did not grow"


# ---------------------------------------------------------------------------- engines of their own


def ranks(stage: Stage) -> None:
    engine = stage.start(tensor_parallel_size=2, driver="parallel_driver.py")
    stage.check(engine, 41)
    settled(engine)
    engine.ask("reset")
    assert stage.check(engine, 41)["cached"][0] > LENGTH // 2


def producer(stage: Stage) -> None:
    engine = stage.start(role="kv_producer")
    stage.check(engine, 42)
    engine.ask("reset")
    assert stage.check(engine, 42)["cached"] == [0]
    settled(engine)
    assert stage.check(stage.engine("tiers"), 42)["cached"][0] > LENGTH // 2


def pooling(stage: Stage) -> None:
    asked = [{"tokens": tokens} for tokens in prompts(43, LENGTH)]
    kind = {"runner": "pooling", "convert": "embed"}
    engine = stage.start(**kind)
    expected = stage.models.ask("embed", engine=kind, requests=asked)
    for _ in range(2):
        found = engine.ask("embed", requests=asked)
        assert found["vectors"][0] == pytest.approx(expected["vectors"][0], abs=1e-4)


def embeds(stage: Stage) -> None:
    asked = [{"embeds": [44, LENGTH]}]
    with_embeds = {"enable_prompt_embeds": True}
    engine = stage.start(**with_embeds)
    expected = stage.models.ask("sample", engine=with_embeds, requests=asked)
    check_hit(engine, asked, expected)


def images(stage: Stage) -> None:
    (text,) = prompts(45, LENGTH)
    asked = [{"tokens": [*text[:40], IMAGE_TOKEN, *text[40:]], "images": [1]}]
    settings = {"model": stage.models.vision, "load_format": "random"}
    engine = stage.start(connector={"weights_identity": "vision"}, **settings)
    expected = stage.models.ask("sample", engine=settings, requests=asked)
    check_hit(engine, asked, expected)


def check_hit(engine: EngineProcess, asked: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """The first answer must be computed, the second mostly a hit."""
    found = engine.ask("sample", requests=asked)
    assert same(found, expected) and found["cached"] == [0]
    settled(engine)
    engine.ask("reset")
    found = engine.ask("sample", requests=asked)
    assert same(found, expected) and found["cached"][0] > LENGTH // 2


SHOWN: dict[str, Callable[[Stage], None]] = {
    "ranks": ranks,
    "pooling": pooling,
    "embeds": embeds,
    "images": images,
    "producer": producer,
    "hints": hints_and_sessions,
    "sessions": hints_and_sessions,
    "load_choice": load_choice,
    "reset": reset,
    "weights": weights,
    "sleep": sleep,
    "tenants": tenants,
    "tracing": tracing,
    "slow": slow,
    "disk": disk,
    "shared": shared,
    "warm": warm,
}

EVERYDAY = {"reset", "disk"}
NOT_COUNTED = {"ranks", "producer", "pooling", "embeds", "images"}
"""Their engines are not in `Stage._made`."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in EVERYDAY else [pytest.mark.long]) for name in SHOWN],
)
def test_a_pair_of_features_works(stage: Stage, name: str) -> None:
    is_shown(stage, name)


@pytest.mark.long
@pytest.mark.parametrize("name", SHOWN)
def test_a_pair_of_requests_that_move(moving: Stage, name: str) -> None:
    is_shown(moving, name)
    counted = [engine.ask("stats")["totals"] for engine in moving._made.values()]
    assert any("moved_residencies" in totals for totals in counted) or name in NOT_COUNTED


def is_shown(stage: Stage, name: str) -> None:
    SHOWN[name](stage)
    for engine in stage._made.values():
        assert "callback_errors" not in engine.ask("stats")["totals"]
