"""Estimates against numbers computed by hand, and what must hold for all of them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse import SparseConfig
from hotkv_sparse.estimate import (
    DEVICES,
    MODELS,
    Mode,
    Plan,
    memory,
    read_config,
)
from hotkv_sparse.estimate.command import NO_TIMES, as_json, as_text, main
from hotkv_sparse.estimate.memory import figures_of

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


def test_residency_s_example() -> None:
    """RESIDENCY.md, "Arithmetic": 128 KiB a token, 512 MiB of staging a layer."""
    plan = Plan(TOKENS_128K, chunk_tokens=CHUNK, staging_layers=1)
    taken = memory(LLAMA, H200, plan, Mode.RESIDENT)
    assert taken.kv_token.value == 128 * KIB
    assert taken.staging.value == 512 * MIB + CHUNK * 128 * KIB


def test_sparse_s_case_of_a_million_tokens() -> None:
    """The design's cost at 1M tokens: KV 197 GB, index 13.1 GB."""
    plan = Plan(1_000_000, sparse=sparse(sparse_topk=2048, sink_tokens=0, recent_tokens=1))
    taken = memory(QWEN, H200, plan, Mode.RESIDENT)
    assert taken.request_representations.value == pytest.approx(13.1e9, rel=0.005)
    assert memory(QWEN, H200, plan, Mode.DENSE).request_kv.value == pytest.approx(197e9, rel=0.005)


def test_what_a_tenth_saves() -> None:
    """RESIDENCY.md: 20 % hot and 6.6 % of rot2u are at most 3.7 times less."""
    plan = Plan(1_000_000, sparse=sparse(sparse_topk=0.1))
    dense, resident = (
        memory(LLAMA, H200, plan, mode).request.value for mode in (Mode.DENSE, Mode.RESIDENT)
    )
    assert dense / resident == pytest.approx(1 / (0.2 + 34 / 512), rel=1e-3)


def test_dense_layers_stay_whole_on_the_device() -> None:
    plan = Plan(TOKENS_128K, sparse=sparse(sparse_topk=2048, dense_layers=(0, 1)))
    page_bytes, blocks = 64 * KIB, 8192
    taken = memory(LLAMA, H200, plan, Mode.RESIDENT)
    assert taken.request_kv.value == (30 * 256 + 2 * blocks) * page_bytes
    assert taken.request_representations.value == 30 * blocks * 8 * 16 * 34


def test_representations_in_host_memory_take_none_of_the_device() -> None:
    plan = Plan(TOKENS_128K, representations_on_host=True)
    taken = memory(LLAMA, H200, plan, Mode.RESIDENT)
    assert taken.request_representations.value == 0.0
    assert taken.host_request.value == 8192 * 32 * (64 * KIB + 8 * 16 * 34)
    taken = memory(LLAMA, H200, plan, Mode.SPARSE)
    assert taken.host_request.value == 8192 * 32 * 8 * 16 * 34


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
    model, device, plan = MODELS["qwen2.5-72b"], DEVICES["a100-40g"], Plan(4096)
    taken = memory(model, device, plan, Mode.DENSE)
    assert taken.largest_batch.value == 0.0
    text = as_text(model, device, plan, {Mode.DENSE: taken})
    assert "does not fit the device" in text


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
    representations_on_host=st.booleans(),
    chunk_tokens=st.integers(256, 16384),
    tensor_parallel=st.sampled_from([1, 2, 4, 8]),
)
CASES = st.tuples(
    st.sampled_from([MODELS["llama-3.1-8b"], MODELS["qwen2.5-14b"]]),
    st.sampled_from(list(DEVICES.values())),
    PLANS,
    st.sampled_from(list(Mode)),
)


@given(CASES)
def test_nothing_is_negative_and_the_largest_batch_fits(case: Any) -> None:
    taken = memory(*case)
    assert all(f.value >= 0 for name, f in figures_of(taken).items() if name != "room")
    assert taken.largest_batch.value * taken.request.value <= max(taken.room.value, 0.0)
    once = taken.weights.value + taken.activations.value + taken.staging.value
    assert taken.device.value == pytest.approx(once + case[2].batch * taken.request.value)


@given(CASES, st.integers(1, 1 << 18))
def test_more_tokens_never_take_less(case: Any, more: int) -> None:
    model, device, plan, mode = case
    longer = plan.with_(tokens=plan.tokens + more)
    before, after = (figures_of(memory(model, device, one, mode)) for one in (plan, longer))
    for name in ("request", "host_request", "staging"):
        assert before[name].value <= after[name].value, name


# ---------------------------------------------------------------------------------------- bad input

GOOD = ["--model", "llama-3.1-8b", "--tokens", "100000", "--device", "h200"]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--model", "gpt-9"], "model"),
        (["--tokens", "0"], "tokens"),
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
        (["--device-memory", "0"], "device-memory"),
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
    shown = figures_of(memory(LLAMA, H200, Plan(100_000), Mode.RESIDENT)).values()
    assert all(figure.formula in text for figure in shown if figure.value)
    assert NO_TIMES in text
    assert "2 x 32 layers x 8 KV heads x 128 x 2 bytes" in text
    assert "== dense" not in text


def test_json_has_what_the_text_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GOOD, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed["modes"]) == ["dense", "sparse", "resident"]
    assert printed["plan"]["sparse"]["sparse_topk"] == 2048, "the budget of publications"
    plan = Plan(100_000)
    modes = {mode: memory(LLAMA, H200, plan, mode) for mode in Mode}
    expected = modes[Mode.RESIDENT].request
    assert printed["modes"]["resident"]["memory"]["request"] == {
        "value": expected.value, "unit": "bytes", "formula": expected.formula,
    }  # fmt: skip
    assert printed == json.loads(json.dumps(as_json(LLAMA, H200, plan, modes)))


def test_flags_reach_plan_and_device(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--batch 3 --sparse-topk 0.2 --scorer rot3u --dense-layers 0 5 --hot-sets 3 "
    flags += "--representations host --device-memory 100 --host-memory 2"
    assert main([*GOOD, "--json", *flags.split()]) == 0
    printed = json.loads(capsys.readouterr().out)
    plan, device = printed["plan"], printed["device"]
    assert (plan["batch"], plan["hot_sets"]) == (3, 3.0)
    assert plan["representations_on_host"]
    assert plan["host_memory_bytes"] == 2 << 30
    settings = plan["sparse"]
    assert (settings["sparse_topk"], settings["scorer"]) == (0.2, "rot3u")
    assert settings["dense_layers"] == [0, 5]
    assert device["memory_bytes"] == 100 << 30
    assert "as given" in device["source"]


def test_here_is_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GOOD, "--device", "here", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device"]["memory_bytes"] > 1 << 28


def test_neither_torch_nor_grpc_is_imported() -> None:
    code = (
        "import sys; from hotkv_sparse.estimate.command import main; "
        f"main({GOOD}); print(sorted({{'torch', 'grpc', 'pydantic', 'vllm', 'numba'}} & "
        "set(sys.modules)), file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr.splitlines()[-1] == "[]"
