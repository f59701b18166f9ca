"""Runner V2 zeroes reallocated blocks before the worker hears of it, so the scheduler side
revokes stores."""

import os
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.v1.core.sched.output import KVConnectorBlockState

from hotkv_client import fence
from hotkv_client.fence import Revocations, SharedFence
from hotkv_client.types import BlockResult
from hotkv_proto.layout import FENCE_WORDS
from hotkv_proto.order import OrderKind
from hotkv_vllm.compat import checks
from tests.support.waiting import wait_for
from tests.vllm.device import ScriptedDevice
from tests.vllm.harness import prompt
from tests.vllm.ordered_server import engine_at
from tests.vllm.ordered_server import finish as finish_with_daemon
from tests.vllm.ordered_workers import KINDS, lag, worker_of
from tests.vllm.processes import Daemon
from tests.vllm.specs import full_model, mixed_model

PROMPT = prompt(1, 200)


def test_which_engines_need_it() -> None:
    for zeroing, v2, needed in ((True, True, True), (True, False, False), (False, True, False)):
        kv = SimpleNamespace(needs_kv_cache_zeroing=zeroing)
        assert checks.writes_before_it_tells(SimpleNamespace(use_v2_model_runner=v2), kv) is needed


class Words(RuleBasedStateMachine):
    """A word for each store, in each rank's page. Ranks send late or never, and the server may
    answer after the end."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = [SharedFence(), SharedFence()]
        self.chooser = Revocations([page.place for page in self.pages])
        self.chooser._free = self.chooser._free[-5:]
        self.running: dict[int, bool] = {}
        self.sent: set[tuple[int, int]] = set()

    @rule()
    def take(self) -> None:
        index = self.chooser.take()
        if index:
            assert index not in self.running and not any(sent == index for sent, _ in self.sent)
            self.running[index] = False
        else:
            assert len(set(self.running) | {sent for sent, _ in self.sent}) == 5

    @precondition(lambda self: self.running)
    @rule(data=st.data(), rank=st.integers(0, 1))
    def send(self, data: st.DataObject, rank: int) -> None:
        index = data.draw(st.sampled_from(sorted(self.running)))
        self.pages[rank].hold(index)
        self.sent.add((index, rank))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.running)))
        self.chooser.revoke(index)
        self.running[index] = True

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.running)))
        self.chooser.end(index)
        del self.running[index]

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        index, rank = data.draw(st.sampled_from(sorted(self.sent)))
        self.pages[rank].give_back(index)
        self.sent.discard((index, rank))

    @invariant()
    def a_store_commits_only_while_it_runs_and_its_blocks_are_its_own(self) -> None:
        for page in self.pages:
            for index in {sent for sent, _ in self.sent} | set(self.running):
                assert page.is_revoked(index) == self.running.get(index, True)


Words.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_words = Words.TestCase


def test_missing_or_other_page_is_refused(tmp_path: Path) -> None:
    page, other = SharedFence(), SharedFence()
    revocations = Revocations([page.place, other.place])
    assert page._words[: fence.SHARED_WORDS + 1].tolist() == [0, *[1] * (fence.SHARED_WORDS - 1), 0]
    assert revocations.take()
    with pytest.raises(ValueError, match="another fence"):
        Revocations([replace(page.place, fd=other.fd)])
    for num_bytes in (0, 1, 4 * FENCE_WORDS - 1, 4 * FENCE_WORDS + 1):
        (tmp_path / "odd").write_bytes(bytes(num_bytes))
        with (tmp_path / "odd").open("r+b") as odd, pytest.raises(ValueError, match="is no fence"):
            Revocations([replace(page.place, fd=odd.fileno())])
    with pytest.raises(OSError, match="proc"):
        Revocations([replace(page.place, fd=1 << 20)])
    for index in (0, -1, fence.SHARED_WORDS):
        with pytest.raises(ValueError, match="fence_index"):
            page.hold(index)


def test_unreachable_fence_turns_hotkv_off(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1 << 30)
    one = engine(v2=True, specs=mixed_model())
    assert one.connector._scheduler.cache is None
    assert one.generate("a", PROMPT, 2)[0] and server.count("store") == 0


def test_fences_that_ranks_have_named_are_used(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of which vLLM zeroes nothing has none."""
    one = engine(v2=True, specs=mixed_model())
    scheduler, handshake = one.connector._scheduler, one.worker.get_handshake_metadata()
    monkeypatch.setattr(checks, "writes_before_it_tells", lambda *_: False)
    scheduler.connect([handshake])
    assert scheduler.cache.planner.in_flight.fence.revocations is not None
    scheduler.connect([replace(handshake, fence=None)])
    assert scheduler.cache.planner.in_flight.fence.revocations is None
    one = engine(v2=True, specs=full_model())
    one.generate("a", PROMPT, 2)
    assert worker_of(one).rank.fence is None
    assert {job.fence_index for meta in one.metas for job in meta.stores} == {0}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("pipelined", [pytest.param(False, marks=pytest.mark.long), True])
def test_random_lag_leaves_kv_right(
    engine: Any, server: Any, device: ScriptedDevice, kind: OrderKind, pipelined: bool
) -> None:
    """The server often ends its copies just after the zeroing."""
    chance = random.Random(f"{kind}{pipelined}")
    server.order_kind = kind
    settings = {"blocks": 44, "specs": mixed_model(), "max_tokens_per_step": 128}
    one = engine(device=device, pipelined=pipelined, v2=True, **settings)
    revocations = one.connector._scheduler.cache.planner.in_flight.fence.revocations
    revocations._free = revocations._free[-12:]
    num_settled = 0

    def after_zeroing() -> None:
        nonlocal num_settled
        if chance.random() < 0.5:
            device.run()
            num_settled += server.settle("store")

    one.after_zeroing = after_zeroing
    lag(one, server, device, chance)
    assert num_settled and any(meta.flush_stores for meta in one.metas)
    taken = [revocations.take() for _ in range(13)]
    assert sorted(taken)[0] == 0 and len(set(taken)) == 13


def test_a_step_whose_planning_broke_takes_all_back(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.hold = {"store"}
    one = engine(v2=True, specs=mixed_model(), blocks=44)
    one.generate("a", PROMPT, 1)
    planner = one.connector._scheduler.cache.planner
    in_flight = {store.fence_index for store in planner.in_flight.stores.values()}
    assert in_flight
    with monkeypatch.context() as broken:
        broken.setattr(planner, "plan", lambda *_: 1 / 0)
        one.generate("b", prompt(2, 40), 1)
    assert all(worker_of(one).rank.fence.is_revoked(index) for index in in_flight)
    server.settle()
    assert not server.blocks


def test_with_a_daemon(daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device zeroes the blocks before the server copies."""
    device, at = ScriptedDevice(), (daemon.start(), tmp_path, monkeypatch)
    one = engine_at(*at, v2=True, device=device, specs=mixed_model())
    assert worker_of(one).rank.session.order_kind is OrderKind.FLAGS
    one.add("a", PROMPT, 1)
    one.queue.append((scheduled := one.scheduler.schedule(), *one._execute(scheduled)))
    (store,) = worker_of(one).stores.active.values()
    words = worker_of(one).rank.fence
    blocks = [int(block) for run in store.job.runs for block in run.block_ids]
    # Computes nothing, zeroes the store's blocks.
    zeroing = replace(
        scheduled,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set()
        ),
        num_scheduled_tokens={},
        new_block_ids_to_zero=blocks,
        kv_connector_metadata=None,
        kv_connector_block_state=KVConnectorBlockState(
            set(), one.scheduler.kv_cache_manager.get_block_ids, {}
        ),
    )
    meta = one.connector.build_connector_meta(zeroing)
    assert meta.flush_stores == (store.job.store_id,) and words.is_revoked(store.job.fence_index)
    assert not store.answer.done()
    one._zero_blocks(zeroing)
    device.run()
    result = store.answer.result(60)
    results = {int(value) for values in result.results for value in values}
    assert result.num_bytes and results == {BlockResult.ABORTED}, result
    one.active.kv_connector.handle_preemptions(meta)
    one._collect()
    finish_with_daemon(one)
    one.generate("b", prompt(2, 200), 1)
    finish_with_daemon(one)
    other = engine_at(*at, specs=mixed_model())
    assert other.generate("c", PROMPT, 1)[1] == 0
    assert other.generate("d", prompt(2, 200), 1)[1] == 192
    wait_for(lambda: f"0/{fence.SHARED_WORDS - 1}" in repr(words), "the release of all words")
    for engine in (one, other):
        engine.shutdown()
