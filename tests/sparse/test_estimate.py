"""Estimates against numbers computed by hand, and what must hold for all of them."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotkv.errors import HotKVError, Reason
from hotkv_sparse import SparseConfig
from hotkv_sparse.estimate import (
    DEVICES,
    MODELS,
    Mode,
    Plan,
    decode,
    memory,
    prefill,
    read_config,
)
from hotkv_sparse.estimate.command import main
from hotkv_sparse.estimate.figures import figures_of, human_bytes, human_seconds
from hotkv_sparse.estimate.here import COPIED_BYTES, MATRIX_SIZE, measure_here
from hotkv_sparse.estimate.plan import default_sparse
from hotkv_sparse.estimate.report import as_json, as_text, sized

LLAMA, QWEN = MODELS["llama-3.1-8b"], MODELS["qwen2.5-14b"]
H200 = DEVICES["h200"]
KIB, MIB = 1 << 10, 1 << 20
TOKENS_128K, CHUNK = 131072, 8192


def sparse(**settings: Any) -> SparseConfig:
    return SparseConfig(**({"dense_layers": (), "min_context_tokens": 0} | settings))


# ------------------------------------------------------------------------------------------ by hand


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("smollm2-135m", 134_515_008),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen2.5-72b", 72_706_203_648),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("mistral-7b", 7_248_023_552),
    ],
)
def test_parameters_are_those_of_the_models_cards(name: str, parameters: int) -> None:
    assert MODELS[name].parameters == parameters


def test_the_table_of_models_is_covered_above() -> None:
    assert len(MODELS) == 10


def test_residency_s_example() -> None:
    """RESIDENCY.md, "Arithmetic": 128 KiB a token, 512 MiB of staging a layer, 137 GB, 2.5 s."""
    plan = Plan(TOKENS_128K, chunk_tokens=CHUNK, staging_layers=1)
    taken, first = (f(LLAMA, H200, plan, Mode.RESIDENT) for f in (memory, prefill))
    assert taken.kv_token.value == 128 * KIB
    assert taken.staging.value == 512 * MIB + CHUNK * 128 * KIB
    # Step i of 0 to 15 fetches 8192 i tokens, less 96 that are on the device in all but the first.
    assert first.reread.value == (8192 * 120 - 15 * 96) * 128 * KIB
    # The note's n^2 / 2c counts half of each step's own tokens as well.
    noted = TOKENS_128K**2 / (2 * CHUNK) * 128 * KIB
    assert noted == pytest.approx(137e9, rel=0.005)
    assert noted - (first.reread.value + 15 * 96 * 128 * KIB) == TOKENS_128K / 2 * 128 * KIB
    assert noted / (H200.link * H200.link_ratio) == pytest.approx(2.5, rel=0.005)
    # The first two steps fetch less than the 1 GiB that they store meanwhile.
    seconds = (first.reread.value + (CHUNK + 96) * 128 * KIB) / (64e9 * 0.86)
    assert first.link.value == pytest.approx(seconds)


def test_a_prefill_that_the_link_limits() -> None:
    """At a thousandth of the link every step but the first waits for it."""
    slow = H200.with_({"link": H200.link / 1000})
    plan = Plan(TOKENS_128K, chunk_tokens=CHUNK)
    first = prefill(LLAMA, slow, plan, Mode.RESIDENT)
    assert first.limit == "host link in 16 of 16 steps"
    assert first.total.value == pytest.approx(first.link.value)
    fast = prefill(LLAMA, H200, plan, Mode.RESIDENT)
    assert fast.limit == "attention"
    work = fast.linear.value + fast.attention.value + fast.building.value + fast.overhead.value
    assert fast.total.value == pytest.approx(work)


def test_the_chunk_that_hides_the_link() -> None:
    """There, old tokens take as long to fetch as to attend to."""
    tokens = prefill(LLAMA, H200, Plan(TOKENS_128K), Mode.RESIDENT).hiding_chunk.value
    fetch_s = 4096 / (64e9 * 0.86)
    attend_s = 4 * 32 * 128 * tokens / (989e12 * 0.55)
    assert fetch_s == pytest.approx(attend_s)
    assert tokens == pytest.approx(2471, abs=1)


def test_prefill_arithmetic() -> None:
    """Two steps, of 8192 tokens and 1."""
    first = prefill(LLAMA, H200, Plan(CHUNK + 1, chunk_tokens=CHUNK), Mode.DENSE)
    parameters = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096)
    weights_s = 2 * parameters / (4.8e12 * 0.85)
    linear_s = 2 * parameters * CHUNK / (989e12 * 0.65) + weights_s
    assert first.linear.value == pytest.approx(linear_s)
    pairs = (CHUNK + 1) * (CHUNK + 2) / 2
    assert first.attention.value == pytest.approx(4 * 32 * 32 * 128 * pairs / (989e12 * 0.55))
    assert first.overhead.value == pytest.approx(2 * (1e-3 + 32 * 1e-5))
    assert first.steps.value == 2


def test_sparse_s_case_of_a_million_tokens() -> None:
    """The design's cost at 1M tokens: KV 197 GB, index 13.1 GB in 3.0 ms, 14 MB against 403 MB."""
    plan = Plan(1_000_000, sparse=sparse(sparse_topk=2048, sink_tokens=0, recent_tokens=1))
    taken = memory(QWEN, H200, plan, Mode.RESIDENT)
    assert taken.request_representations.value == pytest.approx(13.1e9, rel=0.005)
    assert memory(QWEN, H200, plan, Mode.DENSE).request_kv.value == pytest.approx(197e9, rel=0.005)
    copying = H200.with_({"score_ratio": 4.3 / 4.8})
    step = decode(QWEN, copying, plan, Mode.RESIDENT)
    assert step.scoring.value == pytest.approx(3.0e-3, rel=0.02)
    link = H200.link * H200.link_ratio
    for hit_ratio, moved_bytes in ((0.965, 14e6), (0.0, 403e6)):
        step = decode(QWEN, H200, plan.with_(hit_ratio=hit_ratio), Mode.RESIDENT)
        assert step.link.value * link == pytest.approx(moved_bytes, rel=0.02)


def test_what_a_tenth_saves() -> None:
    """RESIDENCY.md: 20 % hot and 6.6 % of rot2u are at most 3.7 times less."""
    plan = Plan(1_000_000, sparse=sparse(sparse_topk=0.1))
    dense, resident = (
        memory(LLAMA, H200, plan, mode).request.value for mode in (Mode.DENSE, Mode.RESIDENT)
    )
    assert dense / resident == pytest.approx(1 / (0.2 + 34 / 512), rel=1e-3)


def test_decode_arithmetic() -> None:
    """A batch of 4 at 128k tokens, by hand: 128 of 8192 blocks chosen, 256 attended."""
    plan = Plan(TOKENS_128K, batch=4, hit_ratio=0.9, sparse=sparse(sparse_topk=2048))
    step = decode(LLAMA, H200, plan, Mode.RESIDENT)
    read_parameters = LLAMA.parameters - 128256 * 4096
    assert step.linear.value == pytest.approx(2 * read_parameters / (4.8e12 * 0.85))
    page_bytes = 16 * 2 * 8 * 128 * 2
    assert step.attention.value == pytest.approx(4 * 32 * 256 * page_bytes / (4.8e12 * 0.8))
    # A run of 16 tokens: 32 bytes of codes and 2 of scale a token, 8 heads.
    row_bytes = 8 * 16 * 34
    assert step.scoring.value == pytest.approx(4 * 32 * 8192 * row_bytes / (4.8e12 * 0.5))
    assert step.choosing.value == pytest.approx(32 * (2e-5 + 8192 * 6e-10))
    # 7 blocks are always kept: 2 of sinks, 4 + 1 of a window of 64 tokens anywhere.
    missing = 0.1 * (128 - 7)
    link = 64e9 * 0.86
    assert step.link.value == pytest.approx(4 * 32 * missing * page_bytes / link)
    assert step.pulls.value == pytest.approx(4 * 32 * 4 * page_bytes / link)
    parts = [step.linear, step.attention, step.scoring, step.choosing, step.overhead, step.pulls]
    assert step.total.value == pytest.approx(sum(part.value for part in parts))
    overlapped = decode(LLAMA, H200, plan.with_(pulls_overlap=True), Mode.RESIDENT)
    assert overlapped.total.value == pytest.approx(sum(part.value for part in parts[:-1]))
    assert step.tokens_per_s.value == pytest.approx(4 / step.total.value)


def test_dense_layers_stay_whole_on_the_device() -> None:
    plan = Plan(TOKENS_128K, sparse=sparse(sparse_topk=2048, dense_layers=(0, 1)))
    page_bytes, blocks = 64 * KIB, 8192
    taken = memory(LLAMA, H200, plan, Mode.RESIDENT)
    assert taken.request_kv.value == (30 * 256 + 2 * blocks) * page_bytes
    assert taken.request_representations.value == 30 * blocks * 8 * 16 * 34
    step = decode(LLAMA, H200, plan, Mode.RESIDENT)
    attended_bytes = (30 * 256 + 2 * blocks) * page_bytes
    assert step.attention.value == pytest.approx(attended_bytes / (4.8e12 * 0.8))


def test_representations_in_host_memory_cross_the_link() -> None:
    plan = Plan(TOKENS_128K, representations_on_host=True)
    taken = memory(LLAMA, H200, plan, Mode.RESIDENT)
    assert taken.request_representations.value == 0.0
    assert taken.host_request.value == 8192 * 32 * (64 * KIB + 8 * 16 * 34)
    step = decode(LLAMA, H200, plan, Mode.RESIDENT)
    assert step.scoring.value == pytest.approx(8192 * 32 * 8 * 16 * 34 / (64e9 * 0.86))


def test_devices_share_weights_and_heads() -> None:
    one, two, sixteen = (
        memory(LLAMA, H200, Plan(TOKENS_128K, tensor_parallel=n), Mode.DENSE) for n in (1, 2, 16)
    )
    assert two.weights.value == one.weights.value / 2
    assert two.request.value == one.request.value / 2
    # 8 KV heads on 16 devices: each has a copy of one.
    assert sixteen.request.value == one.request.value / 8
    host = [
        memory(LLAMA, H200, Plan(TOKENS_128K, tensor_parallel=n), Mode.RESIDENT).host_request.value
        for n in (1, 2, 16)
    ]
    assert host[0] == host[1] == host[2]


def test_host_memory_bounds_the_batch() -> None:
    plan = Plan(TOKENS_128K)
    host_request = memory(LLAMA, H200, plan, Mode.RESIDENT).host_request.value
    bounded = plan.with_(host_memory_bytes=int(3.5 * host_request))
    assert memory(LLAMA, H200, bounded, Mode.RESIDENT).largest_batch.value == 3
    unbounded = memory(LLAMA, H200, plan, Mode.RESIDENT).largest_batch.value
    assert memory(LLAMA, H200, bounded, Mode.DENSE).largest_batch.value == 7
    assert unbounded > 3


def test_a_model_that_does_not_fit_has_no_batch() -> None:
    one = sized(MODELS["qwen2.5-72b"], DEVICES["a100-40g"], Plan(4096), Mode.DENSE)
    assert one.memory.largest_batch.value == 0.0
    assert one.largest is None
    text = as_text(MODELS["qwen2.5-72b"], DEVICES["a100-40g"], Plan(4096), [one])
    assert "does not fit the device" in text


def test_a_budget_that_covers_the_context_chooses_nothing() -> None:
    plan = Plan(2048, sparse=sparse(sparse_topk=2048))
    short = Plan(4095, sparse=sparse(sparse_topk=2048, min_context_tokens=4096))
    for one in (plan, short):
        step = decode(LLAMA, H200, one, Mode.RESIDENT)
        assert step.scoring.value == step.choosing.value == step.link.value == 0.0
        assert step.attention == decode(LLAMA, H200, one, Mode.DENSE).attention
    assert decode(LLAMA, H200, short.with_(tokens=4096), Mode.RESIDENT).scoring.value > 0.0


def test_sums_over_devices() -> None:
    """Two rings a layer: of 4 devices each sends 3/4 of 4096 numbers twice, at 450 GB/s."""
    one, four = (
        decode(LLAMA, H200, Plan(TOKENS_128K, batch=8, tensor_parallel=n), Mode.DENSE).overhead
        for n in (1, 4)
    )
    sums_s = 2 * 32 * (2 * 3 / 4 * 8 * 4096 * 2 / 4.5e11 + 1e-5)
    assert four.value - one.value == pytest.approx(sums_s)


def test_a_cpu_engine_chooses_row_by_row() -> None:
    slow = dataclasses.replace(H200, parallel_rows=False)
    plan = Plan(TOKENS_128K, batch=8)
    together, apart = (decode(LLAMA, one, plan, Mode.SPARSE).choosing for one in (H200, slow))
    assert apart.value == pytest.approx(8 * together.value)


# ------------------------------------------------------------------------------------------ always

PLANS = st.builds(
    Plan,
    tokens=st.integers(1, 1 << 20),
    batch=st.integers(1, 64),
    block_tokens=st.sampled_from([16, 32, 64, 128]),
    sparse=st.builds(
        sparse,
        sparse_topk=st.one_of(st.integers(96, 8192), st.floats(0.01, 1.0)),
        scorer=st.sampled_from(["rot2u", "rot3u", "mean", "quest"]),
        dense_layers=st.sampled_from([(), (0,), (0, 1)]),
    ),
    hot_sets=st.floats(1.0, 4.0),
    hit_ratio=st.floats(0.0, 1.0),
    representations_on_host=st.booleans(),
    pulls_overlap=st.booleans(),
    chunk_tokens=st.integers(256, 16384),
    tensor_parallel=st.sampled_from([1, 2, 4, 8]),
)
CASES = st.tuples(
    st.sampled_from([MODELS["llama-3.1-8b"], MODELS["qwen2.5-14b"]]),
    st.sampled_from(list(DEVICES.values())),
    PLANS,
    st.sampled_from(list(Mode)),
)


def slightly(value: float) -> float:
    """Room for rounding."""
    return value * (1 + 1e-9) + 1e-12


@given(CASES)
def test_nothing_is_negative_and_a_whole_is_no_less_than_its_parts(case: Any) -> None:
    taken, first, step = (f(*case) for f in (memory, prefill, decode))
    for figures in (first, step):
        assert all(figure.value >= 0 for figure in figures_of(figures).values())
    assert all(f.value >= 0 for name, f in figures_of(taken).items() if name != "room")
    assert first.total.value >= max(first.linear.value, first.attention.value) / slightly(1)
    assert slightly(first.total.value) >= first.link.value
    assert slightly(step.total.value) >= max(step.link.value, step.linear.value)
    assert taken.largest_batch.value * taken.request.value <= max(taken.room.value, 0.0)
    mode = case[3]
    if mode is not Mode.RESIDENT:
        assert step.link.value == taken.host.value * (mode is Mode.DENSE) == first.reread.value == 0


@given(CASES, st.integers(1, 1 << 18))
def test_more_tokens_never_take_less(case: Any, more: int) -> None:
    model, device, plan, mode = case
    longer = plan.with_(tokens=plan.tokens + more)
    for f in (memory, prefill, decode):
        before, after = (figures_of(f(model, device, one, mode)) for one in (plan, longer))
        for name in {"request", "host_request", "staging", "linear", "attention"} & set(before):
            assert before[name].value <= slightly(after[name].value), name
    assert prefill(model, device, plan, mode).total.value <= slightly(
        prefill(model, device, longer, mode).total.value
    )


@given(CASES, st.integers(1, 64))
def test_a_larger_batch_never_takes_less_and_holds_no_fewer_tokens(case: Any, more: int) -> None:
    model, device, plan, mode = case
    larger = plan.with_(batch=plan.batch + more)
    few, many = (decode(model, device, one, mode) for one in (plan, larger))
    assert few.total.value <= slightly(many.total.value)
    assert few.tokens_per_s.value <= slightly(many.tokens_per_s.value)
    assert (
        memory(model, device, plan, mode).device.value
        < memory(model, device, larger, mode).device.value
    )


@given(
    CASES,
    st.sampled_from(
        ["bandwidth", "flops", "link", "peer", "score_ratio", "prefill_attention_ratio"]
    ),
    st.floats(1.0, 10.0),
)
def test_a_faster_device_never_takes_longer(case: Any, name: str, times: float) -> None:
    model, device, plan, mode = case
    value = getattr(device, name) * times
    faster = device.with_({name: min(value, 10.0) if name.endswith("_ratio") else value})
    for f in (prefill, decode):
        before, after = (f(model, one, plan, mode).total.value for one in (device, faster))
        assert after <= slightly(before)


@given(CASES, st.floats(0.0, 1.0))
def test_more_hits_never_take_longer(case: Any, share: float) -> None:
    model, device, plan, mode = case
    better = plan.with_(hit_ratio=plan.hit_ratio + (1 - plan.hit_ratio) * share)
    before, after = (decode(model, device, one, mode).total.value for one in (plan, better))
    assert after <= slightly(before)


@given(CASES, st.integers(1, 8))
def test_larger_steps_of_a_prefill_never_read_more_anew(case: Any, times: int) -> None:
    model, device, plan, _ = case
    larger = plan.with_(chunk_tokens=plan.chunk_tokens * times)
    before, after = (
        prefill(model, device, one, Mode.RESIDENT).reread.value for one in (plan, larger)
    )
    assert after <= slightly(before)


@given(CASES)
def test_a_resident_request_has_no_more_on_the_device_than_a_sparse_one(case: Any) -> None:
    model, device, plan, _ = case
    resident, whole = (
        memory(model, device, plan, mode).request.value for mode in (Mode.RESIDENT, Mode.SPARSE)
    )
    assert resident <= whole


# ---------------------------------------------------------------------------------------- bad input

GOOD = ["--model", "llama-3.1-8b", "--tokens", "100000", "--device", "h200"]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--model", "gpt-9"], "model"),
        (["--tokens", "0"], "tokens"),
        (["--tokens", str(1 << 40)], "tokens"),
        (["--device", "abacus"], "device"),
        (["--batch", "0"], "batch"),
        (["--block-tokens", "-1"], "block_tokens"),
        (["--chunk-tokens", "0"], "chunk_tokens"),
        (["--staging-layers", "0"], "staging_layers"),
        (["--tensor-parallel", "3"], "tensor_parallel"),
        (["--tensor-parallel", "0"], "tensor_parallel"),
        (["--dtype", "fp3"], "dtype"),
        (["--weight-bits", "5"], "weight_bits"),
        (["--memory-ratio", "1.1"], "memory_ratio"),
        (["--memory-ratio", "nan"], "memory_ratio"),
        (["--host-memory", "-1"], "host-memory"),
        (["--sparse-topk", "1.5"], "sparse_topk"),
        (["--sparse-topk", "10"], "sparse_topk"),
        (["--scorer", "rot9u"], "scorer"),
        (["--dense-layers", "32"], "dense_layers"),
        (["--hot-sets", "0.5"], "hot_sets"),
        (["--hot-sets", "inf"], "hot_sets"),
        (["--hit-ratio", "1.5"], "hit_ratio"),
        (["--device-memory", "0"], "device-memory"),
        (["--bandwidth", "0"], "device.bandwidth"),
        (["--tflops", "-3"], "device.flops"),
        (["--link", "nan"], "device.link"),
        (["--link-ratio", "11"], "device.link_ratio"),
        (["--set", "step_s=-1"], "device.step_s"),
        (["--set", "step_s=often"], "set"),
        (["--set", "colour=3"], "set"),
    ],
)
def test_bad_input_names_the_field(
    arguments: list[str], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*GOOD, *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith((f"{field} ", f"sparse.{field} ")), said.err
    assert len(said.err.splitlines()) == 1


CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def config_file(folder: Path, **changes: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({k: v for k, v in (CONFIG | changes).items() if v is not None}))
    return file


def test_a_config_is_read(tmp_path: Path) -> None:
    file = config_file(tmp_path)
    for path in (file, tmp_path):
        model = read_config(path)
        assert (model.name, model.parameters) == (tmp_path.name, LLAMA.parameters)
    nested = tmp_path / "nested.json"
    nested.write_text(json.dumps({"text_config": CONFIG}))
    assert read_config(nested).parameters == LLAMA.parameters


def test_a_config_of_qwen_is_read(tmp_path: Path) -> None:
    """It has biases that no field tells, and a window that is switched off."""
    file = config_file(
        tmp_path,
        model_type="qwen2",
        num_hidden_layers=48,
        num_attention_heads=40,
        hidden_size=5120,
        intermediate_size=13824,
        vocab_size=152064,
        sliding_window=131072,
        use_sliding_window=False,
    )
    assert read_config(file).parameters == QWEN.parameters


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hidden_size": None}, "config.hidden_size"),
        ({"vocab_size": "many"}, "config.vocab_size"),
        ({"num_hidden_layers": 0}, "config.num_hidden_layers"),
        ({"num_key_value_heads": 5}, "model.kv_heads"),
        ({"kv_lora_rank": 512}, "config.kv_lora_rank"),
        ({"num_local_experts": 8}, "config.num_local_experts"),
        ({"sliding_window": 4096}, "config.sliding_window"),
        ({"layer_types": ["sliding_attention"]}, "config.layer_types"),
        ({"text_config": 3}, "config.text_config"),
    ],
)
def test_a_bad_config_names_the_field(tmp_path: Path, changes: Any, field: str) -> None:
    with pytest.raises(HotKVError) as caught:
        read_config(config_file(tmp_path, **changes))
    assert caught.value.reason is Reason.INVALID_FIELD
    assert caught.value.message.startswith(f"{field} ")


@pytest.mark.parametrize("contents", ["", "[]", "{"])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, contents: str) -> None:
    (tmp_path / "config.json").write_text(contents)
    with pytest.raises(HotKVError, match="config"):
        read_config(tmp_path)


def test_a_config_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "none.json"
    assert main(["--config", str(missing), "--tokens", "1", "--device", "h200"]) == 2
    assert str(missing) in capsys.readouterr().err


# -------------------------------------------------------------------------------------- the command


def test_text_shows_every_formula(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GOOD, "--mode", "resident"]) == 0
    text = capsys.readouterr().out
    one = sized(LLAMA, H200, Plan(100_000), Mode.RESIDENT)
    shown = [f for part in (one.memory, one.prefill, one.decode) for f in figures_of(part).values()]
    assert all(figure.formula in text for figure in shown if figure.value)
    assert "2 x 32 layers x 8 KV heads x 128 x 2 bytes" in text
    assert "== dense" not in text


def test_json_has_what_the_text_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GOOD, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed["modes"]) == ["dense", "sparse", "resident"]
    step = printed["modes"]["resident"]["step"]["total"]
    expected = decode(LLAMA, H200, Plan(100_000), Mode.RESIDENT).total
    assert step == {"value": expected.value, "unit": "s", "formula": expected.formula}
    plan = Plan(100_000)
    modes = [sized(LLAMA, H200, plan, mode) for mode in Mode]
    assert printed == json.loads(json.dumps(as_json(LLAMA, H200, plan, modes)))


def test_flags_reach_plan_and_device(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--batch 3 --sparse-topk 0.2 --scorer rot3u --dense-layers 0 5 --hot-sets 3 --pulls "
    flags += "overlapped --representations host --link 100 --link-ratio 0.5 --set step_s=0.25 "
    flags += "--device-memory 100 --bandwidth 1000 --tflops 100 --host-memory 2 --hit-ratio 0.5"
    assert main([*GOOD, "--json", *flags.split()]) == 0
    printed = json.loads(capsys.readouterr().out)
    plan, device = printed["plan"], printed["device"]
    assert (plan["batch"], plan["hot_sets"], plan["hit_ratio"]) == (3, 3.0, 0.5)
    assert plan["pulls_overlap"] and plan["representations_on_host"]
    assert plan["host_memory_bytes"] == 2 << 30
    settings = plan["sparse"]
    assert (settings["sparse_topk"], settings["scorer"]) == (0.2, "rot3u")
    assert settings["dense_layers"] == [0, 5]
    assert (device["link"], device["link_ratio"], device["step_s"]) == (1e11, 0.5, 0.25)
    assert (device["memory_bytes"], device["bandwidth"]) == (100 << 30, 1e12)
    assert device["flops"] == 1e14
    assert "as given" in device["source"]


def test_the_default_is_the_budget_of_publications() -> None:
    assert default_sparse().sparse_topk == 2048
    assert default_sparse().dense_layers == ()


def test_neither_torch_nor_grpc_is_imported() -> None:
    code = (
        "import sys; from hotkv_sparse.estimate.command import main; "
        f"main({GOOD}); print(sorted({{'torch', 'grpc', 'pydantic', 'vllm', 'numba'}} & "
        "set(sys.modules)), file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr.splitlines()[-1] == "[]"


def test_this_machine_is_measured_by_the_clock_it_is_given() -> None:
    """Every piece of work takes a second by this clock."""
    ticks: Iterator[int] = count()
    device = measure_here(lambda: float(next(ticks)))
    assert device.name == "here"
    assert device.bandwidth == 2 * COPIED_BYTES
    assert device.flops == 2 * MATRIX_SIZE**3
    assert device.link == COPIED_BYTES
    assert device.memory_bytes > 1 << 28


def test_numbers_for_people() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1024, 1536 << 20)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 GiB",
    ]
    assert [human_seconds(s) for s in (0.0, 2e-6, 0.0123, 1.5, 12345.0)] == [
        "0 s",
        "2 us",
        "12.3 ms",
        "1.5 s",
        "12,345 s",
    ]
