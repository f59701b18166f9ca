"""Fingerprints are equal only if all settings but `HARMLESS` ones are. Walks the installed
vLLM's config classes."""

import ast
import copy
import dataclasses
import json
from dataclasses import replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.config
from vllm import envs
from vllm import models as own_models_of_vllm
from vllm.config.engram import EngramConfig
from vllm.config.kernel import IrOpPriorityConfig
from vllm.config.lora import LoRAConfig
from vllm.config.quantization import QuantizationConfigArgs
from vllm.config.speculative import SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor import models as models_of_vllm
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, MambaSpec

from hotkv_proto.groups import GroupKind
from hotkv_vllm.compat import key_space, model_weights
from hotkv_vllm.compat.fingerprint import (
    HARMLESS,
    HARMLESS_ENVIRONMENT,
    WITHOUT_LENGTH,
    canonical,
    digest,
    key_space_factors,
)
from hotkv_vllm.compat.kv_groups import CacheGroup
from tests.doubles.fake import FakeServer
from tests.vllm.config_walk import config_objects
from tests.vllm.harness import Engine
from tests.vllm.specs import full_spec, one_group
from tests.vllm.tiny import engine_args, transfer_config
from tests.vllm.vision import write_vision_model

SPEC = {"layer.0": full_spec()}
GONE_IN_0_33 = {
    *("VLLM_RAY_BUNDLE_INDICES", "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"),
    *("VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE", "VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM"),
    "VLLM_USE_RAY_WRAPPED_PP_COMM",
}
"""Variables of vLLM 0.32."""


def config_of(model: Path, role: str = "kv_both") -> Any:
    arguments = engine_args(write_vision_model(model), dtype="float32")
    del arguments["disable_log_stats"], arguments["skip_tokenizer_init"]
    transfer = transfer_config() | {"kv_role": role}
    return EngineArgs(**arguments, kv_transfer_config=transfer).create_engine_config()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return config_of(tmp_path_factory.mktemp("config"))


def changed(config: Any, part: str, **fields: Any) -> Any:
    """part: attribute; "" for the config."""
    whole = copy.copy(config)
    if part:
        whole.__dict__[part] = copy.copy(getattr(config, part))
    (getattr(whole, part) if part else whole).__dict__.update(fields)
    return whole


def factors(config: Any) -> Any:
    return key_space_factors(config, SPEC)


# ----------------------------------------------------------------------------------- the allow-list


def test_every_name_of_the_allow_lists_is_vllms() -> None:
    online = OnlineQuantizationConfig(QuantizationConfigArgs(linear="fp8_per_tensor"))
    for name, harmless in HARMLESS.items():
        if name == type(online).__name__:
            assert harmless <= vars(online).keys()
            continue
        specs = {"KVCacheSpec": [FullAttentionSpec, MambaSpec]}
        kinds = specs.get(name) or [getattr(vllm.config, name)]
        fields = {field.name for kind in kinds for field in dataclasses.fields(kind)}
        assert harmless <= fields, (name, sorted(harmless - fields))
    assert set(HARMLESS_ENVIRONMENT) - GONE_IN_0_33 <= set(envs.compile_factors())


READ_ONE_BY_ONE = ("model_config", "cache_config", "parallel_config", "speculative_config")


class Changed:
    """Differs from any field's value."""


def test_each_field_is_harmless_or_changes_key(config: Any) -> None:
    def harmless(value: Any) -> set[str]:
        return {name for kind in type(value).__mro__ for name in HARMLESS.get(kind.__name__, ())}

    before = factors(config)
    assert factors(copy.deepcopy(config)) == before
    unlike: list[str] = []
    seen = 0
    for path, value in config_objects(config):
        inside_harmless = False
        at: Any = config
        for name in filter(None, path.split(".")):
            inside_harmless |= name in harmless(at)
            at = getattr(at, name)
        for field in dataclasses.fields(value):
            old = getattr(value, field.name, None)
            # Read one by one, so a `Changed` would raise.
            if path + field.name in READ_ONE_BY_ONE:
                continue
            value.__dict__[field.name] = Changed()
            try:
                changes = factors(config) != before
            finally:
                value.__dict__[field.name] = old
            seen += 1
            if changes == (inside_harmless or field.name in harmless(value)):
                unlike.append(path + field.name)
    assert not unlike and seen > 270


def test_layer_fields_are_in_the_key_space(config: Any) -> None:
    mamba = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))

    def of(**layers: Any) -> Any:
        return key_space_factors(config, layers)

    outer = HARMLESS["KVCacheSpec"]
    for spec in (full_spec(), mamba):
        for field in dataclasses.fields(spec):
            other = copy.copy(spec)
            other.__dict__[field.name] = Changed()
            assert (of(a=spec) == of(a=other)) == (field.name in outer)
    assert of(a=mamba, b=full_spec()) != of(b=mamba, a=full_spec())


def test_unknown_variables_and_versions_keep_engines_apart(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = factors(config)
    for name in ("VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_DP_RANK", "VLLM_LOG_BATCHSIZE_INTERVAL"):
        assert name in HARMLESS_ENVIRONMENT
        monkeypatch.setenv(name, "3")
    # Set by vLLM's executors for Ray.
    of_ray = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
    assert of_ray in envs.compile_factors()
    monkeypatch.setenv(of_ray, "1")
    assert factors(config) == before
    changes = {
        "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
        "VLLM_VIDEO_LOADER_BACKEND": "other",
        "VLLM_MEDIA_CONNECTOR": "other",
        "XHS_VIDEO_JPEG_QUALITY": "50",
    }
    for name, value in changes.items():
        with monkeypatch.context() as patch:
            # vLLM ignores unknown values.
            patch.setenv(name, value)
            assert factors(config) != before, name
    for version in ("hotkv_vllm.versions.VERSION", "transformers.__version__"):
        with monkeypatch.context() as patch:
            patch.setattr(version, "9.9.9")
            assert factors(config) != before


def test_fitted_length_is_not_in_key_space(config: Any) -> None:
    """With `max_model_len` -1 vLLM fits the length to the memory; it matters only where media
    are sized by it."""
    own = config.model_config.get_and_verify_max_len(None)

    def of(**more: Any) -> list[Any]:
        engines = (changed(config, "model_config", max_model_len=n, **more) for n in (own, 480))
        return [factors(engine) for engine in engines]

    given, fitted = of(), of(original_max_model_len=-1)
    assert given[0] != given[1] and fitted == [given[0]] * 2
    assert of(original_max_model_len=-1, _architecture="NemotronH_Nano_VL_V2") == given
    # More such models need a review. Voxtral reads it for dummy inputs.
    folders = [Path(*models_of_vllm.__path__), Path(*own_models_of_vllm.__path__)]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    readers = {file for file in files if "ctx.model_config.max_model_len" in file.read_text()}
    assert {file.name for file in readers} == {"nano_nemotron_vl.py", "processor.py", "voxtral.py"}
    assert "dots3_note" in str(readers)


def test_length_counts_where_it_may_decide_kv(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def are_apart(architecture: str = "LlamaForCausalLM", **more: Any) -> bool:
        engines = (
            changed(config, "model_config", _architecture=architecture, max_model_len=n, **more)
            for n in (512, 480)
        )
        return len(set(map(factors, engines))) == 2

    assert not any(map(are_apart, WITHOUT_LENGTH)) and not are_apart(original_max_model_len=-1)
    # It scales queries if `max_model_len` is over 32,768.
    for architecture in ("Llama4ForCausalLM", "DeepseekV3ForCausalLM", "of a plugin"):
        assert are_apart(architecture)
    for kind, is_apart in (("longrope", True), ("su", True), ("yarn", False), ("dynamic", False)):
        model = copy.deepcopy(config.model_config.hf_config)
        model.text_config.rope_parameters = {"rope_type": kind}
        assert are_apart(hf_config=model) is is_apart
    for name, value in (
        ("hotkv_vllm.versions.VERSION", "9.9.9"),
        ("hotkv_vllm.compat.fingerprint.plugin_classes", lambda: {"LlamaForCausalLM": "x@1"}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            assert are_apart()
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert are_apart()


MODELS = Path(*models_of_vllm.__path__)
SETTERS = {"EmbeddingGemma2", "MambaModelConfig", "NomicBertModelConfig"}
"""In `models/config.py`: they set `max_model_len` itself, the size of a Mamba block, which counts,
and what an embedding model has."""


def built_on(start: Path) -> set[Path]:
    """A model's file with those of models that it imports, at any depth."""
    found, waiting = set[Path](), [start]
    while waiting:
        path = waiting.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                module = (node.module or "").removeprefix("vllm.model_executor.models.")
                is_sibling = node.level == 1 or module != node.module
                parts = [module, *(one.name for one in node.names)] if is_sibling else []
                waiting += [MODELS / f"{part}.py" for part in parts if part]
            assert not (
                isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.models.")
            ), f"{path} builds on {node.module}: is max_model_len read there?"
    return found


def test_models_without_length_do_not_read_it() -> None:
    config = MODELS / "config.py"
    classes = [one for one in ast.parse(config.read_text()).body if isinstance(one, ast.ClassDef)]
    readers = [one.name for one in classes if "max_model_len" in ast.unparse(one)]
    assert len(readers) == len(SETTERS)
    assert all(any(name in reader for reader in readers) for name in SETTERS), readers
    for architecture in WITHOUT_LENGTH:
        module = ModelRegistry.models[architecture].module_name.rpartition(".")[2]
        files = built_on(MODELS / f"{module}.py") - {config}
        assert files
        found = [file.name for file in files if "max_model_len" in file.read_text()]
        assert not found, f"{architecture}: {found}"


def test_one_kind_of_rope_reads_the_length() -> None:
    folder = MODELS.parent / "layers" / "rotary_embedding"
    found = [file.name for file in folder.glob("*.py") if "max_model_len" in file.read_text()]
    assert found == ["phi3_long_rope_scaled_rope.py"]


def test_ngram_memory_is_not_in_key_space(config: Any) -> None:
    tables = ({}, {"dp_shared_memory": True}, {"dp_shared_memory": False}, {"use_thp": True})
    shared = {factors(changed(config, "", engram_config=EngramConfig(**one))) for one in tables}
    on_device = factors(changed(config, "", engram_config=EngramConfig(cpu_offload=False)))
    assert len(shared) == 1 and len({factors(config), on_device, *shared}) == 3


def test_canonical_form_has_no_address_or_order() -> None:
    one = SimpleNamespace(a={3, 1, 2}, b={"x": 1, "y": torch.bfloat16}, c=object())
    two = SimpleNamespace(c=object(), b={"y": torch.bfloat16, "x": 1}, a={2, 3, 1})
    assert digest(one) == digest(two) and "0x" not in json.dumps(canonical(one))
    apart = [torch.float16, torch.bfloat16, {1: 2}, {"1": 2}, 1, "1", [1], True, b"1", 0.5, 1.5]
    apart += [Decimal(1), Decimal(2), Path("a"), Path("b"), int, str, len, partial(len, 1)]
    apart += [partial(len, 2), KVQuantMode.NONE, SimpleNamespace(a=1), SimpleNamespace(a=2)]
    assert len({digest(SimpleNamespace(a=value)) for value in apart}) == len(apart)
    assert len({digest(value) for value in apart}) == len(apart)
    loop = SimpleNamespace()
    loop.itself = loop
    assert digest(loop) == digest(loop)


def mixed(*wide: int) -> dict[str, Any]:
    """Two dtypes of equal page size; `wide` layers have bfloat16."""
    kinds = {True: torch.bfloat16, False: torch.float16}
    return {"specs": {f"layer.{i}": replace(full_spec(), dtype=kinds[i in wide]) for i in range(4)}}


def test_only_settings_that_change_kv_keep_engines_apart(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spaces(folder: str, *settings: dict[str, Any]) -> list[bytes]:
        engines = [Engine(server, tmp_path / folder, monkeypatch, **more) for more in settings]
        sessions = [one.connector._scheduler.cache.session for one in engines]
        for one in engines:
            one.worker.shutdown()
            one.connector.shutdown()
        return [session.config.key_space.fingerprint for session in sessions]

    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    (plain,) = spaces("here", {})
    alike = (
        {"blocks": 96, "max_num_seqs": 3, "max_tokens_per_step": 512, "max_logprobs": 7},
        {"scheduling_policy": "priority", "enable_prefix_caching": False},
        {"gpu_memory_utilization": 0.5, "served_model_name": "other", "seed": 0},
        {
            "extra": {"lookup_timeout_s": 1.0, "max_inflight_store_mib": 2},
            "async_scheduling": False,
        },
        {"speculative_config": ngram},
        {"max_model_len": 256},
    )
    assert set(spaces("there/under another name", *alike)) == {plain}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}
    apart = (
        {"mamba_cache_dtype": "float16"},
        {"kv_cache_dtype_skip_layers": ["1"]},
        {"hf_overrides": rope},
        mixed(1),
        mixed(2),
    )
    found = spaces("here", *apart)
    assert len({plain, *found}) == 1 + len(apart) and spaces("here", *apart) == found


@pytest.mark.parametrize("other", [{"model": "another/place"}, {"revision": "another"}], ids=str)
def test_drafters_model_is_in_key_space(config: Any, other: dict[str, str]) -> None:
    def with_draft(method: str, draft: Any) -> Any:
        speculative = object.__new__(SpeculativeConfig)
        speculative.__dict__.update(method=method, draft_model_config=draft, draft_load_config=None)
        return changed(config, "", speculative_config=speculative)

    draft = changed(config.model_config, "", seed=7, **other)
    engines = (config, with_draft("ngram", None), with_draft("eagle", draft))
    for identity in (factors, model_weights.weights_identity):
        plain, ngram, eagle = map(identity, engines)
        assert plain == ngram != eagle


def test_image_encoder_scales_are_named_by_content(config: Any, tmp_path: Path) -> None:
    scales, seen = tmp_path / "scales.json", {model_weights.weights_identity(config)}
    media = copy.copy(config.model_config.multimodal_config)
    media.mm_encoder_fp8_scale_path = str(scales)
    with_scales = changed(config, "model_config", multimodal_config=media)
    for text in ("{}", '{"layer": 2.0}', "{}"):
        scales.write_text(text)
        assert model_weights.weights_may_be_older(with_scales)
        seen.add(model_weights.weights_identity(with_scales))
    assert len(seen) == 3


def packed(name: str, module: str = "vllm.attention") -> Any:
    """A layer whose backend has this name and module."""
    own = {"get_name": lambda: name, "__module__": module}
    return SimpleNamespace(get_attn_backend=lambda: type("Backend", (), own))


def packing_of(config: Any, spec: Any, device: str = "cuda", **layers: Any) -> str:
    """The first group is in another pipeline stage."""
    one = changed(config, "compilation_config", static_forward_context=layers)
    kv = SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(layer_names=list(names), kv_cache_spec=spec) for names in ((), layers)
        ]
    )
    groups = tuple(CacheGroup(number, GroupKind.FULL_ATTENTION, 32) for number in range(2))
    return key_space.packing(one, kv, groups, device)


@pytest.mark.parametrize(
    ("kv_dtype", "mode", "dtype"),
    [
        ("fp8", 0, torch.float32),
        ("auto", 0, torch.float32),
        ("auto", KVQuantMode.FP8_PER_TENSOR, torch.float32),
        # DeepSeek V3.2's indexer stores FP8 as bytes.
        ("auto", 0, torch.uint8),
    ],
)
def test_other_fp8_forms_do_not_share_fp8(
    config: Any, monkeypatch: pytest.MonkeyPatch, kv_dtype: str, mode: int, dtype: torch.dtype
) -> None:
    """With the same settings MI300 writes e4m3fnuz and MI350 e4m3fn."""
    one = changed(config, "cache_config", cache_dtype=kv_dtype)
    spec = replace(SPEC["layer.0"], kv_quant_mode=KVQuantMode(mode), dtype=dtype)
    seen = set()
    for form in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        monkeypatch.setattr(type(current_platform), "fp8_dtype", lambda *_, form=form: form)
        seen.add(packing_of(one, spec, a=packed("TRITON_ATTN")))
    of_mode = f"TRITON_ATTN+quant={KVQuantMode(mode)}" if mode else "TRITON_ATTN"
    has_fp8 = mode or kv_dtype == "fp8" or dtype == torch.uint8
    forms = ("+float8_e4m3fn", "+float8_e4m3fnuz") if has_fp8 else ("",)
    assert seen == {of_mode + form for form in forms}


def test_differently_packed_layers_do_not_share(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPUs pack heads of 80 alike."""
    spec = one_group(*(replace(full_spec(), head_size=size) for size in (80, 64)))
    config, seen = changed(config, "model_config", dtype=torch.bfloat16), set()
    for has_amx in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has_amx=has_amx: has_amx)
        seen.add(packing_of(config, spec, "cpu", a=packed("CPU_ATTN"), b=packed("CPU_ATTN")))
    plugins = [packed("CUSTOM", "one"), packed("CUSTOM", "two"), packed("OTHER")]
    seen |= {packing_of(config, spec, a=packed("CPU_ATTN"), b=layer) for layer in plugins}
    assert len(seen) == 5


def test_a_plugins_model_keeps_engines_apart(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An architecture may be that of a part, such as a drafter."""
    seen = {factors(config)}
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    for architecture in (config.model_config.architecture, "Qwen2ForCausalLM"):
        for name in ("plugin.models:One", "plugin.models:Other"):
            ModelRegistry.register_model(architecture, name)
            seen.add(factors(config))
    assert len(seen) == 5


def test_loading_quantized_weights_keeps_the_key_space(config: Any) -> None:
    """vLLM writes the time, and lists in varying order."""

    def of(quantization: Any) -> Any:
        return factors(changed(config, "", quant_config=quantization))

    online = OnlineQuantizationConfig(QuantizationConfigArgs(linear="fp8_per_tensor"))
    before = of(online)
    online.online_quantization_time += 2.5
    assert of(online) == before != factors(config)
    one, same, other = (
        of(AutoAWQConfig(4, 128, True, False, list(names))) for names in ("ab", "ba", "ac")
    )
    assert one == same and {part.split("=")[0] for part in {*one} ^ {*other}} == {"quant_config"}


def test_producers_and_consumers_of_images_share(config: Any, tmp_path: Path) -> None:
    engines = [config, *(config_of(tmp_path, role) for role in ("kv_producer", "kv_consumer"))]
    assert len({factors(engine) for engine in engines}) == 1


def test_adapters_and_compilation_keep_the_base_model(config: Any) -> None:
    """Uncompiled GPU engines use other kernels for the same operations."""
    eager = IrOpPriorityConfig(rms_norm=["vllm_c", "native"])
    with_adapters = changed(config, "", lora_config=LoRAConfig(max_lora_rank=8))
    not_compiled = changed(config, "kernel_config", ir_op_priority=eager)
    assert factors(with_adapters) == factors(not_compiled) == factors(config)
