"""hotkv's tier below vLLM's real primary tier: no request waits for ever, even where vLLM alone
would."""

import os
import signal
import tempfile
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingKVEventsConfig,
    OffloadPolicy,
    get_offload_block_hash,
)
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from hotkv_proto.blocks import Retention
from hotkv_proto.reports import Miss
from hotkv_vllm import link
from hotkv_vllm.offloading import scheduler, tier
from hotkv_vllm.offloading.promotions import SHARE_ALONE
from hotkv_vllm.offloading.region import NoRegion, region_of
from hotkv_vllm.offloading.scheduler import DoorScheduler
from hotkv_vllm.offloading.tier import CALLBACK_ERRORS, HELD_STEPS
from tests.offloading.rig import CHUNK_TOKENS, Rig, keys_of, scheduler_side
from tests.server.routers import external
from tests.support.waiting import WAIT_S, stop, wait_for
from tests.vllm import processes
from tests.vllm.processes import Daemon

IMPATIENT = {"hotkv.lookup_timeout_s": 0.25}


def test_another_engine_hits_what_one_has_stored(rigs):
    keys = keys_of("shared", 40)
    rigs().store(keys)
    other = rigs()
    assert other.hits(keys) == 40
    assert other.hits(keys) == 40, "from its primary tier"
    assert rigs(**{"hotkv.weights_identity": "other"}).hits(keys) == 0


def test_groups_of_a_hybrid_model_are_kept_apart(rigs):
    keys = [*keys_of("hybrid", 10), *keys_of("hybrid", 10, group=1)]
    rigs(num_groups=2).store(keys[5:])
    other = rigs(num_groups=2)
    context = other.request(keys)
    assert other.lookup(context, keys[10:]) == 10
    other.load(context, keys[10:])
    assert other.hits(keys[:10]) == 0


@pytest.mark.parametrize("count", [64, 65, 200])
def test_prompt_larger_than_primary_tier_gets_part(rigs, count):
    """vLLM alone would defer the prompt for ever."""
    keys = keys_of(f"large {count}", count)
    rigs(num_rows=256).store(keys)
    assert rigs(num_rows=64).hits(keys) == min(count, int(SHARE_ALONE * 64))


def test_hybrid_prompt_larger_than_primary_tier_fits(rigs):
    """Full attention takes all rows for promotions, and the hit needs one more."""
    full, window = keys_of("full", 100), keys_of("window", 100, group=1)
    writer = rigs(num_rows=256, num_groups=2)
    writer.store(full)
    writer.store(window)
    reader = rigs(num_rows=64, num_groups=2)
    context = reader.request(full)
    for number, key in enumerate(window):
        context.set_offload_key_position(key, CHUNK_TOKENS * (number + 1))

    def hits() -> int | None:
        reader.step()
        found = reader.lookup_once(context, full)
        for number in reversed(range(len(full) if found is None else found)):
            answer = reader.manager.lookup(window[number], context)
            if answer is not LookupResult.MISS:
                return number + 1 if found and answer is LookupResult.HIT else None
        return found and 0

    wait_for(lambda: hits() is not None, "the end of all promotions")
    assert hits() == int(SHARE_ALONE * 64)
    reader.load(context, [])


def test_lease_refusing_shown_blocks_is_a_miss(rigs, monkeypatch):
    reader, keys = rigs(), keys_of("never stored", 30)
    monkeypatch.setattr(reader.tier.session, "probe", lambda _, hashes: np.ones(len(hashes), bool))
    assert reader.hits(keys) == 0


def test_a_lease_of_a_part_loads_the_part(rigs, monkeypatch):
    keys = keys_of("stored in part", 30)
    rigs().store(keys[:20])
    reader = rigs()
    reader.step()
    monkeypatch.setattr(reader.tier.session, "probe", lambda _, hashes: np.ones(len(hashes), bool))
    assert reader.hits(keys) == 20


def test_without_a_table_the_server_is_asked(rigs, monkeypatch):
    keys = keys_of("asked", 20)
    rigs().store(keys)
    reader = rigs(**{"hotkv.use_table": False})
    assert reader.hits(keys) == 20
    refused = Future()
    refused.set_exception(RuntimeError("no"))
    monkeypatch.setattr(reader.tier.session, "lookup", lambda *_: refused)
    context = reader.request(keys_of("refused", 2))
    assert reader.lookup(context, keys_of("refused", 2)) == 0
    assert reader.tier.miss_of(context.req_id) is Miss.REFUSED


@pytest.mark.parametrize(("has_tiers", "has_table"), [(False, True), (True, True), (False, False)])
def test_a_waiting_request_finds_what_is_stored_meanwhile(rigs, monkeypatch, has_tiers, has_table):
    reader = rigs(**{"hotkv.use_table": has_table})
    keys = keys_of(f"meanwhile {has_tiers} {has_table}", 4)
    monkeypatch.setattr(type(reader.tier.session), "has_tiers", has_tiers)
    context = reader.request(keys)
    assert reader.lookup(context, keys) == 0
    rigs().store(keys)
    wait_for(lambda: reader.lookup(context, keys) == 4)


def test_hit_ending_below_host_memory_loads_whole(rigs, monkeypatch):
    """The block table has ten blocks, the server twenty."""
    keys = keys_of("end on the disk", 20)
    rigs().store(keys)
    reader = rigs()
    session, in_table = reader.tier.session, {get_offload_block_hash(key) for key in keys[:10]}
    monkeypatch.setattr(type(session), "has_tiers", True)
    monkeypatch.setattr(
        session, "probe", lambda _, hashes: np.array([one in in_table for one in hashes])
    )
    assert reader.hits(keys) == 20


def test_all_lookups_of_a_step_agree(rigs, monkeypatch):
    """vLLM looks up windows from the end; the answer comes in between."""
    keys, answer = keys_of("from the end", 4), Future()
    rigs().store(keys)
    reader = rigs(**{"hotkv.use_table": False})
    monkeypatch.setattr(reader.tier.session, "lookup", lambda _: answer)
    context = reader.request(keys)
    assert reader.manager.lookup(keys[3], context) is LookupResult.RETRY
    answer.set_result([np.ones(4, bool)])
    for key in reversed(keys[:3]):
        reader.manager.lookup(key, context)
    reader.step()
    assert reader.lookup(context, keys) == 4


@pytest.mark.parametrize("has_tiers", [False, True])
def test_late_named_chunks_are_looked_up_together(rigs, monkeypatch, has_tiers):
    """vLLM names such chunks one by one within a lookup."""
    keys, tails = keys_of("whole chunks", 20), keys_of("ends within a block", 30)
    rigs().store(tails[-1:])
    reader = rigs()
    monkeypatch.setattr(tier, "PROBE_AGAIN_S", 60.0)
    session, probed, asked = reader.tier.session, list[bytes](), list[int]()
    probe, ask = session.probe, session.lookup
    monkeypatch.setattr(type(session), "has_tiers", has_tiers)
    monkeypatch.setattr(session, "probe", lambda *a: probed.extend(a[1]) or probe(*a))
    monkeypatch.setattr(session, "lookup", lambda *a: asked.append(1) or ask(*a))
    context = reader.request(keys)

    def answers() -> set[LookupResult]:
        reader.step()
        if reader.lookup_once(context, keys) is None:
            return {LookupResult.RETRY}
        found = set()
        for number, key in enumerate(tails):
            context.set_offload_key_position(key, CHUNK_TOKENS * len(keys) + number)
            found.add(reader.manager.lookup(key, context))
        return found

    wait_for(lambda: LookupResult.RETRY not in answers())
    assert len(asked) <= 3 * has_tiers and len(probed) < 3 * (len(keys) + len(tails))
    reader.settle()
    reader.load(context, [])


def test_request_waits_for_one_lookup_in_slow_steps(rigs, monkeypatch):
    """Each answer is outdated on arrival."""
    monkeypatch.setattr(tier, "PROBE_AGAIN_S", 0.0)
    reader = rigs(**{"hotkv.use_table": False})
    keys = keys_of("slow steps", 4)
    context = reader.request(keys)

    def answers() -> set[LookupResult]:
        reader.step()
        return {reader.manager.lookup(key, context) for key in keys}

    wait_for(lambda: answers() == {LookupResult.MISS})
    assert reader.tier.miss_of(context.req_id) is Miss.ABSENT


def test_a_reset_ends_promotions_and_holds_new_ones(rigs):
    keys = keys_of("reset", 40)
    rigs().store(keys)
    reader = rigs()
    context = reader.request(keys)
    assert reader.lookup_once(context, keys) is None
    reader.step()
    reader.manager.reset_cache()
    for _ in range(HELD_STEPS):
        assert reader.manager.lookup(keys[0], context) is LookupResult.MISS
        reader.step()
    reader.manager.on_request_finished(context)
    assert reader.hits(keys) == 40


def test_excluded_request_neither_hits_nor_stores(rigs):
    keys, engine = keys_of("adapter", 10), rigs()
    told = SimpleNamespace(request_id="request 1")
    engine.tier.tell(told, Retention(), is_excluded=True)
    engine.store(keys)
    assert rigs().hits(keys) == 0
    engine.tier.tell(SimpleNamespace(request_id="request 2"), Retention(), is_excluded=True)
    rigs().store(keys_of("plain", 10))
    assert engine.hits(keys_of("plain", 10)) == 0


def test_a_request_may_ask_for_retention(rigs, daemon):
    engine, keys = rigs(), keys_of("kept", 4)
    asked = {"hotkv.pin": True, "hotkv.ttl_s": 600}
    context = engine.request(keys, kv_transfer_params=asked)
    engine.offer(context, keys)
    engine.settle()
    engine.manager.on_request_finished(context)
    assert daemon.counter("held_blocks_total") >= 4


def test_primary_tiers_used_chunks_stay_hot(rigs, daemon):
    """The server does not see these hits."""
    engine, keys = rigs(), keys_of("hot", 8)
    engine.store(keys)
    names = {get_offload_block_hash(key).hex() for key in keys}

    def idle_s():
        blocks = daemon.admin("blocks", page_size=1000)["blocks"]
        return [block["idle_s"] for block in blocks if block["block_hash"] in names]

    wait_for(lambda: min(idle_s()) > 1.0)
    asked_s = time.monotonic()
    assert engine.hits(keys) == 8
    wait_for(lambda: max(idle_s()) < time.monotonic() - asked_s, "the report of the hits")


def test_vllms_tier_on_disk_and_hotkv_serve_together(rigs, tmp_path):
    engine, keys = rigs(), keys_of("both", 20)
    rigs().store(keys[:10])
    disk = FileSystemTierManager(
        SimpleNamespace(config=engine.config, blocks_per_chunk=1),
        engine.primary.get_kv_memoryview(),
        "fs",
        root_dir=str(tmp_path),
    )
    both = TieringOffloadingManager(engine.primary, [disk, engine.tier])
    engine.manager = both
    assert engine.hits(keys) == 10
    engine.store(keys[10:])
    engine.manager.reset_cache()
    for _ in range(HELD_STEPS):
        engine.step()
    assert engine.hits(keys) == 20


# ---------------------------------------------------------------------------- faults of the server


def test_without_a_server_everything_misses_and_nothing_waits(tmp_path):
    engine, keys = (
        Rig(f"unix:{tmp_path}/grpc.sock", **{"hotkv.startup_wait_s": 0.0}),
        keys_of("n", 9),
    )
    engine.store(keys)
    engine.manager.reset_cache()
    assert engine.hits(keys) == 0
    engine.close()


def test_hung_server_costs_only_the_requests_patience(rigs, own_daemon):
    keys = keys_of("hang", 40)
    rigs(own_daemon).store(keys)
    reader = rigs(own_daemon, **IMPATIENT)
    stop(own_daemon.pid)
    assert reader.hits(keys, patience_s=20.0) == 0
    assert reader.hits(keys, patience_s=1.0) == 0, "the next request does not wait"
    os.kill(own_daemon.pid, signal.SIGCONT)
    wait_for(lambda: reader.hits(keys) == 40, "hits, once the server goes on")
    assert not reader.tier.transfers.is_hung


def test_stores_rows_are_freed_though_server_hangs(rigs, own_daemon):
    keys = keys_of("hung store", 10)
    writer = rigs(own_daemon, **{"hotkv.store_timeout_s": 0.2})
    stop(own_daemon.pid)
    writer.store(keys)
    # Timed out, so vLLM may overwrite the rows.
    writer.rows[:] = 7
    os.kill(own_daemon.pid, signal.SIGCONT)
    assert rigs(own_daemon).hits(keys) == 0


def test_engine_goes_on_once_the_server_answers(rigs, own_daemon, monkeypatch):
    keys = keys_of("after a hang", 10)
    writer = rigs(own_daemon, **{"hotkv.store_timeout_s": 0.2})
    stop(own_daemon.pid)
    writer.store(keys_of("given up", 10))
    assert writer.tier.transfers.is_hung
    os.kill(own_daemon.pid, signal.SIGCONT)
    wait_for(lambda: not writer.tier.transfers.is_hung)
    patient = replace(writer.tier.settings, store_timeout_s=60.0)
    monkeypatch.setattr(writer.tier.transfers, "_settings", patient)
    writer.store(keys)
    assert rigs(own_daemon).hits(keys) == 10


def test_reset_does_not_wait_for_unanswered_lease(rigs, own_daemon):
    keys = keys_of("drain", 10)
    rigs(own_daemon).store(keys)
    reader = rigs(own_daemon, **IMPATIENT)
    context = reader.request(keys)
    stop(own_daemon.pid)
    assert reader.lookup_once(context, keys) is None
    reader.step()
    resetting = threading.Thread(target=reader.manager.reset_cache)
    resetting.start()
    resetting.join(WAIT_S)
    assert not resetting.is_alive()
    os.kill(own_daemon.pid, signal.SIGCONT)


def test_server_killed_under_load_costs_a_miss(rigs, own_daemon):
    keys, later = keys_of("killed", 40), keys_of("stored without a server", 10)
    rigs(own_daemon).store(keys)
    reader = rigs(own_daemon)
    stop(own_daemon.pid)
    context = reader.request(keys)
    assert reader.lookup_once(context, keys) is None
    reader.step()
    own_daemon.kill()
    assert reader.lookup(context, keys) == 0
    reader.load(context, [])
    reader.store(later)
    assert reader.manager.on_new_request(reader.request([])).policy is OffloadPolicy.REQUEST_LEVEL
    own_daemon.start()
    reader.connected()
    assert reader.hits(keys) == 40, "what was ready before is still there"
    reader.store(later)
    assert rigs(own_daemon).hits(later) == 10


# ------------------------------------------------------------------------------- faults of hotkv's


@pytest.mark.parametrize(
    "broken",
    ["tier._is_ready", "tier._runs", "tier._by_group", "room.offer", "room.end", "told.get"],
)
def test_an_exception_of_hotkv_never_reaches_vllm(rigs, monkeypatch, broken):
    keys, engine = keys_of(f"broken {broken}", 10), rigs()
    rigs().store(keys)

    def breaks(*_, **__):
        raise RuntimeError("broken on purpose")

    owner, name = broken.split(".")
    parts = {"tier": engine.tier, "room": engine.tier._room}
    if owner == "told":
        monkeypatch.setattr(engine.tier, "_told", SimpleNamespace(get=breaks, pop=breaks))
    else:
        monkeypatch.setattr(parts[owner], name, breaks)
    engine.store(keys_of(f"stored while broken {broken}", 5))
    engine.hits(keys, patience_s=10.0)
    engine.manager.reset_cache()
    counted = engine.manager.get_stats().reduce()
    assert (
        counted[CALLBACK_ERRORS] > 0 and CALLBACK_ERRORS not in engine.manager.get_stats().reduce()
    )
    assert CALLBACK_ERRORS in engine.tier.build_metric_definitions({})


@pytest.mark.parametrize(
    "setting", [{"weights_identity": ""}, {"target": "localhost:1"}, {}], ids=str
)
def test_tier_without_identity_descriptors_or_threads_is_off(daemon, monkeypatch, setting):
    refused = Mock(side_effect=RuntimeError("can't start new thread"))
    monkeypatch.setattr(link, "open_session", refused)
    engine = Rig(daemon.target, **{f"hotkv.{name}": value for name, value in setting.items()})
    assert engine.tier.session is None and refused.called == (not setting)
    engine.store(keys_of("off", 5))
    engine.close()


def test_rows_outside_one_shared_file_lack_region(tmp_path):
    (tmp_path / "file").write_bytes(bytes(8192))
    rows = np.zeros((2, 4096), np.uint8)
    in_file = np.memmap(tmp_path / "file", np.uint8, "r+", shape=(2, 4096))
    for view, why in (
        (rows[0], "has shape"),
        (rows[:, :8], "strides"),
        (rows[:0], "has shape"),
        (rows, "is not one file"),
        (in_file, "no descriptor"),
    ):
        with pytest.raises(NoRegion, match=why):
            region_of(memoryview(view))


def test_equal_inode_elsewhere_is_not_the_region(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        paths = Path(folder, "arena"), Path(folder, "region")
        with paths[0].open("wb+"), paths[1].open("wb+") as file:
            rows = np.memmap(file, np.uint8, "w+", shape=(2, 4096))
            same = SimpleNamespace(st_ino=os.fstat(file.fileno()).st_ino)
            with monkeypatch.context() as patch:
                patch.setattr(os, "fstat", lambda fd: same)
                found = region_of(memoryview(rows))
            link = Path(f"/proc/self/fd/{found.fd}")
            assert link.readlink() == paths[1]
            found.close()
            assert not (link.is_symlink() and link.readlink() == paths[1])


def test_lookups_of_a_long_prompt_cost_one_probe(rigs, monkeypatch):
    reader, keys, probes = rigs(num_rows=16), keys_of("long", 3000), []
    monkeypatch.setattr(tier, "PROBE_AGAIN_S", 60.0)
    probe = reader.tier.session.probe
    monkeypatch.setattr(
        reader.tier.session, "probe", lambda group, hashes: probes.append(1) or probe(group, hashes)
    )
    context = reader.request(keys)
    for _ in range(20):
        assert reader.lookup_once(context, keys) == 0
        reader.step()
    assert len(probes) == 1
    reader.manager.on_request_finished(context)


# ------------------------------------------------------------------- engines without other work

KEYS = keys_of("idle", 30)
NO_LOADS = SimpleNamespace(load_jobs={})


@pytest.fixture
def reader(rigs: Any, own_daemon: Daemon) -> Rig:
    """Its server has `KEYS`, stored by another `Rig`."""
    rigs(own_daemon).store(KEYS)
    rig: Rig = rigs(own_daemon)
    return rig


def side_of(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, wait_s: float, num_replicas: int = 1
) -> DoorScheduler:
    monkeypatch.setattr(scheduler, "IDLE_WAIT_S", wait_s)
    return scheduler_side(rig.tier, monkeypatch, num_replicas=num_replicas)


def test_idle_engine_hits_in_the_asking_step(reader: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    side = side_of(reader, monkeypatch, wait_s=20.0)
    context = reader.request(KEYS)
    assert not side.promote(reader.manager), "nothing was asked for"
    assert reader.lookup_once(context, KEYS) is None
    assert side.promote(reader.manager)
    assert reader.lookup_once(context, KEYS) == len(KEYS)
    reader.load(context, KEYS)


@pytest.mark.parametrize("why", ["a request is under way", "replicas step together"])
def test_busy_engine_does_not_wait(reader: Rig, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    has_replicas = why == "replicas step together"
    side = side_of(reader, monkeypatch, wait_s=20.0, num_replicas=2 if has_replicas else 1)
    running = SimpleNamespace(request_id="running")
    if not has_replicas:
        side.allocated(running, 0)
    context = reader.request(KEYS)
    assert reader.lookup_once(context, KEYS) is None
    assert not side.promote(reader.manager)
    assert reader.tier.transfers is not None and reader.tier.transfers.is_idle
    side.finished(running)
    assert side.promote(reader.manager) != has_replicas
    side.end_step(NO_LOADS)
    reader.load(context, KEYS[: reader.lookup(context, KEYS)])


def test_a_server_that_hangs_is_not_waited_for(
    reader: Rig, own_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = side_of(reader, monkeypatch, wait_s=0.001)
    context = reader.request(KEYS)
    stop(own_daemon.pid)
    assert reader.lookup_once(context, KEYS) is None
    assert not side.promote(reader.manager)
    side.end_step(NO_LOADS)
    assert reader.lookup_once(context, KEYS) is None
    os.kill(own_daemon.pid, signal.SIGCONT)
    reader.load(context, KEYS[: reader.lookup(context, KEYS)])


# ------------------------------------------------------------------------------------------- events


def test_router_keeps_blocks_the_primary_tier_evicts(
    rigs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All events have one medium, so a router can't tell the tiers apart."""
    index = set()

    def read() -> set[Any]:
        theirs = tracker.take_events(engine.manager.take_events())
        for event in side.take_events([*theirs], None, engine.manager):
            is_stored = isinstance(event, BlockStored)
            (index.update if is_stored else index.difference_update)(event.block_hashes)
        return index

    with processes.own_daemon() as daemon:
        daemon.flags = ["--events.identity", "engine"]
        engine = rigs(daemon.start(), num_rows=16)
        tracker = OffloadingEventsTracker(OffloadingKVEventsConfig(True, False))
        side = scheduler_side(engine.tier, monkeypatch, publishes_events=True)
        side._space = engine.tier.session.config.key_space
        keys, others = keys_of("published", 10), keys_of("evict them", 16)
        names = {external(get_offload_block_hash(key)) for key in keys}
        rigs(daemon).store(keys, has_tokens=True)
        wait_for(lambda: read() == names, "the events of blocks that another engine stored")
        engine.store(keys, has_tokens=True)
        engine.store(others, has_tokens=True)
        wait_for(lambda: len(read()) == 26, "the events of all blocks")
        assert names <= index
        engine.tier.session.flush()
        wait_for(lambda: not names & read(), "the events of the flush")
        assert index == {external(get_offload_block_hash(key)) for key in others}
        thirds = keys_of("evict all", 16)
        engine.store(thirds, has_tokens=True)
        names = {external(get_offload_block_hash(key)) for key in thirds}
        wait_for(lambda: read() == names, "the events of the primary tier")
        assert not side.edge.broken
