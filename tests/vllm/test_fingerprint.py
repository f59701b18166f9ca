"""Which settings keep engines apart: all of vLLM's but the listed harmless ones, walked as this
version's classes have them."""

import copy
import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.config.lora import LoRAConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from hotkv_client.testing import FakeServer
from hotkv_vllm.compat import Unsupported, fingerprint, key_space, model_weights
from hotkv_vllm.compat.fingerprint import (
    HARMLESS,
    HARMLESS_ENVIRONMENT,
    canonical,
    digest,
    key_space_factors,
)
from tests.vllm.config_walk import config_classes, config_objects
from tests.vllm.harness import Engine
from tests.vllm.specs import full_spec
from tests.vllm.tiny import COMMON, engine_args, transfer_config, write_model

SPEC = {"layer.0": full_spec()}
CLASSES = config_classes(VllmConfig)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    arguments = engine_args(write_model(tmp_path_factory.mktemp("config") / "model"))
    arguments.pop("disable_log_stats")
    return EngineArgs(**arguments, kv_transfer_config=transfer_config()).create_engine_config()


def harmless_fields(value: Any) -> set[str]:
    return {name for kind in type(value).__mro__ for name in HARMLESS.get(kind.__name__, ())}


# ----------------------------------------------------------------------------------- the allow-list


def test_every_name_of_the_allow_list_is_a_field_of_its_class() -> None:
    specs = {"KVCacheSpec": FullAttentionSpec, "MambaSpec": MambaSpec}
    for name, harmless in HARMLESS.items():
        kinds = (
            [specs["KVCacheSpec"], specs["MambaSpec"]] if name == "KVCacheSpec" else [CLASSES[name]]
        )
        fields = {field.name for kind in kinds for field in dataclasses.fields(kind)}
        assert harmless <= fields, (name, sorted(harmless - fields))


def test_every_variable_of_the_allow_list_is_vllms() -> None:
    from vllm import envs

    assert set(HARMLESS_ENVIRONMENT) <= set(envs.compile_factors())


class Changed:
    """A value that no field has."""


def test_each_field_is_harmless_or_changes_the_key_space(config: Any) -> None:
    """Over every object that this engine's config holds, whatever its fields are called."""
    before = key_space_factors(config, SPEC)
    assert key_space_factors(copy.deepcopy(config), SPEC) == before
    unlike: list[str] = []
    seen = 0
    for path, value in config_objects(config):
        inside_harmless = False
        at: Any = config
        for name in filter(None, path.split(".")):
            inside_harmless |= name in harmless_fields(at)
            at = getattr(at, name)
        for field in dataclasses.fields(value):
            old = getattr(value, field.name, None)
            # These objects are read to find out which model and which groups there are; values of
            # no type do not fit.
            if path + field.name in ("model_config", "cache_config", "speculative_config"):
                continue
            value.__dict__[field.name] = Changed()
            try:
                changes = key_space_factors(config, SPEC) != before
            finally:
                value.__dict__[field.name] = old
            seen += 1
            if changes == (inside_harmless or field.name in harmless_fields(value)):
                unlike.append(path + field.name)
    assert not unlike and seen > 250


def test_a_field_that_a_later_version_adds_is_in_the_key_space(config: Any) -> None:
    kind = type(config.cache_config)
    later = dataclasses.make_dataclass(
        "CacheConfig", [("kv_rounding", str, "nearest")], bases=(kind,)
    )
    before = key_space_factors(config, SPEC)
    changed = copy.copy(config)
    for rounding in ("nearest", "stochastic"):
        cache = copy.copy(config.cache_config)
        cache.__class__ = later
        cache.__dict__["kv_rounding"] = rounding
        changed.__dict__["cache_config"] = cache
        after = key_space_factors(changed, SPEC)
        assert after != before
        before = after


def test_parts_of_the_key_space_say_what_differs(config: Any) -> None:
    changed = copy.copy(config)
    changed.__dict__["model_config"] = copy.copy(config.model_config)
    changed.model_config.__dict__["max_model_len"] += 1
    unlike = set(key_space_factors(config, SPEC)) ^ set(key_space_factors(changed, SPEC))
    assert {part.split("=")[0] for part in unlike} == {"model_config"}


def test_fields_of_each_kind_of_layer_but_outer_strides_are_in_the_key_space(config: Any) -> None:
    mamba = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))
    for spec in (full_spec(), mamba):
        for field in dataclasses.fields(spec):
            other = copy.copy(spec)
            other.__dict__[field.name] = Changed()
            equal = key_space_factors(config, {"a": spec}) == key_space_factors(
                config, {"a": other}
            )
            assert equal == (field.name in HARMLESS["KVCacheSpec"]), field.name
    assert key_space_factors(config, {"a": mamba, "b": full_spec()}) != key_space_factors(
        config, {"b": mamba, "a": full_spec()}
    )


def test_variables_that_are_not_known_to_be_harmless_keep_engines_apart(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key_space_factors(config, SPEC)
    for name in HARMLESS_ENVIRONMENT & {
        "VLLM_ENGINE_READY_TIMEOUT_S",
        "VLLM_DP_RANK",
        "VLLM_LOG_BATCHSIZE_INTERVAL",
    }:
        with monkeypatch.context() as patch:
            patch.setenv(name, "3")
            assert key_space_factors(config, SPEC) == before, name
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    assert key_space_factors(config, SPEC) != before


def test_the_version_of_vllm_is_in_the_key_space(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key_space_factors(config, SPEC)
    monkeypatch.setattr("hotkv_vllm.versions.VERSION", "0.33.0")
    assert key_space_factors(config, SPEC) != before


def test_what_is_canonical_has_no_address_and_no_order() -> None:
    class Plain:
        def __init__(self, **values: Any) -> None:
            self.__dict__.update(values)

    one = Plain(a={3, 1, 2}, b={"x": 1, "y": torch.bfloat16}, c=object())
    two = Plain(c=object(), b={"y": torch.bfloat16, "x": 1}, a={2, 3, 1})
    assert digest(one) == digest(two) and "0x" not in json.dumps(canonical(one))
    assert digest(Plain(a=torch.float16)) != digest(Plain(a=torch.bfloat16))
    assert (
        digest({1: 2}) != digest({"1": 2})
        and digest(1) != digest("1")
        and digest([1]) != digest(1)
        and digest(True) != digest(1)
    )
    loop = Plain()
    loop.itself = loop  # type: ignore[attr-defined]
    assert digest(loop) == digest(loop)


# --------------------------------------------------------------------- what was found to be missing


def spaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *settings: dict[str, Any]
) -> list[bytes]:
    """Fingerprints of engines with these settings."""
    engines = [Engine(FakeServer(), tmp_path / "model", monkeypatch, **more) for more in settings]
    found = [one.connector._scheduler.cache.session.config.key_space.fingerprint for one in engines]
    for one in engines:
        one.worker.shutdown()
        one.connector.shutdown()
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"mamba_cache_dtype": "float16"},
        {"kv_cache_dtype_skip_layers": ["1"]},
        {"max_model_len": 256},
        {
            "specs": {
                f"layer.{i}": replace(
                    full_spec(), dtype=torch.bfloat16 if i == 1 else torch.float16
                )
                for i in range(2)
            }
        },
        {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_that_change_kv_change_the_key_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    one, two, again = spaces(tmp_path, monkeypatch, {}, settings, settings)
    assert one != two and two == again


def test_layers_that_change_places_change_the_key_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page formats and sizes are equal: only which layer is which differs."""
    mixed = [
        {
            f"layer.{i}": replace(full_spec(), dtype=torch.bfloat16 if i == odd else torch.float16)
            for i in range(4)
        }
        for odd in (1, 2)
    ]
    one, two = spaces(tmp_path, monkeypatch, *({"specs": specs} for specs in mixed))
    assert one != two


@pytest.mark.parametrize(
    "settings",
    [
        {"blocks": 96},
        {"max_num_seqs": 3},
        {"max_tokens_per_step": 512},
        {"scheduling_policy": "priority"},
        {"enable_prefix_caching": False},
        {"gpu_memory_utilization": 0.5},
        {"max_logprobs": 7},
        {"served_model_name": "other"},
        {"seed": 0, "async_scheduling": False},
        {"extra": {"lookup_timeout_s": 1.0, "max_load_retries": 2}},
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 2,
                "prompt_lookup_max": 3,
            }
        },
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_that_do_not_change_kv_keep_the_key_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    one, two = spaces(tmp_path, monkeypatch, {}, settings)
    assert one == two


def test_the_same_weights_in_another_folder_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = spaces(tmp_path / "here", monkeypatch, {})
    (two,) = spaces(tmp_path / "there" / "under-another-name", monkeypatch, {})
    assert one == two


def test_longrope_chooses_its_factors_by_max_model_len(tmp_path: Path) -> None:
    """Phi-3's keys differ by it; and so do the key spaces, with the same model and weights."""
    folder = tmp_path / "phi"
    folder.mkdir()
    longrope = {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    described = {
        **COMMON,
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "num_hidden_layers": 2,
    }
    described |= {
        "max_position_embeddings": 1024,
        "original_max_position_embeddings": 256,
        "rope_scaling": longrope,
    }
    (folder / "config.json").write_text(json.dumps(described))
    configs = [
        EngineArgs(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=n,
            kv_cache_memory_bytes=1 << 20,
        ).create_engine_config()
        for n in (256, 1024)
    ]
    assert model_weights.weights_identity(configs[0]) == model_weights.weights_identity(configs[1])
    assert key_space_factors(configs[0], SPEC) != key_space_factors(configs[1], SPEC)


def test_what_a_processor_makes_of_an_image_is_in_the_key_space(config: Any) -> None:
    changed = [copy.copy(config) for _ in range(3)]
    for one, multimodal in zip(
        changed,
        (
            MultiModalConfig(),
            MultiModalConfig(mm_processor_kwargs={"max_pixels": 100}),
            MultiModalConfig(mm_processor_cache_gb=1),
        ),
        strict=True,
    ):
        one.__dict__["model_config"] = copy.copy(config.model_config)
        one.model_config.__dict__["multimodal_config"] = multimodal
    plain, other_pixels, other_cache = (key_space_factors(one, SPEC) for one in changed)
    assert plain == other_cache != other_pixels


def test_a_processors_file_is_part_of_the_weights_identity(tmp_path: Path) -> None:
    from hotkv_vllm.compat.model_weights import files_identity

    (tmp_path / "model.bin").write_bytes(b"weights")
    before = files_identity(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"size": 224}')
    assert files_identity(tmp_path) != before


def test_a_drafters_model_is_in_the_key_space_and_drafting_without_one_is_not(config: Any) -> None:
    def with_draft(method: str, draft: Any) -> Any:
        speculative = object.__new__(SpeculativeConfig)
        speculative.__dict__.update(method=method, draft_model_config=draft, draft_load_config=None)
        changed = copy.copy(config)
        changed.__dict__["speculative_config"] = speculative
        return changed

    draft = copy.copy(config.model_config)
    draft.__dict__["model"] = "another/place"
    draft.__dict__["seed"] = 7
    assert key_space_factors(with_draft("ngram", None), SPEC) == key_space_factors(config, SPEC)
    assert key_space_factors(with_draft("eagle", draft), SPEC) != key_space_factors(config, SPEC)
    identities = [
        model_weights.weights_identity(one)
        for one in (config, with_draft("ngram", None), with_draft("eagle", draft))
    ]
    assert identities[0] == identities[1] != identities[2]


def test_an_engine_that_finds_its_own_scales_runs_without_the_cache(
    config: Any, tmp_path: Path
) -> None:
    """vLLM 0.32 has no such setting any more; where a version has it, its KV is this run's own."""
    changed = copy.copy(config)
    changed.__dict__["cache_config"] = copy.copy(config.cache_config)
    changed.cache_config.__dict__["calculate_kv_scales"] = True
    kv = type("Kv", (), {"kv_cache_groups": [], "hash_block_size": 32})()
    with pytest.raises(Unsupported, match="calculate_kv_scales"):
        key_space.key_space(changed, kv, fingerprint, (), (), 1, "")


def test_settings_of_adapters_do_not_split_the_base_model(config: Any) -> None:
    changed = copy.copy(config)
    changed.__dict__["lora_config"] = LoRAConfig(max_lora_rank=8)
    assert key_space_factors(changed, SPEC) == key_space_factors(config, SPEC)
