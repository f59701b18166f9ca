"""The case to estimate: a plan (context, batch, budget, places of KV), a model and a device.
Plans check themselves; `Plan.check` also checks against the model. Errors name field and fix."""

import dataclasses
import enum
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse import config
from hotkv_sparse.config import SparseConfig
from hotkv_sparse.formats import head_bytes

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
GIB = 1 << 30
HERE = "here"


# ------------------------------------------------------------------------------------------- checks


def refuse(name: str, value: object, fix: str) -> HotKVError:
    return HotKVError(Reason.INVALID_FIELD, f"{name} is {value!r}; {fix}")


MAX_COUNT = 10**18
"""Products of several such numbers still fit into a float."""


def check_count(name: str, value: object, least: int = 1) -> None:
    """Raises INVALID_FIELD unless `value` is an integer from `least` to MAX_COUNT."""
    if type(value) is not int or not least <= value <= MAX_COUNT:
        raise refuse(name, value, f"use an integer from {least} to {MAX_COUNT}")


def check_number(
    name: str, value: object, *, above: float = 0.0, most: float = float("inf")
) -> None:
    """Raises INVALID_FIELD unless `value` is finite, above `above` and at most `most`."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not above < value < float("inf")
        or value > most
    ):
        limit = f", at most {most:g}" if most != float("inf") else ""
        raise refuse(name, value, f"use a number above {above:g}{limit}")


# ------------------------------------------------------------------------------------------ devices


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """Raises INVALID_FIELD if it has no memory. `source`: where `memory_bytes` comes from."""

    name: str
    source: str
    memory_bytes: int

    def __post_init__(self) -> None:
        check_count("device.memory_bytes", self.memory_bytes)

    def with_memory(self, memory_bytes: int) -> "DeviceKind":
        source = f"{self.source}; memory as given"
        return dataclasses.replace(self, source=source, memory_bytes=memory_bytes)


# What nvidia-smi shows, not the decimal gigabytes of the product's name.
DEVICES: dict[str, DeviceKind] = {
    device.name: device
    for device in (
        DeviceKind("a100-40g", "NVIDIA A100 data sheet, SXM4", 40 * GIB),
        DeviceKind("a100-80g", "NVIDIA A100 data sheet, SXM4", 80 * GIB),
        # RFC #37263 names this device; NVIDIA has no data sheet for it.
        DeviceKind("a100-96g", "the device of RFC #37263: 96 decimal GB", 96 * 10**9),
        DeviceKind("h100", "NVIDIA H100 data sheet, SXM5", 81559 << 20),
        DeviceKind("h200", "NVIDIA H200 data sheet, SXM5", 143771 << 20),
        DeviceKind("b200", "NVIDIA HGX B200 data sheet", 183359 << 20),
        DeviceKind("l40s", "NVIDIA L40S data sheet", 46068 << 20),
        DeviceKind("gh200", "NVIDIA GH200 data sheet: 96 GB of HBM3", 97871 << 20),
    )
}


def device_named(name: str) -> DeviceKind:
    """HERE is this machine. Raises INVALID_FIELD."""
    if name == HERE:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return DeviceKind(HERE, "this machine's own memory", memory_bytes)
    if name not in DEVICES:
        raise refuse("device", name, f"use one of {', '.join(DEVICES)}, or {HERE}: this machine")
    return DEVICES[name]


# ------------------------------------------------------------------------------------------- models


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a decoder model. Raises INVALID_FIELD.

    tied: the output matrix is the embedding matrix.
    qkv_bias: projections of query, key and value have biases.
    """

    name: str
    layers: int
    kv_heads: int
    query_heads: int
    head_size: int
    hidden: int
    intermediate: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        for name in (
            "layers",
            "kv_heads",
            "query_heads",
            "head_size",
            "hidden",
            "intermediate",
            "vocab",
        ):
            check_count(f"model.{name}", getattr(self, name))
        if self.query_heads % self.kv_heads:
            raise refuse(
                "model.kv_heads",
                self.kv_heads,
                f"use a divisor of the {self.query_heads} query heads",
            )

    @property
    def layer_parameters(self) -> int:
        """Four projections, their biases, a gated MLP, two norms."""
        queries, keys = self.query_heads * self.head_size, self.kv_heads * self.head_size
        projections = 2 * self.hidden * queries + 2 * self.hidden * keys
        biases = queries + 2 * keys if self.qkv_bias else 0
        return projections + biases + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Also of the output matrix."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """As the model's card counts."""
        matrices = 1 if self.tied else 2
        layers = self.layers * self.layer_parameters
        return layers + matrices * self.embedding_parameters + self.hidden

    def kv_token_bytes(self, element_bytes: int) -> int:
        """In all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * element_bytes


# From each model's config.json on Hugging Face. Parameter counts equal those of the cards
# (tests/sparse/test_estimate.py).
MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model("smollm2-135m", 30, 3, 9, 64, 576, 1536, 49152, tied=True),
        Model("qwen2.5-0.5b", 24, 2, 14, 64, 896, 4864, 151936, tied=True, qkv_bias=True),
        Model("qwen2.5-7b", 28, 4, 28, 128, 3584, 18944, 152064, qkv_bias=True),
        Model("qwen2.5-14b", 48, 8, 40, 128, 5120, 13824, 152064, qkv_bias=True),
        Model("qwen2.5-32b", 64, 8, 40, 128, 5120, 27648, 152064, qkv_bias=True),
        Model("qwen2.5-72b", 80, 8, 64, 128, 8192, 29568, 152064, qkv_bias=True),
        Model("llama-3.2-1b", 16, 8, 32, 64, 2048, 8192, 128256, tied=True),
        Model("llama-3.1-8b", 32, 8, 32, 128, 4096, 14336, 128256),
        Model("llama-3.1-70b", 80, 8, 64, 128, 8192, 28672, 128256),
        Model("mistral-7b", 32, 8, 32, 128, 4096, 14336, 32768),
    )
}

_REFUSED = {
    "kv_lora_rank": "MLA is not estimated",
    "num_local_experts": "mixtures of experts are not estimated",
    "num_experts": "mixtures of experts are not estimated",
    "n_routed_experts": "mixtures of experts are not estimated",
}


def model_named(name: str) -> Model:
    """Raises INVALID_FIELD."""
    if name not in MODELS:
        raise refuse("model", name, f"use one of {', '.join(MODELS)}, or --config with a file")
    return MODELS[name]


def read_config(path: Path) -> Model:
    """From a Hugging Face config.json or its folder. Raises OSError if it can't be read,
    INVALID_FIELD if its model can't be estimated."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise refuse("config", str(file), f"use a file of JSON ({error})") from None
    if not isinstance(config, dict):
        raise refuse("config", str(file), "use a JSON object")
    inner = config.get("text_config", config)
    if not isinstance(inner, dict):
        raise refuse("config.text_config", inner, "use a JSON object")
    return _model(file.resolve().parent.name, inner)


def _model(name: str, config: Mapping[str, object]) -> Model:
    for key, why in _REFUSED.items():
        if config.get(key):
            raise refuse(f"config.{key}", config[key], f"{why}; use another model")
    for key in config:
        # The config.json of Falcon-H1, Bamba and Zamba has `mamba_`, Nemotron-H's has `ssm_`.
        if key.startswith(("mamba_", "ssm_")):
            fix = "layers with recurrent states are not estimated; use a model of full attention"
            raise refuse(f"config.{key}", config[key], fix)
    # Qwen's has a `sliding_window` but a false `use_sliding_window`, which Mistral's lack.
    if config.get("use_sliding_window", True) and config.get("sliding_window"):
        raise refuse(
            "config.sliding_window",
            config["sliding_window"],
            "layers with windows keep less KV than estimated; use a model of full attention",
        )
    kinds = config.get("layer_types") or []
    if isinstance(kinds, list) and any(kind != "full_attention" for kind in kinds):
        raise refuse("config.layer_types", kinds, "use a model of full attention in all layers")

    def size(field: str, default: int | None = None) -> int:
        value = config.get(field)
        if value is None and default is not None:
            return default
        check_count(f"config.{field}", value)
        assert isinstance(value, int)
        return value

    query_heads, hidden = size("num_attention_heads"), size("hidden_size")
    return Model(
        name,
        layers=size("num_hidden_layers"),
        kv_heads=size("num_key_value_heads", query_heads),
        query_heads=query_heads,
        head_size=size("head_dim", hidden // query_heads),
        hidden=hidden,
        intermediate=size("intermediate_size"),
        vocab=size("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bool(config.get("attention_bias", str(config.get("model_type")) == "qwen2")),
    )


# --------------------------------------------------------------------------------------------- plan


class Mode(enum.Enum):
    """Where KV lies, and what decode attends to."""

    DENSE = "dense"
    """All on the device; to all of it."""
    SPARSE = "sparse"
    """All on the device; to the hot set."""
    RESIDENT = "resident"
    """All in host memory; to what lies on the device: sinks, recent window and hot slots."""


def default_sparse() -> SparseConfig:
    """All layers sparse at any length, 4096 tokens."""
    return SparseConfig(sparse_topk=4096, dense_layers=(), min_context_tokens=0)


@dataclass(frozen=True, slots=True)
class Plan:
    """A case to estimate. Raises INVALID_FIELD.

    tokens: in the context of a request.
    batch: requests that decode together.
    sketches_on_host: they use no device memory.
    chunk_tokens: of a prefill step (max_num_batched_tokens).
    staging_layers: whose context is on the device at a time during a prefill in `RESIDENT`; with 2,
        one is copied while one attends.
    weight_bits: 0: as `dtype`.
    memory_ratio: of the device, for vLLM (gpu_memory_utilization).
    host_memory_bytes: None: unlimited.
    """

    tokens: int
    batch: int = 1
    block_tokens: int = 16
    sparse: SparseConfig = field(default_factory=default_sparse)
    sketches_on_host: bool = False
    chunk_tokens: int = 8192
    staging_layers: int = 2
    tensor_parallel: int = 1
    dtype: str = "bfloat16"
    weight_bits: int = 0
    memory_ratio: float = 0.92
    host_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "batch", "block_tokens", "chunk_tokens", "staging_layers"):
            check_count(name, getattr(self, name))
        check_count("tensor_parallel", self.tensor_parallel)
        if self.host_memory_bytes is not None:
            check_count("host_memory_bytes", self.host_memory_bytes)
        check_number("memory_ratio", self.memory_ratio, most=1.0)
        if self.dtype not in DTYPE_BYTES:
            raise refuse("dtype", self.dtype, f"use one of {', '.join(DTYPE_BYTES)}")
        if self.weight_bits not in (0, 4, 8, 16, 32):
            raise refuse("weight_bits", self.weight_bits, "use 4, 8, 16 or 32, or 0 for the dtype")

    def check(self, model: Model) -> None:
        """Raises INVALID_FIELD if the plan does not fit the model."""
        # The budget must suffice for this context only, as if shorter ones attended densely.
        shortest = max(self.sparse.min_context_tokens, min(self.tokens, config.MAX_COUNT))
        sparse = dataclasses.replace(self.sparse, min_context_tokens=shortest)
        sparse.check(model.layers, self.block_tokens)
        larger = max(model.kv_heads, self.tensor_parallel)
        smaller = min(model.kv_heads, self.tensor_parallel)
        if larger % smaller or model.query_heads % self.tensor_parallel:
            raise refuse(
                "tensor_parallel",
                self.tensor_parallel,
                f"use a divisor of {model.query_heads} query heads that fits {model.kv_heads} KV "
                "heads",
            )

    def with_(self, **changes: object) -> "Plan":
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    # --------------------------------------------------------------------------- counts of a layer

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def weight_bytes(self) -> float:
        """Below 1 for less than 8 bits."""
        return (self.weight_bits or 8 * self.element_bytes) / 8

    @property
    def context_blocks(self) -> int:
        return -(-self.tokens // self.block_tokens)

    @property
    def always_blocks(self) -> int:
        return min(self.sparse.max_always_blocks(self.block_tokens), self.context_blocks)

    @property
    def hot_blocks(self) -> int:
        """Of a step, always kept ones included."""
        budget = self.sparse.budget_blocks(self.tokens, self.block_tokens)
        return max(budget, self.always_blocks)

    # ------------------------------------------------------------------------- share of a device

    def sparse_layers(self, model: Model) -> int:
        return model.layers - len(set(self.sparse.dense_layers))

    def rank_kv_heads(self, model: Model) -> int:
        """At least 1: with more devices than heads, several hold the same head."""
        return max(1, model.kv_heads // self.tensor_parallel)

    def layer_token_bytes(self, model: Model) -> int:
        """Of a rank."""
        return 2 * self.rank_kv_heads(model) * model.head_size * self.element_bytes

    def block_sketch_bytes(self, model: Model) -> int:
        """In all sparse layers, of a rank."""
        names = [name for layer in range(model.layers) for name in self.sparse.scorers_of(layer)]
        heads = self.rank_kv_heads(model)
        return heads * sum(head_bytes(name, self.block_tokens, model.head_size) for name in names)
