"""`HotKVOffloadingConnector` with each feature that has no other test here: the server's over a
`Rig`, vLLM's in engines that compute, pause and load."""

import contextlib
import copy
import random
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.models.interfaces import SupportsQuant
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.request import Request, RequestStatus

from hotkv_client.admin import AdminClient
from hotkv_client.command import warm_start
from hotkv_vllm.config import ConfigError
from hotkv_vllm.offloading import scheduler
from hotkv_vllm.offloading.connector import HotKVOffloadingConnector
from hotkv_vllm.offloading.key_space import full_key_space, is_portable, rank_factors
from hotkv_vllm.offloading.messages import PageFormat
from hotkv_vllm.offloading.tier import HELD_STEPS
from tests.doubles.host_copies import HostCopies
from tests.offloading.engines import door_config, multi
from tests.offloading.rig import Rig, keys_of, scheduler_side
from tests.pairs.table import REFUSALS
from tests.server.support import PATIENT
from tests.sparse.engines.approximate import SPARSE, Approximate, without_layers
from tests.support.waiting import wait_for
from tests.tiers.valkey_support import running
from tests.vllm.harness import Engine, prompt
from tests.vllm.oracle import answer_of
from tests.vllm.ordered_server import RealServer
from tests.vllm.other_connectors import PLAN, beside, loads_into, ours
from tests.vllm.processes import Daemon, EngineProcess, Engines, own_daemon
from tests.vllm.runs import NOISE, difference, prompts, same, usable
from tests.vllm.specs import HYBRIDS, hybrid_model, mixed_model, states_and_full_model
from tests.vllm.test_load_room import LONGEST, blocks_for_one
from tests.vllm.tiny import BLOCK_TOKENS, transfer_config, write_model
from tests.vllm.tokenizer import write_tokenizer
from tests.vllm.vision import IMAGE_TOKEN, write_vision_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RESIDENT = {"sparse": SPARSE["sparse"] | {"residency": "host", "sparse_topk": 4096}}
REFUSED: dict[str, dict[str, Any]] = {
    "sparse": SPARSE,
    "residency": RESIDENT,
    "tracing": {"tracing": "http://localhost:4318"},
}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
FEW_BLOCKS = {"num_gpu_blocks_override": 23, "max_model_len": 512}
"""Three prompts of 200 tokens fit, but not their answers."""
LENGTHS = (33, 100, 257)
TOKENS = 40


# ----------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_that_this_door_can_not_serve(name: str) -> None:
    extra = {f"hotkv.{key}": value for key, value in REFUSED[name].items()}
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
    with pytest.raises(ConfigError) as refused:
        HotKVOffloadingConnector(config, None, None)
    assert str(refused.value).startswith(REFUSALS[name, "offloading"])
    with pytest.raises(ConfigError) as by_tier:
        Rig("unix:/nothing", **extra)
    assert str(by_tier.value) == str(refused.value)


def test_pooling_with_pipeline_stages_is_refused() -> None:
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
        parallel_config=SimpleNamespace(pipeline_parallel_size=2),
        model_config=SimpleNamespace(runner_type="pooling"),
    )
    with pytest.raises(ConfigError) as refused:
        HotKVOffloadingConnector(config, None, None)
    assert str(refused.value).startswith(REFUSALS["pipeline", "pooling"])


# --------------------------------------------------------------------------------- over a real tier


def empty(rig: Rig) -> None:
    """Nothing is promoted for HELD_STEPS after a reset."""
    rig.manager.reset_cache()
    for _ in range(HELD_STEPS):
        rig.step()


def test_tenants_do_not_share(rigs: Any, daemon: Daemon) -> None:
    keys = keys_of("tenants", 20)
    rigs(daemon, **{"hotkv.tenant": "t"}).store(keys)
    assert rigs(daemon, **{"hotkv.tenant": "u"}).hits(keys) == 0
    assert rigs(daemon).hits(keys) == 0
    assert rigs(daemon, **{"hotkv.tenant": "t"}).hits(keys) == 20


def test_a_producer_stores_and_hits_nothing(
    rigs: Any, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, producer = keys_of("producer", 20), rigs(daemon)
    scheduler_side(producer.tier, monkeypatch, role="kv_producer")
    producer.store(keys)
    empty(producer)
    assert producer.hits(keys) == 0
    assert rigs(daemon).hits(keys) == 20


def test_a_consumer_hits_and_stores_nothing(
    rigs: Any, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, consumer = keys_of("consumer", 20), rigs(daemon)
    scheduler_side(consumer.tier, monkeypatch, role="kv_consumer")
    rigs(daemon).store(keys[:10])
    assert consumer.hits(keys) == 10
    consumer.store(keys)
    empty(consumer)
    assert consumer.hits(keys) == 10
    assert rigs(daemon).hits(keys) == 10


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Daemon]]:
    with contextlib.ExitStack() as stack:
        valkey = stack.enter_context(running(tmp_path_factory.mktemp("valkey")))
        made = [stack.enter_context(own_daemon()) for _ in range(2)]
        for one in made:
            one.flags = ["--tiers.valkey.address", f"unix:{valkey.path}", *PATIENT]
            one.start()
        yield made[0], made[1]


LONG_WAIT = {"hotkv.lookup_timeout_s": 20.0, "hotkv.load_timeout_s": 20.0}


def test_blocks_lost_from_host_memory_come_from_disk(rigs: Any, tmp_path: Path) -> None:
    keys = keys_of("disk", 40)
    with own_daemon() as daemon:
        daemon.flags = ["--tiers.disk.path", str(tmp_path), "--tiers.disk.bytes", "64MiB", *PATIENT]
        engine = rigs(daemon.start(), **LONG_WAIT)
        engine.store(keys)
        wait_for(lambda: daemon.counter("tier_demoted_blocks_total") >= 40, "the copy to the disk")
        wait_for(lambda: not daemon.counter("tier_unsaved_blocks"), "the records of the blocks")
        daemon.lose_arena()
        wait_for(lambda: not engine.tier.session.connected, "the end of the session")
        daemon.start()
        engine.connected()
        empty(engine)
        assert engine.hits(keys) == 40
        assert daemon.counter("tier_promoted_blocks_total") == 40


def test_other_nodes_server_hits_through_the_shared_tier(
    rigs: Any, nodes: tuple[Daemon, Daemon]
) -> None:
    keys = keys_of("shared", 40)
    copied = nodes[0].counter("shared_copied_blocks_total")
    rigs(nodes[0]).store(keys)
    wait_for(lambda: nodes[0].counter("shared_copied_blocks_total") >= copied + 40, "the copies")
    fetched = nodes[1].counter("shared_fetched_blocks_total")
    assert rigs(nodes[1], **LONG_WAIT).hits(keys) == 40
    assert nodes[1].counter("shared_fetched_blocks_total") == fetched + 40


def test_warmed_node_hits_from_its_host_memory(
    rigs: Any, nodes: tuple[Daemon, Daemon], tmp_path: Path
) -> None:
    keys, own = keys_of("warm", 40), {"hotkv.tenant": "warm"}
    copied = nodes[0].counter("shared_copied_blocks_total")
    rigs(nodes[0], **own).store(keys)
    wait_for(lambda: nodes[0].counter("shared_copied_blocks_total") >= copied + 40, "the copies")
    with AdminClient(nodes[0].target, 20.0) as client:
        (space,) = (
            one["key_space_id"]
            for one in client.key_spaces()
            if one["key_space"].get("tenant") == "warm"
        )
        warm_start.export(client, tmp_path / "blocks", space, 0)
    reader = rigs(nodes[1], **own)
    with AdminClient(nodes[1].target, 20.0) as client:
        assert warm_start.fetch(client, tmp_path / "blocks", 20.0)["fetched_block_count"] == 40
    fetched = nodes[1].counter("shared_fetched_blocks_total")
    assert reader.hits(keys) == 40
    assert nodes[1].counter("shared_fetched_blocks_total") == fetched


# ------------------------------------------------------------------------------- over a plain model


Make = Callable[..., Engine]


@pytest.fixture
def model(daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    transfer = door_config(daemon.target, 1, **{"hotkv.weights_identity": tmp_path.name})
    server: Any = RealServer(daemon.target)
    made = []

    def make(around: Any = dict, kind: type[Engine] = Engine, **settings: Any) -> Engine:
        settings["within"] = lambda _: around(transfer)
        made.append(kind(server, tmp_path / "model", monkeypatch, **settings))
        monkeypatch.setattr(made[-1].connector, "get_kv_connector_stats", lambda: None)
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


def stores(one: Engine, daemon: Daemon, num_blocks: float) -> None:
    wait_for(lambda: one.step() or daemon.counter("stored_blocks_total") >= num_blocks, "stores")


def test_streamed_inputs_blocks_are_stored_by_name(model: Make, daemon: Daemon) -> None:
    one, other = model(), model()
    before = daemon.counter("stored_blocks_total")
    one.shown["s"], one.outputs["s"] = {}, []
    for seed in range(3):
        parameters = one._parameters(5, None)
        turn = Request("s", prompt(seed, 90), *parameters, block_hasher=one.hasher, resumable=True)
        one.requests.setdefault("s", turn)
        one.scheduler.add_request(turn)
        session = one.scheduler.requests["s"]
        while session.status is not RequestStatus.WAITING_FOR_STREAMING_REQ:
            one.step()
    tokens = list(session.all_token_ids)[:-1]
    one.abort("s")
    stores(one, daemon, before + len(tokens) // BLOCK_TOKENS)
    assert asked_again(other, tokens) == usable(tokens)


@pytest.mark.parametrize("is_canonical", [False, True])
def test_engines_share_whatever_the_scheduler_sees_of_loading(
    model: Make, is_canonical: bool
) -> None:
    """Loading a model changes vLLM's quantization config, with several ranks only theirs."""
    door = model().connector._door
    offloading = replace(door._tier.config, canonical_layout=is_canonical)
    assert is_portable(offloading) == is_canonical
    loaded, unloaded = (copy.copy(door._vllm_config) for _ in range(2))
    loaded.quant_config, unloaded.quant_config = Fp8Config(True), Fp8Config(True)
    one: Any = SimpleNamespace(
        quant_config=loaded.quant_config,
        hf_to_vllm_mapper=None,
        packed_modules_mapping=LlamaForCausalLM.packed_modules_mapping,
    )
    SupportsQuant._maybe_apply_model_mapping(one)
    groups = door._kv_cache_config
    said = PageFormat(0, "page", factors=rank_factors(loaded, groups, offloading))
    own, apart = (
        full_key_space(scheduler_sees, groups, offloading, 4096, [said], door._config, "w")
        for scheduler_sees in (loaded, unloaded)
    )
    assert own.fingerprint == apart.fingerprint
    assert rank_factors(unloaded, groups, offloading) != said.factors


def asked_again(engine: Engine, tokens: list[int]) -> int:
    engine.add("again", tokens, 4)
    wait_for(lambda: engine.step() or "again" in engine.finished, "the answer")
    assert engine.outputs["again"] == answer_of(tokens, 4)
    return engine.external["again"]


def until_idle(engine: Engine) -> None:
    transfers = engine.connector._door._tier.transfers
    wait_for(lambda: engine.step() or transfers.is_idle, "the end of all transfers")


def usage(daemon: Daemon) -> dict[str, Any]:
    total: dict[str, Any] = daemon.admin("savings")["total"]
    return total


def test_hits_in_vllms_tier_are_no_savings(model: Make, daemon: Daemon) -> None:
    """The server must see the blocks as used, though it is a hit on the device."""
    one, other, first = model(), model(), usage(daemon)["request_count"]
    tokens, before = prompt(70, 200), daemon.counter("stored_blocks_total")
    one.generate("cold", tokens)
    stores(one, daemon, before + 6)
    one.drop_local()
    wait_for(lambda: one.step() or usage(daemon)["request_count"] > first, "the first report")
    wait_for(lambda: min(idle_s(daemon)) > 0.1)
    was, asked_s = usage(daemon), time.monotonic()
    assert one.generate("again", tokens)[1] == 192
    wait_for(lambda: one.step() or usage(daemon)["request_count"] > was["request_count"])
    now = usage(daemon)
    assert now["device_hit_token_count"] == was["device_hit_token_count"] + 192
    assert now["hits"] == was["hits"]
    # Earlier uses lie more than .1 s before; the server counts in ticks of 1/64 s.
    assert max(idle_s(daemon)[:6]) < time.monotonic() - asked_s + 0.1
    assert other.generate("warm", tokens)[1] == 192
    wait_for(lambda: other.step() or usage(daemon)["request_count"] > now["request_count"])
    assert usage(daemon)["hits"]["host"] == was["hits"].get("host", 0) + 192


def idle_s(daemon: Daemon) -> list[float]:
    return sorted(one["idle_s"] for one in daemon.admin("blocks", page_size=1000)["blocks"])


@pytest.mark.parametrize("limit", [{"max_load_tokens": 0}, {"kv_load_tiers": []}], ids=str)
def test_tokens_vllm_may_not_load_are_not_asked(
    model: Make, daemon: Daemon, limit: dict[str, Any]
) -> None:
    one, other = model(), model()
    tokens, before = prompt(71, 200), daemon.counter("stored_blocks_total")
    first = usage(daemon)["request_count"]
    one.generate("cold", tokens)
    stores(one, daemon, before + 6)
    wait_for(lambda: one.step() or usage(daemon)["request_count"] > first, "the first report")
    was = usage(daemon)
    other.add("limited", tokens, 1, transfer=limit)
    wait_for(lambda: other.step() or usage(daemon)["request_count"] > was["request_count"])
    other.run()
    assert other.external["limited"] == 0
    misses = usage(daemon)["misses"]
    assert misses["not_asked"] == was["misses"].get("not_asked", 0) + 192


def test_prompt_for_another_connector_is_not_promoted(
    model: Make, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MultiConnector loads from one connector; after the other's fetch hotkv must load."""
    one, other = model(), model(beside("LoadingConnector", ours_first=True))
    known, before = prompt(72, 96), daemon.counter("stored_blocks_total")
    one.generate("cold", known)
    stores(one, daemon, before + 3)
    other.generate("connects", prompt(9, 5), 2)
    monkeypatch.setattr(PLAN, "fill", loads_into(other))
    monkeypatch.setitem(PLAN.tokens, "fetched", 192)
    for name, is_due in (("fetched", True), ("failed", False)):
        tokens = known + prompt(73 + is_due, 104)
        fetch = {"do_remote_prefill": is_due, "remote_engine_id": "far"}
        other.add(name, tokens, 4, transfer=fetch)
        wait_for(partial(steps_until_finished, other, name), "the answer")
        assert other.outputs[name] == answer_of(tokens, 4)
        assert other.external[name] == (192 if is_due else 96)
        assert any(meta.load_jobs for meta in offloading_metas(other)) == (not is_due)
        other.drop_local()


@pytest.mark.parametrize("pause", ["", "before", "during"])
def test_decode_engine_waits_for_a_prompt_computed_elsewhere(
    model: Make, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, pause: str
) -> None:
    """A pause must not end the wait."""
    one, other = model(), model(lambda both: both | {"kv_role": "kv_consumer"})
    monkeypatch.setattr(other.connector._door._prefill, "seconds", lambda *_: 60.0)
    monkeypatch.setattr(scheduler.checks, "is_pausing", lambda: True)
    tokens, before = prompt(77, 200), daemon.counter("stored_blocks_total")
    one.generate("begins", tokens[:100])
    stores(one, daemon, before + 3)
    assert pause != "before" or other.connector.reset_cache()
    other.add("decodes", tokens, 4)
    other.steps(5)
    assert pause != "during" or other.connector.reset_cache()
    other.steps(5)
    one.generate("ends", tokens)
    stores(one, daemon, before + 6)
    wait_for(partial(steps_until_finished, other, "decodes"), "the answer")
    assert other.outputs["decodes"] == answer_of(tokens, 4)
    assert other.external["decodes"] == 192


@pytest.mark.parametrize("specs", HYBRIDS)
def test_requests_that_load_together_all_end(model: Make, daemon: Daemon, specs: Any) -> None:
    """vLLM counts too few blocks for windows and chunked attention: all loads would begin, none
    run."""
    settings: dict[str, Any] = {"specs": specs(), "around": with_rows, "max_tokens_per_step": 128}
    num_needed, num_loads = blocks_for_one(model(**settings)), 0
    for seed in range(6):
        dice = random.Random(seed)
        prompts = [prompt(10 * seed + at, dice.randrange(200, LONGEST)) for at in range(6)]
        tight = model(blocks=1 + num_needed + dice.randrange(12), **settings)
        for at, tokens in enumerate(prompts):
            tight.generate(f"first {at}", tokens[: dice.randrange(100, len(tokens))])
        until_idle(tight)
        assert tight.scheduler.reset_prefix_cache()
        for at, tokens in enumerate(prompts):
            tight.add(f"{at}", tokens, 3)
        wait_for(lambda tight=tight: tight.step() or len(tight.finished) == 12, "all answers")
        num_loads += sum(bool(tight.external[f"{at}"]) for at in range(6))
        for at, tokens in enumerate(prompts):
            assert tight.outputs[f"{at}"] == answer_of(tokens, 3)
    assert num_loads > 6


@pytest.mark.parametrize("fails", [False, True])
def test_loads_of_another_connector_count_as_loads(
    model: Make, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """The device is one block short for both requests."""

    def around(transfer: dict[str, Any]) -> dict[str, Any]:
        both = beside("LoadingConnector", ours_first=False)(with_rows(transfer))
        return both | {"kv_load_failure_policy": "recompute"}

    settings: dict[str, Any] = {"specs": hybrid_model(), "max_tokens_per_step": 128}
    roomy = model(**settings)
    blocks = blocks_for_one(roomy) + blocks_for_one(roomy, 140)
    one = model(around, blocks=blocks, **settings)
    small, large = prompt(78, 140), prompt(79, LONGEST)
    one.generate("stores", small, 2)
    transfers = one.connector.sub_connectors[1]._door._tier.transfers
    wait_for(lambda: one.step() or transfers.is_idle, "the end of all stores")
    assert one.scheduler.reset_prefix_cache()
    for name, value in (("fill", loads_into(one)), ("is_async", True), ("holds", True)):
        monkeypatch.setattr(PLAN, name, value)
    monkeypatch.setitem(PLAN.tokens, "large", LONGEST // BLOCK_TOKENS * BLOCK_TOKENS)
    one.add("large", large, 2)
    one.steps(4)
    assert PLAN.loading
    one.add("small", small, 2)
    one.steps(6)
    assert not any(meta.load_jobs for meta in offloading_metas(one))
    monkeypatch.setattr(PLAN, "fails", fails)
    monkeypatch.setattr(PLAN, "holds", False)
    wait_for(lambda: one.step() or len(one.finished) == 3, "all answers")
    assert one.external["small"] == 128
    assert one.outputs["small"] == answer_of(small, 2)
    assert one.outputs["large"] == answer_of(large, 2)


def with_rows(transfer: dict[str, Any]) -> dict[str, Any]:
    extra = transfer["kv_connector_extra_config"] | {"cpu_bytes_to_use": 32 << 20}
    return transfer | {"kv_connector_extra_config": extra}


def steps_until_finished(engine: Engine, name: str) -> bool:
    engine.step()
    return name in engine.finished


def offloading_metas(engine: Engine) -> list[OffloadingConnectorMetadata]:
    """Of all steps, also within a MultiConnector."""
    parts = (part for meta in engine.metas for part in getattr(meta, "metadata", (meta,)))
    return [part for part in parts if isinstance(part, OffloadingConnectorMetadata)]


def test_hit_that_lost_a_chunk_is_asked_again(
    model: Make, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promoting a window's chunk takes the row of a chunk that the same lookup found. vLLM alone
    would crash."""
    settings: dict[str, Any] = {"specs": hybrid_model()}
    one, other = model(**settings), model(**settings)
    tokens, before = prompt(74, 200), daemon.counter("stored_blocks_total")
    for name, length in (("shorter", 130), ("whole", 200)):
        one.generate(name, tokens[:length])
    stores(one, daemon, before + 16)
    for name, length in (("whole", 200), ("shorter", 130)):
        assert other.generate(name, tokens[:length])[1] == length // BLOCK_TOKENS * BLOCK_TOKENS
        other.drop_local()
    manager, session = other.connector.scheduler.manager, other.connector._door._tier.session
    primary, asks = manager.primary_tier, other.requests["whole"]
    full, *windows = (
        [make_offload_key(block_hash, group) for block_hash in asks.block_hashes[:6]]
        for group in range(3)
    )
    for key in (key for keys in windows for key in keys[4:]):
        primary._free_chunk(primary._policy.get(key))
        primary._policy.remove(key)
        primary._num_evictable_cache_chunks -= 1
    context = ReqContext("fills")
    others = keys_of("fills", primary._get_num_free_chunks())
    primary.prepare_store(others, context)
    primary.complete_store(others, context)
    primary.touch([*full[1:], *windows[0][:4], *windows[1][:4], *others], context)
    gone = {bytes(asks.block_hashes[4])}
    probe = session.probe

    def without_one(group: int, hashes: list[bytes]) -> Any:
        is_gone = [group > 0 and block_hash in gone for block_hash in hashes]
        return probe(group, hashes) & ~np.array(is_gone, bool)

    monkeypatch.setattr(session, "probe", without_one)
    assert asked_again(other, tokens) == 128


def chunked(transfer: dict[str, Any]) -> dict[str, Any]:
    more = {"blocks_per_chunk": 4, "cpu_bytes_to_use": 8 << 20}
    return transfer | {"kv_connector_extra_config": transfer["kv_connector_extra_config"] | more}


def by_default(transfer: dict[str, Any]) -> dict[str, Any]:
    extra = dict(transfer["kv_connector_extra_config"])
    del extra["blocks_per_chunk"]
    return transfer | {"kv_connector_extra_config": extra}


def test_hits_end_at_64_tokens_by_default(model: Make, daemon: Daemon) -> None:
    one, other = model(by_default), model(by_default)
    tokens, before = prompt(71, 100), daemon.counter("stored_blocks_total")
    one.generate("cold", tokens)
    stores(one, daemon, before + 1)
    assert asked_again(other, tokens) == 64


@pytest.mark.parametrize("interval", [128, None])
def test_chunk_is_whole_although_another_hits_part(
    model: Make, daemon: Daemon, interval: int | None
) -> None:
    """Half a chunk is hit while another request computes the rest, which vLLM takes for
    reallocated."""

    settings = {"specs": hybrid_model(), "prefix_cache_retention_interval": interval}
    one, other = (model(chunked, **settings) for _ in range(2))
    tokens, before = prompt(80, 340), daemon.counter("stored_blocks_total")
    one.add("first", tokens, 60)
    wait_for(lambda: one.step() or len(one.outputs["first"]) >= 5)
    one.add("second", tokens[:325] + prompt(81, 20), 1)
    wait_for(lambda: one.step() or "second" in one.finished)
    assert one.local["second"] == 320
    one.run()
    # Three of full attention, two or more of each window group.
    stores(one, daemon, before + 7)
    tokens += one.outputs["first"]
    until_idle(one)
    assert asked_again(other, tokens[:390]) == 384


def test_blocks_before_an_in_use_reset_stay_unstored(model: Make, daemon: Daemon) -> None:
    """vLLM keeps the old blocks on the device."""
    one = model()
    one.generate("first", prompt(120, 100), 2)
    one.add("runs", prompt(121, 10), 20)
    one.step()
    assert not one.scheduler.reset_prefix_cache(reset_connector=True)
    before = daemon.counter("stored_blocks_total")
    one.generate("hits", prompt(120, 110), 2)
    assert one.local["hits"] == 96
    one.generate("new", prompt(122, 100), 2)
    stores(one, daemon, before + 3)
    until_idle(one)
    assert daemon.counter("stored_blocks_total") == before + 3
    assert model().generate("again", prompt(120, 100), 2)[1] == 0


def test_early_reset_ends_before_the_first_request(model: Make, daemon: Daemon) -> None:
    """Else the first request would carry out the flush, and delete what others stored."""
    other, one = model(), model(beside("LoadingConnector", ours_first=True))
    before = daemon.counter("stored_blocks_total")
    other.generate("first", prompt(125, 100), 2)
    stores(other, daemon, before + 3)
    assert one.scheduler.reset_prefix_cache(reset_connector=True)
    one.run()
    assert other.scheduler.reset_prefix_cache()
    other.generate("second", prompt(126, 100), 2)
    stores(other, daemon, before + 6)
    assert asked_again(one, prompt(126, 100)) == 96
    assert one.generate("old", prompt(125, 100), 2)[1] == 0


def test_running_request_loads_after_a_partial_reset(
    model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one step vLLM lists the request as preempted and loads it."""
    one = model()
    one.add("a", prompt(130, 100), 40)
    wait_for(lambda: one.step() or len(one.outputs["a"]) > 5, "stores")
    assert one.scheduler.reset_prefix_cache(reset_running_requests=True)
    one.run()
    assert one.outputs["a"] == answer_of(prompt(130, 100), 40)
    assert any(meta.load_jobs for meta in one.metas)
    # hotkv is off, for example at an unknown vLLM: it must not read attributes of vLLM's
    # offloading.
    off: Any = object.__new__(HotKVOffloadingConnector)
    for callback, arguments in (
        ("build_connector_meta", ("step",)),
        ("request_finished", ("a", [])),
        ("request_finished_all_groups", ("a", ([],))),
    ):
        monkeypatch.setattr(
            type(off).__base__, callback, lambda _, *said, callback=callback: (callback, said)
        )
        assert getattr(off, callback)(*arguments) == (callback, arguments)


@pytest.mark.parametrize("ours_first", [True, False])
def test_sparse_answers_of_another_connector_are_not_stored(
    model: Make, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, ours_first: bool
) -> None:
    without_layers(monkeypatch)

    own = transfer_config(**SPARSE, tenant="own")

    def around(door: dict[str, Any]) -> dict[str, Any]:
        return multi([door, own] if ours_first else [own, door])

    one, other = model(around, Approximate), model()
    tokens, before = prompt(140, 110), daemon.counter("stored_blocks_total")
    one.generate("connects", prompt(9, 5), 2)
    one.add("a", tokens, 60)
    one.run()
    assert one.num_sparse_rows
    one.generate("next", prompt(141, 100), 2)
    stores(one, daemon, before + 6)
    assert asked_again(other, [*tokens, *one.outputs["a"]]) == 96
    ended = [ours(meta).companion.rows.ended for meta in one.metas]
    assert sum("a" in one for one in ended) == 1, "the workers hear of each end once"


def test_chunk_without_its_ends_windows_is_not_stored(model: Make, daemon: Daemon) -> None:
    """Of that chunk the request has only the last block."""
    settings: dict[str, Any] = {"around": chunked, "specs": hybrid_model()}
    one, other = (model(**settings) for _ in range(2))
    tokens, before = prompt(82, 300), daemon.counter("stored_blocks_total")
    one.add("first", tokens, transfer={"max_offload_tokens": 0})
    one.run()
    one.add("second", tokens, 5)
    one.run()
    assert one.local["second"] == 288
    stores(one, daemon, before + 2)
    until_idle(one)
    asked_again(other, tokens[:270])


@pytest.mark.parametrize("limit", [0, 64])
def test_partial_block_beyond_the_limit_is_not_stored(
    model: Make, daemon: Daemon, limit: int
) -> None:
    """vLLM 0.32 alone stores the block at a limit of 0, and crashes at others."""
    one = model(specs=states_and_full_model(), prefix_match_unit=BLOCK_TOKENS // 2)
    before = daemon.counter("stored_blocks_total")
    one.add("a", prompt(150 + limit, 120), 60, transfer={"max_offload_tokens": limit})
    one.run()
    until_idle(one)
    assert daemon.counter("stored_blocks_total") == before + limit // BLOCK_TOKENS


def test_stores_end_before_another_connectors_loads(
    model: Make, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are delayed until vLLM waits: else they would take the other's KV."""
    copy, copies = HostCopies._copy, dict[int, Any]()

    def later(*what: Any, to_row: bool) -> bool:
        copies[what[1]] = (*what, to_row)
        return True

    one = model(beside("LoadingConnector", ours_first=False), blocks=12)
    other = model(blocks=12)
    one.generate("connects", prompt(9, 5), 2)
    before, first, second = daemon.counter("stored_blocks_total"), prompt(1, 200), prompt(2, 200)
    with monkeypatch.context() as late:
        late.setattr(HostCopies, "_copy", later)
        late.setattr(
            HostCopies, "wait", lambda _, jobs: [copy(*copies.pop(job)) for job in jobs & {*copies}]
        )
        late.setattr(PLAN, "is_async", True)
        late.setattr(PLAN, "fill", loads_into(one))
        one.add("a", first, 1)
        one.step()
        PLAN.tokens["b"] = 192
        one.add("b", second, 2)
        wait_for(lambda: one.step() or "b" in one.finished, "the answer")
    for what in copies.values():
        copy(*what)
    stores(one, daemon, before + 6)
    assert asked_again(other, first) == 192


@pytest.mark.parametrize("pipelined", [False, True], ids=["plain", "pipelined"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_blocks_another_connector_failed_are_not_stored(
    model: Make, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, policy: str, pipelined: bool
) -> None:
    """When the load fails, vLLM has planned stores of its blocks."""

    def around(ours: dict[str, Any]) -> dict[str, Any]:
        both = beside("LoadingConnector", ours_first=False)(ours)
        return both | {"kv_load_failure_policy": policy}

    one, other = model(around, pipelined=pipelined), model()
    tokens, before = prompt(90, 200), daemon.counter("stored_blocks_total")
    one.generate("connects", prompt(9, 5), 2)
    for layer in one.tensors:
        one._cells(layer)[:] = 7
    PLAN.tokens["a"] = 192
    with monkeypatch.context() as lax:
        lax.setattr(PLAN, "fails", True)
        lax.setattr(one, "_check", lambda *_: None)
        one.add("a", tokens, 4)
        one.add("shares", tokens, 4)
        one.step()
        if not pipelined:
            # vLLM drops what the failed step sampled.
            one.tokens |= {"a": list(tokens), "shares": list(tokens)}
        one.step()
    one.run()
    one.generate("next", prompt(91, 100), 2)
    stores(one, daemon, before + 3)
    for engine in (one, other):
        engine.drop_local()
        asked_again(engine, tokens)


def test_half_computed_erroring_prompt_is_not_stored(model: Make, daemon: Daemon) -> None:
    """vLLM then calls the whole prompt computed."""
    one, other = (model(max_tokens_per_step=120) for _ in range(2))
    tokens, before = prompt(95, 200), daemon.counter("stored_blocks_total")
    one.add("a", tokens, 4)
    one.step()
    one.scheduler.finish_requests("a", RequestStatus.FINISHED_ERROR)
    one.run()
    one.generate("next", prompt(96, 100), 2)
    stores(one, daemon, before + 6)
    assert asked_again(other, tokens) == 96


def test_blocks_lost_before_last_token_are_not_stored(model: Make, daemon: Daemon) -> None:
    """The blocks may be overwritten. A `kv_producer` does not wait for the step."""
    only_stores = {"kv_role": "kv_producer"}
    one, other = model(lambda both: both | only_stores, pipelined=True, blocks=7), model()
    tokens, before = prompt(97, 90), daemon.counter("stored_blocks_total")
    one.add("longer", prompt(98, 90), 30)
    one.add("a", tokens, 7)
    one.run()
    assert one.requests["a"].num_preemptions
    one.generate("next", prompt(99, 100), 2)
    stores(one, daemon, before + 8)
    tokens += one.outputs["a"]
    assert asked_again(other, tokens) == 64


def test_blocks_zeroed_by_runner_v2_are_not_stored(model: Make, daemon: Daemon) -> None:
    """Runner V2 stores in the next step, which first zeroes reallocated blocks."""
    settings = {"specs": mixed_model(), "blocks": 44, "max_model_len": 416}
    one, other = (model(v2=v2, max_tokens_per_step=512, **settings) for v2 in (True, False))
    tokens, before = prompt(100, 161), daemon.counter("stored_blocks_total")
    one.add("a", tokens)
    one.step()
    one.generate("b", prompt(101, 400), 2)
    one.generate("next", prompt(102, 100), 2)
    stores(one, daemon, before + 6)
    for engine in (one, other):
        engine.drop_local()
        asked_again(engine, tokens)


# ---------------------------------------------------------------------------------- in real engines


class Stage:
    def __init__(self, folder: Path, daemon: Daemon) -> None:
        self.folder, self.daemon = folder, daemon
        self.engines = Engines(folder)
        self.model = write_tokenizer(write_model(folder / "model"))
        self._made: dict[str, EngineProcess] = {}

    def start(self, *, model: Path | None = None, target: str = "", **more: Any) -> EngineProcess:
        """target: "none" for no connector."""
        model = model or self.model
        settings: dict[str, Any] = {
            "load_format": "random",
            "dtype": "float32",
            "max_model_len": 1024,
            "kv_cache_memory_bytes": 64 << 20,
            "driver": "every_driver.py",
            "skip_tokenizer_init": False,
        }
        if target != "none":
            identity = {"hotkv.weights_identity": str(model)}
            settings["kv_transfer_config"] = door_config(self.daemon.target, **identity)
        return self.engines.start(model, None, **settings | more)

    def _once(self, name: str, **settings: Any) -> EngineProcess:
        if name not in self._made:
            self._made[name] = self.start(enable_prompt_embeds=True, **settings)
        return self._made[name]

    @property
    def plain(self) -> EngineProcess:
        return self._once("plain", target="none")

    @property
    def one(self) -> EngineProcess:
        return self._once("one")

    @property
    def num_stored(self) -> int:
        return int(self.daemon.counter("stored_blocks_total"))

    def twice(
        self,
        engine: EngineProcess,
        requests: list[dict[str, Any]],
        num_blocks: int,
        operation: str = "sample",
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        more = {} if operation == "embed" else {"params": {"max_tokens": TOKENS}}
        until = self.num_stored + num_blocks
        cold = engine.ask(operation, requests=requests, **more)

        def short() -> None:
            engine.ask(operation, requests=[{"tokens": [7, 8, 9]}])

        def is_stored() -> bool:
            short()
            return self.num_stored >= until

        wait_for(is_stored, f"the store of {num_blocks} blocks")
        engine.ask("pause")
        for _ in range(HELD_STEPS):
            short()
        warm = engine.ask(operation, requests=requests, **more)
        assert "broke" not in engine.log(), engine.log()[-3000:]
        return cold, warm


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, daemon: Daemon) -> Iterator[Stage]:
    one = Stage(tmp_path_factory.mktemp("stage"), daemon)
    yield one
    one.engines.stop()


def texts(seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, Any]]:
    return [{"tokens": tokens} for tokens in prompts(seed, lengths)]


def hits(batch: list[dict[str, Any]]) -> list[int]:
    return [usable(one["tokens"]) for one in batch]


def num_blocks(batch: list[dict[str, Any]], num_tokens: int = TOKENS) -> int:
    """The KV of an answer's last token is never computed."""
    return sum((len(one["tokens"]) + num_tokens - 1) // BLOCK_TOKENS for one in batch)


def twice_as_plain(
    stage: Stage, engine: EngineProcess, batch: list[dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    cold, warm = stage.twice(engine, batch, num_blocks(batch))
    plain = stage.plain.ask("sample", requests=batch, params={"max_tokens": TOKENS})
    assert same(plain, cold) and same(plain, warm)
    return cold, warm


def next_turns_as_plain(
    stage: Stage, engine: EngineProcess, batch: list[dict[str, Any]], answers: dict[str, Any]
) -> None:
    turns = [
        {"tokens": one["tokens"] + answer}
        for one, answer in zip(batch, answers["tokens"], strict=True)
    ]
    found, plain = (each.ask("sample", requests=turns) for each in (engine, stage.plain))
    assert same(found, plain)


def test_a_pause_keeps_the_cache_of_the_server(stage: Stage) -> None:
    batch = texts(1)
    cold, warm = stage.twice(stage.one, batch, num_blocks(batch))
    assert cold["cached"] == [0] * len(batch) and warm["cached"] == hits(batch)
    assert same(cold, warm)


def test_embeddings_meet_only_where_they_are_equal(stage: Stage) -> None:
    """vLLM gives all embeddings the same token ids."""
    cold, warm = stage.twice(stage.one, [{"embeds": [1, 200]}], (200 + TOKENS - 1) // BLOCK_TOKENS)
    assert cold["cached"] == [0] and warm["cached"] == [192] and same(cold, warm)
    other = stage.one.ask("sample", requests=[{"embeds": [2, 200]}])
    assert other["cached"] == [0] and difference(cold, other) > 20 * NOISE


def test_hints_and_sessions_reach_the_server(stage: Stage) -> None:
    (text,) = prompts(2, (300,))

    def ask(kind: str, payload: dict[str, Any]) -> None:
        action = {"action_id": "a", "action_type": kind, "action_version": "1.0"}
        asked = {
            "protocol_version": "0.1",
            "message_id": kind,
            "actions": [action | {"payload": payload}],
        }
        stage.one.ask("hinted", prompt=text, max_tokens=TOKENS, hints=asked, session="chat")

    def told(what: str, **of: Any) -> Any:
        stage.one.ask("sample", requests=[{"tokens": [7, 8, 9]}])
        return stage.daemon.admin(what, **of)

    ask("pin", {"ttl_s": 600})
    wait_for(lambda: told("explain_session", session_id="chat"), "the session")
    ask("release", {})

    def done() -> dict[str, int]:
        outcomes = told("hints")["outcomes"]
        return {one["action_type"]: one["done_block_count"] for one in outcomes}

    num_blocks = (len(text) + TOKENS - 1) // BLOCK_TOKENS
    wait_for(lambda: done() == {"pin": num_blocks, "release": num_blocks}, "both hints")
    for row in told("sessions"):
        assert row["engine_name"].startswith(f"{socket.gethostname()}:")
        assert Path(row["model_name"]).is_dir() and row["model"] == "LlamaForCausalLM"


def test_requests_that_are_preempted(stage: Stage) -> None:
    batch = texts(3, (200,) * 6)
    engine = stage.start(**FEW_BLOCKS)
    _, warm = twice_as_plain(stage, engine, batch)
    assert engine.ask("preempted")["requests"] > 0 and sum(warm["cached"]) > 0


@pytest.mark.long
def test_drafts_that_are_rejected_are_not_stored(stage: Stage) -> None:
    batch = texts(4)
    for one in batch:
        one["tokens"] = one["tokens"][:20] * (len(one["tokens"]) // 20 + 1)
    engine = stage.start(speculative_config=NGRAM)
    cold, warm = twice_as_plain(stage, engine, batch)
    assert engine.ask("drafted")["tokens"] > 0 and warm["cached"] == hits(batch)
    next_turns_as_plain(stage, engine, batch, cold)


@pytest.mark.long
def test_asynchronous_scheduling(stage: Stage) -> None:
    """vLLM turns it off in CPU engines."""
    batch = texts(5, (200,) * 4)
    engine = stage.start(config_overrides={"scheduler_config.async_scheduling": True}, **FEW_BLOCKS)
    cold, warm = twice_as_plain(stage, engine, batch)
    assert sum(warm["cached"]) > 0
    next_turns_as_plain(stage, engine, batch, cold)


@pytest.mark.long
def test_vectors_are_equal_after_a_hit(stage: Stage) -> None:
    batch = texts(6)
    engine = stage.start(runner="pooling", convert="embed")
    cold, warm = stage.twice(engine, batch, num_blocks(batch, 1), "embed")
    assert cold["cached"] == [0] * len(batch) and warm["cached"] == hits(batch)
    for mine, theirs in zip(cold["vectors"], warm["vectors"], strict=True):
        assert mine == pytest.approx(theirs, abs=NOISE)


def picture(seed: int) -> dict[str, Any]:
    """218 tokens: 40 of text, an image, more text."""
    (tokens,) = prompts(7, (200,))
    return {"tokens": [*tokens[:40], IMAGE_TOKEN, *tokens[40:]], "images": [seed]}


@pytest.mark.long
def test_pictures_meet_only_where_they_are_equal(stage: Stage) -> None:
    engine = stage.start(model=write_vision_model(stage.folder / "vision"))
    cold, warm = stage.twice(engine, [picture(1)], (218 + TOKENS - 1) // BLOCK_TOKENS)
    assert cold["cached"] == [0] and warm["cached"] == [192] and same(cold, warm)
    other = engine.ask("sample", requests=[picture(2)])
    assert other["cached"] == [32] and difference(cold, other) > 20 * NOISE
