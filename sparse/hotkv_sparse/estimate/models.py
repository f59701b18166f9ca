"""Models as arithmetic needs them: shapes of decoders with plain full attention (GQA) and a gated
MLP, from the table or from a Hugging Face config.json.

Mixtures of experts, MLA and sliding windows are refused by the name of the field that tells them:
their weights or their KV follow other formulas.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hotkv_sparse.estimate.figures import check_count, refuse


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of one decoder. `tied`: the output matrix is the embedding; `qkv_bias`: biases at the
    projections of query, key and value. INVALID_FIELD if a size makes no sense."""

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
        """Parameters of a layer: four projections, their biases, a gated MLP, two norms."""
        queries, keys = self.query_heads * self.head_size, self.kv_heads * self.head_size
        projections = 2 * self.hidden * queries + 2 * self.hidden * keys
        biases = queries + 2 * keys if self.qkv_bias else 0
        return projections + biases + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding, and as many of the output matrix."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters, as the model's card counts them."""
        matrices = 1 if self.tied else 2
        layers = self.layers * self.layer_parameters
        return layers + matrices * self.embedding_parameters + self.hidden

    def kv_token_bytes(self, element_bytes: int) -> int:
        """Keys and values of a token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * element_bytes


# From the config.json of each model on Hugging Face. The parameter counts that follow are those of
# the models' cards (tests/sparse/test_estimate.py).
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
    """The table's model, or INVALID_FIELD."""
    if name not in MODELS:
        raise refuse("model", name, f"use one of {', '.join(MODELS)}, or --config with a file")
    return MODELS[name]


def read_config(path: Path) -> Model:
    """The model of a Hugging Face config.json, or of the folder that has it; OSError if it cannot
    be read, INVALID_FIELD if it is no model of this kind."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise refuse("config", str(file), f"use a file of JSON ({error})") from None
    if not isinstance(config, dict):
        raise refuse("config", str(file), "use a JSON object")
    inner = config.get("text_config", config)
    if not isinstance(inner, dict):
        raise refuse("config.text_config", inner, "use a JSON object")
    return _model(file.resolve().parent.name, inner)


def _model(name: str, config: Mapping[str, object]) -> Model:
    for field, why in _REFUSED.items():
        if config.get(field):
            raise refuse(f"config.{field}", config[field], f"{why}; use another model")
    # Qwen's files have `use_sliding_window` false beside a window; Mistral's have no such switch.
    if config.get("use_sliding_window", True) and config.get("sliding_window"):
        raise refuse(
            "config.sliding_window",
            config["sliding_window"],
            "layers with windows keep less KV than estimated; use a model of full attention",
        )
    kinds = config.get("layer_types") or []
    if isinstance(kinds, list) and set(kinds) - {"full_attention"}:
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
