"""What sparse decode accepts, and its refusals."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hotkv_sparse import SparseConfig
from hotkv_sparse.centre import MIN_TOKENS, Centres, LayerCentre
from hotkv_sparse.vllm import attention_layers
from hotkv_sparse.vllm.settings import ALLOW_CUDA, cuda_settings
from hotkv_vllm.config import ConfigError
from tests.vllm.specs import chunked_model, full_spec, window_spec

NUM_LAYERS = 4
RESIDENT: dict[str, Any] = {"residency": "host", "sparse_topk": 512, "dense_layers": ()}
RESIDENT_CONFIG = SparseConfig(**RESIDENT)
TIGHT: dict[str, Any] = {"sparse_topk": 0.1, "min_context_tokens": 300}


def engine(
    device: str = "cpu",
    *,
    dtype: str = "auto",
    drafter: str = "",
    encodes: bool = False,
    **parallel: int,
) -> Any:
    """dtype: of the KV cache.
    encodes: media only.
    parallel: ranks by vLLM's names.
    """
    sizes = ("pipeline_parallel_size", "decode_context_parallel_size", "tensor_parallel_size")
    return SimpleNamespace(
        parallel_config=SimpleNamespace(use_ubatching=False, **dict.fromkeys(sizes, 1) | parallel),
        device_config=SimpleNamespace(device_type=device),
        speculative_config=SimpleNamespace(method=drafter) if drafter else None,
        cache_config=SimpleNamespace(cache_dtype=dtype),
        model_config=SimpleNamespace(
            get_total_num_hidden_layers=lambda: NUM_LAYERS,
            use_mla=False,
            is_prefix_caching_supported=True,
        ),
        is_mm_encoder_only=encodes,
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


def groups(*specs: Any, replicas: int = 1) -> Any:
    """Two layers for each spec."""
    return SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(
                kv_cache_spec=spec, layer_names=[f"layers.{2 * i + k}.attn" for k in (0, 1)]
            )
            for i, spec in enumerate(specs)
        ],
        kv_tp_replicas=replicas,
    )


FULL = groups(full_spec())


def test_a_plain_engine_is_taken() -> None:
    attention_layers.check_sparse(engine(), FULL, SparseConfig())
    attention_layers.check_sparse(engine(tensor_parallel_size=2), FULL, SparseConfig())


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (engine(pipeline_parallel_size=2), {}, "pipeline or context parallelism"),
        (engine(decode_context_parallel_size=2), {}, "pipeline or context parallelism"),
        (engine(drafter="eagle"), {}, "a drafter with KV of its own (eagle)"),
        (engine(dtype="nvfp4"), {}, "can't read the keys of kv_cache_dtype nvfp4"),
        (engine(encodes=True), {}, "vLLM itself forbids prefix caching: this engine runs the"),
        (engine(encodes=True), RESIDENT, "vLLM itself forbids prefix caching: this engine runs"),
        (engine("xpu"), {}, "this one runs on xpu"),
        (engine("cuda"), {}, "this one runs on cuda"),
        (engine(), {"dense_layers": (NUM_LAYERS,)}, "hotkv.sparse.dense_layers is (4,)"),
        (engine(), TIGHT, "hotkv.sparse.sparse_topk is 0.1"),
    ],
)
def test_what_does_not_fit_is_refused(config: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        attention_layers.check_sparse(config, FULL, SparseConfig(**settings))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"residency": "off"}, "residency"),
        ({"scorer": "quest"}, "quest"),
        ({"scorer": "mix2"}, "mix2"),
        ({"fusion": {"rot2u": 1.0}}, "fusion"),
        ({"max_correction_blocks": 0}, "max_correction_blocks"),
        ({"copy_method": "memcpy"}, "copy_method"),
        ({"copy_method": "batch"}, "kernel"),
    ],
)
def test_what_cuda_lacks_is_refused_by_name(settings: dict[str, Any], names: str) -> None:
    allowed = engine("cuda")
    allowed.kv_transfer_config.kv_connector_extra_config[ALLOW_CUDA] = True
    for residency in ("host", "auto"):
        settings_of = replace(RESIDENT_CONFIG, residency=residency)
        assert not attention_layers.cuda_refusal(allowed, settings_of)
    assert names in attention_layers.cuda_refusal(allowed, replace(RESIDENT_CONFIG, **settings))
    allowed.speculative_config = SimpleNamespace(method="ngram")
    with pytest.raises(ConfigError, match="on CUDA it does not work with speculative decoding"):
        attention_layers.check_sparse(allowed, FULL, RESIDENT_CONFIG)
    allowed.parallel_config.use_ubatching = True
    assert "micro-batches" in attention_layers.cuda_refusal(allowed, RESIDENT_CONFIG)


@pytest.mark.parametrize("value", [None, False, "true", 1])
def test_residency_on_cuda_is_allowed_by_nothing_else(value: object) -> None:
    refused = engine("cuda")
    refused.kv_transfer_config.kv_connector_extra_config[ALLOW_CUDA] = value
    assert ALLOW_CUDA in attention_layers.cuda_refusal(refused, RESIDENT_CONFIG)
    sparse = {"hotkv.sparse": {"residency": "host"}}
    assert cuda_settings({**sparse, ALLOW_CUDA: value}) is None
    assert cuda_settings({**sparse, ALLOW_CUDA: True}) is not None
    assert cuda_settings({ALLOW_CUDA: True}) is None


def test_settings_need_not_fit_never_sparse_groups() -> None:
    attention_layers.check_sparse(engine(), groups(window_spec()), SparseConfig(**TIGHT))


# ----------------------------------------------------------------------------------------- centres


def centres(layer: int, num_heads: int = 2, head_size: int = 32) -> Centres:
    mu_HD = np.zeros((num_heads, head_size), np.float32)
    return Centres("a model", MIN_TOKENS, {layer: LayerCentre(mu_HD, {})})


def test_centres_of_this_model_are_taken() -> None:
    attention_layers.check_centres(engine(), FULL, centres(1))
    # Only sparse layers are checked.
    attention_layers.check_centres(engine(), FULL, centres(NUM_LAYERS - 1, head_size=8))
    # The file has all heads, a rank half of them or all.
    attention_layers.check_centres(engine(tensor_parallel_size=2), FULL, centres(0, num_heads=4))
    shared = groups(full_spec(), replicas=2)
    attention_layers.check_centres(engine(tensor_parallel_size=2), shared, centres(0, num_heads=2))


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (centres(NUM_LAYERS), "it has a centre of layer 4, the model has 4 layers"),
        (centres(1, num_heads=4), "its centre of layer 1 is [4, 32], the model's layer has 2"),
        (centres(0, head_size=64), "has 2 KV heads of size 32"),
    ],
)
def test_centres_of_another_model_are_refused(of: Centres, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        attention_layers.check_centres(engine(), FULL, of)
    assert message in str(error.value)


# ------------------------------------------------------------------------------------------ layers


def plain(**changes: Any) -> Any:
    impl = {
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
        "sliding_window": (-1, -1),
        "alibi_slopes": None,
    }
    return SimpleNamespace(impl=SimpleNamespace(**impl | changes), isa="vec")


def found(kv_cache: Any, **layers: Any) -> list[tuple[int, int]]:
    config = engine()
    config.compilation_config.static_forward_context = {
        name: layers.get(name.split(".")[1], plain())
        for group in kv_cache.kv_cache_groups
        for name in group.layer_names
    }
    return [
        (layer.index, layer.group)
        for layer in attention_layers.full_attention_layers(config, kv_cache)
    ]


def test_full_attention_layers_keep_the_models_order() -> None:
    assert found(groups(full_spec(), full_spec())) == [(0, 0), (1, 0), (2, 1), (3, 1)]
    mixed = groups(window_spec(), full_spec(), next(reversed(chunked_model().values())))
    assert found(mixed) == [(2, 1), (3, 1)]
    backwards = groups(full_spec())
    backwards.kv_cache_groups[0].layer_names.reverse()
    assert found(backwards) == [(0, 0), (1, 0)]


@pytest.mark.parametrize(
    "change",
    [
        {"attn_type": "encoder"},
        {"kv_sharing_target_layer_name": "layers.0.attn"},
        {"sliding_window": (128, 0)},
        {"alibi_slopes": [1.0]},
    ],
)
def test_layers_not_attending_all_keys_are_excluded(
    change: dict[str, Any],
) -> None:
    assert found(FULL, **{"1": plain(**change)}) == [(0, 0)]
    assert found(FULL, **{"1": plain(sliding_window=-1)}) == [(0, 0), (1, 0)]


def test_layers_without_attention_or_windowed_are_excluded() -> None:
    assert found(FULL, **{"0": SimpleNamespace(impl=None)}) == [(1, 0)]
    assert found(FULL, **{"0": SimpleNamespace()}) == [(1, 0)]
    for change in ({"sliding_window": 64}, {"attention_chunk_size": 64}, {"non_causal": True}):
        assert not found(groups(replace(full_spec(), **change)))
