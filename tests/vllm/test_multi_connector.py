"""hotkv in vLLM's MultiConnector, in the harness. Random traffic: `tests/pairs`."""

import copy
import importlib.util
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from hotkv_vllm.compat import Unsupported, checks
from hotkv_vllm.connector import HotKVConnector
from hotkv_vllm.metadata import HotKVHandshake
from hotkv_vllm.scheduler import sharing
from tests.doubles.fake import FakeServer
from tests.vllm.harness import Engine, prompt
from tests.vllm.oracle import answer_of
from tests.vllm.other_connectors import PLAN, CheckedHandshake, Plan, beside, children, loads_into
from tests.vllm.tiny import BLOCK_TOKENS, transfer_config

PROMPT = prompt(1, 200)
USABLE = 192
Make = Callable[..., Engine]
BOTH_ORDERS = pytest.mark.parametrize("ours_first", [True, False], ids=["first", "second"])


@pytest.fixture(autouse=True)
def plan() -> Iterator[Plan]:
    yield PLAN
    PLAN.__init__()  # type: ignore[misc]


@BOTH_ORDERS
def test_beside_one_that_checks_its_handshake(
    engine: Make, server: FakeServer, ours_first: bool
) -> None:
    within = beside("CheckingConnector", ours_first=ours_first)
    one, other = engine(within=within), engine(within=within)
    assert children(one.connector)[1].seen == {(0, 0): CheckedHandshake(0)}
    cold = one.generate("cold", PROMPT, 4)
    assert cold[1] == 0 and len(server.blocks) >= USABLE // BLOCK_TOKENS
    assert other.generate("warm", PROMPT, 4) == (cold[0], USABLE)
    other.drop_local()
    server.fail_loads = True
    assert other.generate("fails", PROMPT, 4)[0] == cold[0] and other.finished["fails"] == "length"
    assert other.counters["failed_loads"] == 1 and "callback_errors" not in other.counters
    # vLLM's base class refuses handshakes by stage: hotkv sends none.
    beside_another = engine(within=beside("LoadingConnector", ours_first=ours_first))
    assert beside_another.worker.get_handshake_metadata() is None


@BOTH_ORDERS
def test_hit_counts_only_if_loaded_from_hotkv(engine: Make, plan: Plan, ours_first: bool) -> None:
    """vLLM takes the hit of the first connector."""
    one = engine(within=beside("LoadingConnector", ours_first=ours_first))
    expected = one.fill(PROMPT)
    one.drop_local()
    plan.tokens["b"], plan.fill = USABLE, loads_into(one)
    assert one.generate("b", PROMPT, 4) == (expected, USABLE)
    assert one.counters["offered_requests"] == 1
    assert one.counters.get("hit_tokens", 0) == (USABLE if ours_first else 0)


@BOTH_ORDERS
def test_another_connectors_prompt_is_left_to_it(
    engine: Make, plan: Plan, ours_first: bool
) -> None:
    """MultiConnector loads from one connector. After the other's try hotkv may offer."""
    one = engine(within=beside("LoadingConnector", ours_first=ours_first))
    one.fill(PROMPT[:96])
    plan.tokens["fetched"], plan.fill = USABLE, loads_into(one)
    for name, is_due in (("fetched", True), ("failed", False)):
        one.drop_local()
        tokens = PROMPT[:96] + prompt(2 + is_due, 104)
        one.add(name, tokens, 4, transfer={"do_remote_prefill": is_due, "remote_engine_id": "far"})
        one.run()
        assert one.outputs[name] == answer_of(tokens, 4)
        assert one.external[name] == (USABLE if is_due else 96)
        assert one.counters.get("offered_requests", 0) == (not is_due)


def test_hotkv_in_a_nested_multiconnector(engine: Make) -> None:
    inner = beside("CheckingConnector", ours_first=True)
    one = engine(within=lambda ours: beside("LoadingConnector", ours_first=False)(inner(ours)))
    assert one.scheduler.recompute_kv_load_failures
    assert one.worker.get_handshake_metadata() == CheckedHandshake(0)


def test_policy_out_of_reach_is_said(
    engine: Make, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotkv_vllm.compat.checks._has_children", lambda _: False)
    one = engine(within=beside("LoadingConnector", ours_first=True))
    assert not one.scheduler.recompute_kv_load_failures and "kv_load_failure_policy" in warnings[0]


def _config(*names: str) -> Any:
    several = {"connectors": [{"kv_connector": name} for name in names]}
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=several))


def test_addresses_that_were_registered_earlier(warnings: list[str]) -> None:
    """On CPU registering moves the KV cache; NIXL remembers addresses."""
    inner = _config("ExampleConnector", "HotKVConnector", "Behind")
    outer = _config("NixlConnector", "MultiConnector", "Behind")
    assert checks.earlier_connectors(()) == ()
    assert checks.earlier_connectors((inner,)) == ("ExampleConnector",)
    assert checks.earlier_connectors((inner, outer)) == ("ExampleConnector", "NixlConnector")
    checks.check_earlier(("ExampleConnector",), "cpu")
    checks.check_earlier(("NixlConnector",), "cuda")
    with pytest.raises(Unsupported, match="name HotKVConnector first"):
        checks.check_earlier(("ExampleConnector", "NixlConnector"), "cpu")
    assert not warnings
    checks.check_earlier(("Unknown",), "cpu")
    assert warnings[0].startswith("hotkv: Unknown comes before HotKVConnector")


def test_a_rank_that_never_answers(
    engine: Make, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request waits, then runs without hotkv, which comes on with the handshake,
    unless that has no key space."""
    one = engine(within=beside("LoadingConnector", ours_first=True))
    worker, scheduler = children(one.worker)[0]._worker, children(one.connector)[0]._scheduler
    answer = worker.handshake
    monkeypatch.setattr(worker, "handshake", lambda: None)
    one.add("waits", PROMPT, 4)
    one.steps(3)
    assert not one.outputs["waits"]
    monkeypatch.setattr(sharing, "JOINING_PATIENCE_S", 0.0)
    scheduler.sharing.joining._until_s = None
    one.run()
    assert len(one.outputs["waits"]) == 4 and not server.blocks
    monkeypatch.setattr(worker, "handshake", answer)
    one.generate("long", prompt(2, 100), 100)
    assert len(server.blocks) >= 6
    off = engine(within=beside("LoadingConnector", ours_first=False))
    refused = HotKVHandshake(None, "it says so")
    monkeypatch.setattr(children(off.worker)[0]._worker, "handshake", lambda: refused)
    server.blocks.clear()
    assert len(off.generate("cold", PROMPT, 4)[0]) == 4
    assert not server.blocks and children(off.connector)[0]._scheduler.sharing.joining is None


def test_a_reset_before_the_handshakes_empties_the_cache(engine: Make, server: FakeServer) -> None:
    """The key space is known with the first step."""
    engine().fill(PROMPT)
    one = engine(within=beside("LoadingConnector", ours_first=True))
    assert one.scheduler.reset_prefix_cache(reset_connector=True)
    assert one.generate("first", PROMPT, 4)[1] == 0 and server.flushes == 1
    one.fill(prompt(2, 40))
    assert one.hit(PROMPT) == USABLE and server.flushes == 1
    other = engine(within=beside("LoadingConnector", ours_first=True))
    assert other.generate("kept", PROMPT, 4)[1] == USABLE


def test_reset_before_handshakes_ends_before_first_request(
    engine: Make, server: FakeServer
) -> None:
    """Else the first request's flush would delete what another engine stored since."""
    other, one = engine(), engine(within=beside("LoadingConnector", ours_first=True))
    other.fill(PROMPT)
    assert one.scheduler.reset_prefix_cache(reset_connector=True)
    one.run()
    assert server.flushes == 1 and not server.blocks
    assert not one.scheduler.has_requests()
    other.hit(PROMPT)
    assert one.generate("first", PROMPT, 4)[1] == USABLE and server.flushes == 1


def test_the_name_is_known_without_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM_PLUGINS may exclude hotkv's plugin."""
    monkeypatch.delitem(KVConnectorFactory._registry, "HotKVConnector", raising=False)
    spec = importlib.util.find_spec("hotkv_vllm.connector")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert KVConnectorFactory.get_connector_class_by_name("HotKVConnector") is HotKVConnector


@BOTH_ORDERS
def test_layouts_do_not_conflict(
    engine: Make, monkeypatch: pytest.MonkeyPatch, ours_first: bool
) -> None:
    monkeypatch.setattr(checks, "preferred_layout", lambda _: "BLHNC")
    config = copy.copy(engine().vllm_config)
    assert HotKVConnector.get_required_kvcache_layout(config) == "BLHNC"
    for name, expected in (("CheckingConnector", "LBHNC"), ("LoadingConnector", "BLHNC")):
        several = beside(name, ours_first=ours_first)(transfer_config())
        config.kv_transfer_config = KVTransferConfig(**several)
        assert MultiConnector.get_required_kvcache_layout(config) == expected
        nested = beside("LoadingConnector", ours_first=ours_first)(several)
        config.kv_transfer_config = KVTransferConfig(**nested)
        assert MultiConnector.get_required_kvcache_layout(config) in (None, "LBHNC")


@pytest.mark.parametrize("ending", ["aborted", "failed", "well"])
def test_asynchronous_load_of_another(
    engine: Make, server: FakeServer, plan: Plan, ending: str
) -> None:
    """vLLM counts tokens as computed when the load starts."""
    one, other = (engine(within=beside("LoadingConnector", ours_first=False)) for _ in range(2))
    expected = other.generate("alone", PROMPT, 4)[0]
    server.blocks.clear()
    plan.tokens["a"], plan.is_async, plan.holds, plan.fill = USABLE, True, True, loads_into(one)
    one.add("a", PROMPT, 4)
    one.steps(4)
    assert plan.loading
    if ending == "aborted":
        one.abort("a")
        one.step()
    plan.fails, plan.holds = ending == "failed", False
    one.run()
    assert "failed_loads" not in one.counters and "callback_errors" not in one.counters
    if ending == "aborted":
        one.generate("next step", prompt(9, 10), 2)
        assert not server.blocks
    else:
        assert one.outputs["a"] == expected and len(server.blocks) >= USABLE // BLOCK_TOKENS
    other.hit(PROMPT)


@pytest.mark.parametrize("pipelined", [False, True], ids=["plain", "pipelined"])
@pytest.mark.parametrize("fails", [True, False], ids=["failed", "well"])
def test_synchronous_load_of_another(
    engine: Make,
    server: FakeServer,
    plan: Plan,
    monkeypatch: pytest.MonkeyPatch,
    fails: bool,
    pipelined: bool,
) -> None:
    """vLLM learns of the failure after the step has used the blocks."""
    within = beside("LoadingConnector", ours_first=False)
    one, other = (engine(within=within, pipelined=pipelined) for _ in range(2))
    expected = other.generate("alone", PROMPT, 40)[0]
    one.generate("connects", prompt(9, 10), 2)
    server.blocks.clear()
    for layer in one.tensors:
        one._cells(layer)[:] = 7
    plan.tokens["a"], plan.fails, plan.fill = USABLE, fails, loads_into(one)
    with monkeypatch.context() as lax:
        # As a real model would.
        lax.setattr(one, "_check", lambda *_: None)
        one.add("a", PROMPT, 40)
        one.add("shares", PROMPT, 40)
        one.step()
        assert not any(meta.metadata[1].stores for meta in one.metas[-1:])
        if fails and not pipelined:
            # vLLM drops what the failed step sampled.
            one.tokens |= {"a": list(PROMPT), "shares": list(PROMPT)}
        one.step()
    one.run()
    if not fails or not pipelined:
        assert one.outputs["a"] == one.outputs["shares"] == expected
    assert bool(server.blocks) is not fails
    other.hit(PROMPT, 40)
    stored = len(server.blocks)
    one.generate("c", prompt(3, 200), 40)
    assert len(server.blocks) >= stored + 6 and "callback_errors" not in one.counters
