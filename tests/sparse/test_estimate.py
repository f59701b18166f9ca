"""Tests estimates of memory use against numbers by hand, and rules for all estimates."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse import SparseConfig
from tools.estimate.command import as_json, main
from tools.estimate.memory import Memory, figures_of, memory
from tools.estimate.plan import DEVICES, MODELS, Mode, Plan, read_config

LLAMA, QWEN = MODELS["llama-3.1-8b"], MODELS["qwen2.5-14b"]
H200 = DEVICES["h200"]
KIB, MIB = 1 << 10, 1 << 20
TOKENS_128K, CHUNK = 131072, 8192


def sparse(**settings: Any) -> SparseConfig:
    return SparseConfig(**({"dense_layers": (), "min_context_tokens": 0} | settings))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("smollm2-135m", 134_515_008),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-72b", 72_706_203_648),
        ("llama-3.1-8b", 8_030_261_248),
        ("mistral-7b", 7_248_023_552),
    ],
)
def test_parameters_are_those_of_the_models_cards(name: str, parameters: int) -> None:
    assert MODELS[name].parameters == parameters


def test_published_examples() -> None:
    """Llama: 128 KiB of KV per token, 512 MiB of staging per layer. Qwen with 1M tokens: 197 GB
    of KV, 13.1 GB of sketches."""
    plan = Plan(TOKENS_128K, chunk_tokens=CHUNK, staging_layers=1)
    taken = memory(LLAMA, H200, plan, Mode.RESIDENT)
    assert taken.kv_token.value == 128 * KIB
    assert taken.staging.value == 512 * MIB + CHUNK * 128 * KIB
    plan = Plan(1_000_000, sparse=sparse(sparse_topk=2048, sink_tokens=0, recent_tokens=1))
    taken = memory(QWEN, H200, plan, Mode.RESIDENT)
    assert taken.request_sketches.value == pytest.approx(13.1e9, rel=0.005)
    assert memory(QWEN, H200, plan, Mode.DENSE).request_kv.value == pytest.approx(197e9, rel=0.005)


@pytest.mark.parametrize(("batch", "tokens"), [(3, CHUNK), (9000, 9000)])
def test_activations_and_room_are_those_of_the_formulas(batch: int, tokens: int) -> None:
    plan = Plan(TOKENS_128K, batch=batch, chunk_tokens=CHUNK, tensor_parallel=2)
    taken = memory(LLAMA, H200, plan, Mode.RESIDENT)
    wide = 6 * 4096 + 3 * 14336 // 2
    assert taken.activations.value == tokens * wide * 2 + 4 * batch * 128_256 // 2
    used = taken.weights.value + taken.activations.value + taken.staging.value
    assert taken.room.value == pytest.approx(taken.device_limit.value - used)
    assert taken.device_limit.value == H200.memory_bytes * plan.memory_ratio
    assert taken.host.value == batch * taken.host_request.value
    alone = memory(LLAMA, H200, plan.with_(tensor_parallel=1), Mode.DENSE)
    assert "/ 2 devices" in taken.weights.formula and "devices" not in alone.weights.formula
    with pytest.raises(HotKVError, match="the model has 32 layers"):
        memory(LLAMA, H200, plan.with_(sparse=sparse(dense_layers=(32,))), Mode.DENSE)


def test_dense_layers_stay_whole_on_the_device() -> None:
    plan = Plan(TOKENS_128K, sparse=sparse(sparse_topk=4096, dense_layers=(0, 1)))
    page_bytes, blocks = 64 * KIB, 8192
    taken = memory(LLAMA, H200, plan, Mode.RESIDENT)
    assert taken.request_kv.value == (30 * 256 + 2 * blocks) * page_bytes
    assert taken.request_sketches.value == 30 * blocks * 8 * 16 * 34


def test_sketches_in_host_memory_spare_the_device() -> None:
    plan = Plan(TOKENS_128K, sketches_on_host=True)
    taken = memory(LLAMA, H200, plan, Mode.RESIDENT)
    assert taken.request_sketches.value == 0.0
    assert taken.host_request.value == 8192 * 32 * (64 * KIB + 8 * 16 * 34)
    taken = memory(LLAMA, H200, plan, Mode.SPARSE)
    assert taken.host_request.value == 8192 * 32 * 8 * 16 * 34
    for one, mode in ((plan, Mode.DENSE), (Plan(TOKENS_128K), Mode.SPARSE)):
        assert memory(LLAMA, H200, one, mode).host_request.value == 0.0


def test_devices_share_weights_and_heads() -> None:
    def taken(num_devices: int, mode: Mode = Mode.DENSE) -> Memory:
        return memory(LLAMA, H200, Plan(TOKENS_128K, tensor_parallel=num_devices), mode)

    assert taken(2).weights.value == taken(1).weights.value / 2
    for bits in (4, 8, 16, 32):
        quantised = memory(LLAMA, H200, Plan(1, weight_bits=bits, tensor_parallel=2), Mode.DENSE)
        assert quantised.weights.value == LLAMA.parameters * bits / 16
    assert taken(2).request.value == taken(1).request.value / 2
    # 16 devices for 8 KV heads: each head is stored twice.
    assert taken(16).request.value == taken(1).request.value / 8
    assert len({taken(n, Mode.RESIDENT).host_request.value for n in (1, 2, 16)}) == 1


def test_memory_of_host_and_device_bounds_the_batch() -> None:
    plan = Plan(TOKENS_128K)
    host_request = memory(LLAMA, H200, plan, Mode.RESIDENT).host_request.value
    bounded = plan.with_(host_memory_bytes=int(3.5 * host_request))
    assert memory(LLAMA, H200, bounded, Mode.RESIDENT).largest_batch.value == 3
    assert memory(LLAMA, H200, bounded, Mode.DENSE).largest_batch.value == 7
    assert memory(LLAMA, H200, plan, Mode.RESIDENT).largest_batch.value > 3
    too_large, small = MODELS["qwen2.5-72b"], DEVICES["a100-40g"]
    assert memory(too_large, small, Plan(4096), Mode.DENSE).largest_batch.value == 0.0


def fits(plan: Plan) -> bool:
    """Does `Plan.check` accept the plan for the Llama?"""
    try:
        plan.check(LLAMA)
    except HotKVError:
        return False
    return True


PLANS = st.builds(
    Plan,
    tokens=st.integers(1, 1 << 20),
    batch=st.integers(1, 64),
    block_tokens=st.sampled_from([16, 32, 64, 128]),
    sparse=st.builds(
        sparse,
        sparse_topk=st.one_of(st.integers(256, 8192), st.floats(0.01, 1.0)),
        scorer=st.sampled_from(["rot2u", "rot3u", "mean", "quest"]),
        dense_layers=st.sampled_from([(), (0,), (0, 1)]),
    ),
    sketches_on_host=st.booleans(),
    chunk_tokens=st.integers(256, 16384),
    tensor_parallel=st.sampled_from([1, 2, 4, 8]),
).filter(fits)
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


GOOD = ["--model", "llama-3.1-8b", "--tokens", "100000", "--device", "h200"]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--model", "gpt-9"),
        ("--tokens", "0"),
        ("--tokens", f"1{'0' * 400}"),
        ("--device", "abacus"),
        ("--batch", "0"),
        ("--batch", f"1{'0' * 320}"),
        ("--block-tokens", "-1"),
        ("--chunk-tokens", "0"),
        ("--staging-layers", "0"),
        ("--tensor-parallel", "3"),
        ("--tensor-parallel", "0"),
        ("--dtype", "fp3"),
        ("--weight-bits", "5"),
        ("--memory-ratio", "1.1"),
        ("--memory-ratio", "nan"),
        ("--host-memory", "-1"),
        ("--sparse-topk", "1.5"),
        ("--sparse-topk", "10"),
        ("--scorer", "rot9u"),
        ("--dense-layers", "32"),
        ("--device-memory", "0"),
    ],
)
def test_bad_input_names_the_field(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*GOOD, flag, value]) == 2
    said = capsys.readouterr()
    field = said.err.split()[0].removeprefix("sparse.")
    assert (said.out, field.replace("_", "-")) == ("", flag.removeprefix("--"))
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize("left_out", ["--model", "--tokens", "--device"])
def test_a_missing_flag_is_named(left_out: str, capsys: pytest.CaptureFixture[str]) -> None:
    at = GOOD.index(left_out)
    with pytest.raises(SystemExit):
        main([*GOOD[:at], *GOOD[at + 2 :]])
    assert left_out in capsys.readouterr().err.splitlines()[-1]


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


def test_a_config_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = config_file(tmp_path)
    for path in (file, tmp_path):
        model = read_config(path)
        assert (model.name, model.parameters) == (tmp_path.name, LLAMA.parameters)
    file.write_text(json.dumps({"text_config": CONFIG}))
    assert read_config(file).parameters == LLAMA.parameters
    for contents in ("", "[]", "{", "[" * 100_000):
        file.write_text(contents)
        with pytest.raises(HotKVError, match="config"):
            read_config(tmp_path)
    missing = str(tmp_path / "none.json")
    assert main(["--config", missing, "--tokens", "1", "--device", "h200"]) == 2
    assert missing in capsys.readouterr().err


def test_a_config_of_qwen_is_read(tmp_path: Path) -> None:
    """Qwen has biases that no field names; without `use_sliding_window` its window counts for
    nothing."""
    sizes = {"num_hidden_layers": 48, "num_attention_heads": 40, "hidden_size": 5120}
    sizes |= {"intermediate_size": 13824, "vocab_size": 152064, "sliding_window": 131072}
    file = config_file(tmp_path, model_type="qwen2", use_sliding_window=False, **sizes)
    assert read_config(file).parameters == QWEN.parameters


@pytest.mark.parametrize(
    ("field", "least", "most", "bad"),
    [
        ("memory_ratio", 5e-324, 1.0, [0, 1 + 2**-52, float("nan"), True, "1"]),
        ("batch", 1, 10**18, [0, 10**18 + 1, 1.0, True]),
    ],
)
def test_plan_takes_its_limits_and_refuses_beyond(
    field: str, least: float, most: float, bad: list[Any]
) -> None:
    for good in (least, most):
        assert getattr(Plan(1).with_(**{field: good}), field) == good
    for value in bad:
        with pytest.raises(HotKVError) as caught:
            Plan(1).with_(**{field: value})
        assert caught.value.message.startswith(f"{field} ")


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
        ({"layer_types": [[]]}, "config.layer_types"),
        ({"mamba_d_state": 128}, "config.mamba_d_state"),
        ({"ssm_state_size": 128}, "config.ssm_state_size"),
        ({"text_config": 3}, "config.text_config"),
    ],
)
def test_a_bad_config_names_the_field(tmp_path: Path, changes: Any, field: str) -> None:
    with pytest.raises(HotKVError) as caught:
        read_config(config_file(tmp_path, **changes))
    assert caught.value.reason is Reason.INVALID_FIELD
    assert caught.value.message.startswith(f"{field} ")


def test_flags_reach_plan_and_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GOOD, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    plan = Plan(100_000)
    modes = {mode: memory(LLAMA, H200, plan, mode) for mode in Mode}
    assert printed == json.loads(json.dumps(as_json(LLAMA, H200, plan, modes)))
    assert list(printed["modes"]) == ["dense", "sparse", "resident"]
    flags = "--batch 3 --sparse-topk 0.2 --scorer rot3u --dense-layers 0 5 "
    flags += "--sketches host --device-memory 100 --host-memory 2"
    assert main([*GOOD, "--json", *flags.split()]) == 0
    printed = json.loads(capsys.readouterr().out)
    plan_of, settings = printed["plan"], printed["plan"]["sparse"]
    assert plan_of["batch"] == 3
    assert plan_of["sketches_on_host"] and plan_of["host_memory_bytes"] == 2 << 30
    assert (settings["sparse_topk"], settings["scorer"]) == (0.2, "rot3u")
    assert settings["dense_layers"] == [0, 5]
    assert printed["device"]["memory_bytes"] == 100 << 30
