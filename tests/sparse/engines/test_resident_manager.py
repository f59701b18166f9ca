"""`ResidentManager` and `ResidentSpec`: checks before the start, and device blocks held."""

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from hotkv_proto import limits
from hotkv_sparse.formats import bytes_per_block
from hotkv_sparse.vllm.block_manager import (
    SPARE_SLOTS,
    ResidentSpec,
    check_residency,
    customized,
)
from hotkv_sparse.vllm.worker import totals
from hotkv_vllm import versions
from hotkv_vllm.config import ConfigError
from tests.sparse.engines.resident_engine import CONFIG, LONGEST, POOL, ResidentEngine, spec_of
from tests.vllm.parts import TOKENS
from tests.vllm.specs import full_spec


def test_specs_of_other_kinds_do_not_merge() -> None:
    """vLLM's own merge would return full attention."""
    plain = FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=32, dtype=torch.float32)
    one = spec_of("host")
    with pytest.raises(AssertionError):
        ResidentSpec.merge([one, plain])
    assert ResidentSpec.merge([one, spec_of("host")]) == one


def test_engine_with_hotkv_off_has_vllms_spec(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM would accept requests that it can't finish."""
    plain = FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=32, dtype=torch.float32)
    extra: dict[str, bool] = {}
    vllm_config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        max_in_flight_tokens=64,
    )
    answers = {False: "told to", True: ""}
    monkeypatch.setattr(versions, "why_off", lambda _, allows: answers[allows])
    assert customized(plain, CONFIG["host"], vllm_config) is plain
    assert "residency has no effect: told to" in caplog.text
    extra["hotkv.allow_untested_vllm"] = True
    assert isinstance(customized(plain, CONFIG["host"], vllm_config), ResidentSpec)


@pytest.mark.parametrize("residency", ["host", "auto"])
def test_engine_unfit_for_residency_learns_why(residency: str) -> None:
    """For example, an engine that stores nothing would fill its device and wait for ever."""

    def check(is_producer: bool = True, num_blocks: int = 28, **more: Any) -> None:
        transfer = SimpleNamespace(is_kv_producer=is_producer, kv_role="kv_consumer")
        groups = [SimpleNamespace(kv_cache_spec=more.pop("spec", spec_of(residency)))]
        check_residency(
            SimpleNamespace(
                kv_transfer_config=transfer,
                model_config=SimpleNamespace(max_model_len=LONGEST),
                scheduler_config=SimpleNamespace(max_num_batched_tokens=2 * TOKENS),
            ),
            SimpleNamespace(kv_cache_groups=groups, num_blocks=num_blocks),
            replace(CONFIG[residency], **more),
        )

    check()
    for settings, words in (
        ({"is_producer": False}, "with kv_role 'kv_consumer' .*set kv_role to 'kv_both'"),
        ({"num_blocks": 27}, "holds up to 27 blocks .* the pool has 26"),
        ({"adaptive_p": 0.9}, "leave out hotkv.sparse.adaptive_p"),
        ({"spec": full_spec()}, "this one has FullAttentionSpec"),
    ):
        with pytest.raises(ConfigError, match=f"residency = '{residency}': .*{words}"):
            check(**settings)


def test_engine_starts_only_with_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, sparse = spec_of("host"), CONFIG["host"]
    vllm_config = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=SimpleNamespace(max_model_len=1500),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )
    group = SimpleNamespace(kv_cache_spec=one, layer_names=["a", "b", "c"])
    kv_config = SimpleNamespace(kv_cache_groups=[group], num_blocks=POOL)
    config: Any = SimpleNamespace(sparse=sparse, is_resident=True)
    row = 3 * bytes_per_block("rot2u", TOKENS, 1, 32)
    pool, staging = 3 * POOL * one.page_size_bytes, 2 * 94 * one.page_size_bytes
    found = totals.totals(sparse, vllm_config, kv_config)
    assert found == totals.Totals(pool, POOL * row, 1024 * row, staging)
    (tmp_path / "own").write_text("0::/\n")
    (tmp_path / "memory.current").write_text("0")
    monkeypatch.setattr(limits, "CGROUPS", tmp_path)
    monkeypatch.setattr(limits, "OWN_CGROUP", tmp_path / "own")
    (tmp_path / "memory.max").write_text(str(found.total))
    totals.check_memory(vllm_config, kv_config, config)
    (tmp_path / "memory.max").write_text(str(found.total - 1))
    with pytest.raises(ConfigError, match=r"this rank needs .* \(pool .*, staging .*max_num_seqs"):
        totals.check_memory(vllm_config, kv_config, config)


def test_device_holdings_follow_from_the_settings() -> None:
    """Sinks, a recent window, 2 + 2 for two steps and a partial block; hot slots for two
    selections of 6, and spare ones."""
    spec = spec_of("host")
    assert (spec.whole_blocks, spec.hot_blocks) == (1 + (1 + 2 + 2) + 1, 2 * 6 + SPARE_SLOTS)
    assert replace(spec, sparse_from_tokens=9 * TOKENS).whole_blocks == 9 + 1
    assert [spec.device_blocks(blocks * TOKENS) for blocks in (7, 8)] == [7, 7 + spec.hot_blocks]
    assert [spec.gap(blocks * TOKENS) for blocks in (7, 8)] == [range(0), range(1, 7)]


def test_instantly_ending_stores_stay_within_bound() -> None:
    engine = ResidentEngine("host")
    engine.arrive(700, 40)
    while engine.requests:
        engine.run(1)
        held = POOL - 1 - engine.pool.get_num_free_blocks()
        assert held <= engine.spec.device_blocks(740)


def test_hits_allocate_sinks_and_window() -> None:
    engine = ResidentEngine("host")
    engine.arrive(640, 1)
    engine.run(25)
    name = engine.arrive(660, 9)
    answers, stored_tokens = itertools.count(), engine.manager.stored_tokens
    # vLLM counts blocks, then allocates them: both must agree although the answer changes.
    engine.manager.stored_tokens = lambda name: 0 if next(answers) % 2 else stored_tokens(name)
    while not engine.device.has_blocks(name):
        engine.step()
    away = [at for at, one in enumerate(engine.manager.req_to_blocks[name]) if one.is_null]
    assert away == [*engine.spec.gap(40 * TOKENS)]
