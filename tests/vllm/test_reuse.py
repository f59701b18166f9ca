"""`reuse.why_forbidden`: off where vLLM forbids prefix caching, on where only the user has
turned it off."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from transformers import PretrainedConfig
from vllm.config.aux_output import AuxOutputConfig
from vllm.config.model import AttnTypeStr, ModelConfig
from vllm.config.pooler import SEQ_POOLING_TYPES, TOK_POOLING_TYPES
from vllm.distributed.aux_output_connector.store import BlockObjectStore, BlockObjectStoreError
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.interface import CpuArchEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
from vllm.v1.kv_cache_interface import KVQuantMode, RSWASpec

from hotkv_vllm.compat import reuse
from tests.vllm.feature_runs import Starter, pooled, requests
from tests.vllm.processes import EngineProcess
from tests.vllm.runs import same, settled
from tests.vllm.specs import full_spec, one_group, window_spec
from tests.vllm.tiny import BLOCK_TOKENS, write_model
from tests.vllm.tokenizer import write_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FORBIDDEN = "vLLM itself forbids prefix caching: "
PREFIX_LM = {
    "architectures": ["HrmTextForCausalLM"],
    "model_type": "hrm_text",
    "H_cycles": 2,
    "L_cycles": 2,
    "L_bp_cycles": [2],
    "num_key_value_heads": 4,
    "num_hidden_layers": 12,
    "num_layers_per_stack": 2,
    "prefix_lm": True,
    "embedding_scale": 50.0,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}


# ------------------------------------------------------------------------------------------- tables


class Model(ModelConfig):
    """info: of the model registry.
    pooling: sequence and token type; None: generates.
    """

    def __init__(
        self,
        info: dict[str, Any],
        pooling: tuple[str, str] | None = None,
        *,
        is_causal: bool = True,
        is_encoder_decoder: bool = False,
    ) -> None:
        self.runner_type = "generate" if pooling is None else "pooling"
        self.pooler_config = None
        if pooling is not None:
            self.pooler_config = SimpleNamespace(
                seq_pooling_type=pooling[0], tok_pooling_type=pooling[1]
            )
        self._model_info = SimpleNamespace(**info)
        self.hf_config = PretrainedConfig(
            is_causal=is_causal, is_encoder_decoder=is_encoder_decoder
        )

    @property
    def use_mla(self) -> bool:
        return False


def vllms_flag(model: Model, asked: bool | None) -> bool:
    """asked: None: the user gave no value."""
    arguments = object.__new__(EngineArgs)
    arguments.enable_prefix_caching, arguments.enable_chunked_prefill = asked, None
    arguments._set_default_chunked_prefill_and_prefix_caching_args(model)
    return bool(arguments.enable_prefix_caching)


def engine(
    model: Any = None,
    *specs: Any,
    caches: bool = False,
    chunks: bool = True,
    encodes: bool = False,
    backend: str = "",
    experts: bool = False,
) -> tuple[Any, Any]:
    """caches, chunks: prefix caching and chunked prefill.
    encodes: media only.
    experts: requests return the used experts.
    """
    layer = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: backend))
    return SimpleNamespace(
        model_config=model or SimpleNamespace(is_prefix_caching_supported=True, use_mla=False),
        cache_config=SimpleNamespace(enable_prefix_caching=caches),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=chunks),
        compilation_config=SimpleNamespace(
            static_forward_context={"layer.0": layer, "moe": SimpleNamespace()} if backend else {}
        ),
        is_mm_encoder_only=encodes,
        aux_output_config=AuxOutputConfig(enable_return_routed_experts=experts),
    ), SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=one) for one in specs or (full_spec(),)]
    )


def answers_as_vllm(model: Model) -> None:
    """A user may turn it on against a default. For pooling models vLLM then warns of a crash, so
    hotkv stays off."""
    is_supported = vllms_flag(model, None)
    for asked in (None, False, True):
        why = reuse.why_forbidden(*engine(model, caches=vllms_flag(model, asked)))
        may_reuse = is_supported or (asked is True and model.runner_type == "generate")
        assert (why == "") == may_reuse, (asked, model.attn_type, why)
        assert not why or why.startswith(FORBIDDEN)


POOLINGS = [None, *itertools.product(SEQ_POOLING_TYPES, TOK_POOLING_TYPES)]


def test_every_model_and_pooling_answers_as_vllm() -> None:
    found: set[bool] = set()
    for attention, default, is_free, is_hybrid in itertools.product(
        get_args(AttnTypeStr), SEQ_POOLING_TYPES, (False, True), (False, True)
    ):
        info = {
            "attn_type": attention,
            "default_seq_pooling_type": default,
            "is_attention_free": is_free,
            "is_hybrid": is_hybrid,
        }
        for pooling, is_causal, is_pair in itertools.product(
            POOLINGS, (False, True), (False, True)
        ):
            model = Model(info, pooling, is_causal=is_causal, is_encoder_decoder=is_pair)
            answers_as_vllm(model)
            found.add(model.is_prefix_caching_supported)
    assert found == {False, True}


NON_CAUSAL = replace(full_spec(), non_causal=True)
PER_TOKEN_SPEC = replace(full_spec(), kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD)
WINDOWED_ANSWERS = RSWASpec(
    block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=32, dtype=torch.bfloat16, rswa_window=64
)


@pytest.mark.parametrize(
    ("specs", "why"),
    [
        ((full_spec(), NON_CAUSAL), "the model has non-causal attention layers"),
        ((type(NON_CAUSAL).merge([full_spec(), NON_CAUSAL]),), "the model has non-causal"),
        ((one_group(full_spec(), NON_CAUSAL), window_spec()), "the model has non-causal"),
        ((WINDOWED_ANSWERS,), "with R-SWA"),
        ((one_group(full_spec(), WINDOWED_ANSWERS),), "with R-SWA"),
        ((full_spec(), window_spec(), one_group(full_spec())), ""),
    ],
)
def test_one_layer_without_prefix_kv_is_enough(specs: tuple[Any, ...], why: str) -> None:
    found = reuse.why_forbidden(*engine(None, *specs))
    assert found.startswith(FORBIDDEN + why) if why else not found


@pytest.mark.parametrize("backend", ["FLASHINFER", "TRITON_MLA", "FLASH_ATTN", ""])
@pytest.mark.parametrize("is_invariant", [False, True])
def test_batch_invariance_forbids_some_backends(
    monkeypatch: pytest.MonkeyPatch, backend: str, is_invariant: bool
) -> None:
    monkeypatch.setattr(reuse, "envs", SimpleNamespace(VLLM_BATCH_INVARIANT=is_invariant))
    why = reuse.why_forbidden(*engine(backend=backend))
    is_forbidden = is_invariant and backend in ("FLASHINFER", "TRITON_MLA")
    assert why == (f"{FORBIDDEN}batch invariance with {backend}" if is_forbidden else "")


def test_outputs_that_a_hit_can_not_give() -> None:
    why = reuse.why_forbidden(*engine(encodes=True))
    assert why == f"{FORBIDDEN}this engine runs the multi-modal encoder only"
    assert reuse.why_forbidden(*engine(experts=True)).startswith(
        "with enable_return_routed_experts"
    )
    # Why: vLLM raises for a block that another engine stored.
    with pytest.raises(BlockObjectStoreError):
        BlockObjectStore(max_bytes=64, object_nbytes=64).get_concatenated(["another engine's"])


@pytest.mark.parametrize("is_v2", [False, True])
@pytest.mark.parametrize("warms", [False, True])
def test_scales_that_the_first_step_resets(is_v2: bool, warms: bool) -> None:
    vllm_config, kv_cache_config = engine(None, full_spec(), PER_TOKEN_SPEC)
    vllm_config.use_v2_model_runner = is_v2
    vllm_config.kernel_config = SimpleNamespace(enable_jit_warmup=warms)
    vllm_config.cache_config.cache_dtype = "int8_per_token_head"
    why = reuse.why_forbidden(vllm_config, kv_cache_config)
    assert ("vLLM resets the scales of kv_cache_dtype int8_per_token_head" in why) == (
        not (is_v2 and warms)
    )


def test_vllms_attention_resets_scales_when_it_first_runs() -> None:
    layer = object.__new__(TritonAttentionImpl)
    layer._kv_quant_mode = PER_TOKEN_SPEC.kv_quant_mode
    pages = torch.full((2, 2, BLOCK_TOKENS, 2 * (32 + 4)), 7, dtype=torch.int8)
    layer._pth_key_value_caches(pages)
    assert (pages == 7).sum() == pages.numel() * 32 // 36
    pages.fill_(7)
    layer._pth_key_value_caches(pages)
    assert (pages == 7).all()


def test_kinds_of_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    latent = SimpleNamespace(is_prefix_caching_supported=True, use_mla=True)

    def why(**flags: bool) -> str:
        return reuse.why_forbidden(*engine(latent, **flags))

    # Forbidden only if both flags are off.
    assert "latent attention (MLA) on a CPU without AMX" in why(caches=False, chunks=False)
    assert why(caches=True, chunks=True) == why(caches=False, chunks=True) == ""
    platform = SimpleNamespace(is_cpu=lambda: True, get_cpu_architecture=lambda: CpuArchEnum.RISCV)
    monkeypatch.setattr(reuse, "current_platform", platform)
    assert reuse.why_forbidden(*engine(caches=True)) == f"{FORBIDDEN}the CPU is a RISC-V"
    platform.is_cpu = lambda: False
    assert why(caches=False, chunks=False) == ""


# ------------------------------------------------------------------------------------------ engines


def write_prefix_lm(folder: Path) -> Path:
    config = write_model(folder) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | PREFIX_LM))
    return folder


def answers_the_same_beside_a_known_prefix(engine: EngineProcess) -> bool:
    """Asks alone, and after others with the same 260 tokens."""
    for seed in (51, 61):
        known = requests(seed, (300,))[0]["tokens"]
        asked = known[:260] + requests(seed + 1, (240,))[0]["tokens"]
        params = {"max_tokens": 12}
        alone = engine.ask("sample", requests=[{"tokens": asked, "salt": "alone"}], params=params)
        engine.ask("sample", requests=[{"tokens": known}], params=params)
        settled(engine)
        beside = engine.ask("sample", requests=[{"tokens": asked}], params=params)
        if beside["cached"] != [0] or not same(alone, beside):
            return False
    return True


@pytest.mark.long
def test_prefix_lm_answers_alike_whatever_others_asked(start: Starter, tmp_path: Path) -> None:
    """A token's KV depends on the whole prompt."""
    engine = start(write_prefix_lm(tmp_path / "model"))
    assert answers_the_same_beside_a_known_prefix(engine)
    assert f"hotkv is off: {FORBIDDEN}" in engine.log()


def test_a_vector_for_each_token_reads_no_cache(start: Starter, tmp_path: Path) -> None:
    """Other requests of this engine may hit."""
    model = write_tokenizer(write_model(tmp_path / "model"))
    engine = start(model, runner="pooling", convert="embed", pooler_config={"task": "token_embed"})
    batch = requests(37)
    first = pooled(engine, "token_embed", batch)
    again = engine.ask("token_embed", requests=batch)
    assert first == again == {"lengths": [100, 257, 500], "cached": [0, 0, 0]}
    assert "callback_errors" not in engine.ask("stats")["totals"]
