"""A short and readable forward pass of Llama, in which the caller computes attention.

In float32 whatever the weights' type, so that runs differ only in what they attend to. Keys are
those after RoPE. Models that are not plain Llama are refused. Shapes: S tokens, V sequences of
one token, Q query heads, H KV heads, D channels of a head, E channels of the model, W words.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from torch.nn import functional

from hotkv_sparse.axes import AxesEstimate
from hotkv_sparse.centre import FIRST_TOKENS, TOKEN_FORMATS, Centres, LayerCentre, measured_bias

# ---------------------------------------------------------------------------------------- The model

SHORT_TOKENS = 2048
"""An engine computes centres and axes after this many tokens; so do we."""
SAMPLE_EVERY_TOKENS = 256
"""One query in this many is kept, to measure biases."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the forward pass reads of config.json."""

    num_layers: int
    query_heads: int
    kv_heads: int
    head_size: int
    max_tokens: int
    norm_eps: float
    rope_theta: float

    @staticmethod
    def read(folder: Path) -> "Shape":
        """Raises ValueError if the model is not plain Llama."""
        config = json.loads((folder / "config.json").read_text())
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if (
            config.get("model_type") != "llama"
            or kind != "default"
            or config.get("attention_bias")
            or config.get("mlp_bias")
        ):
            raise ValueError(
                f"{folder} is a {config.get('model_type')} with rope {kind!r}; use a llama "
                "without biases and rope scaling"
            )
        heads = config["num_attention_heads"]
        return Shape(
            config["num_hidden_layers"],
            heads,
            config["num_key_value_heads"],
            config.get("head_dim") or config["hidden_size"] // heads,
            config["max_position_embeddings"],
            config["rms_norm_eps"],
            rope.get("rope_theta") or config["rope_theta"],
        )


class Llama:
    """Weights in float32, and what comes before and after attention."""

    def __init__(self, folder: Path) -> None:
        self.shape = Shape.read(folder)
        weights: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                weights.update({name: tensors.get_tensor(name).float() for name in tensors.keys()})  # noqa: SIM118
        if not weights:
            raise ValueError(f"{folder} has no *.safetensors; pass a model folder to --model")
        self._weights = weights
        self._embedding = weights["model.embed_tokens.weight"]
        self._head = weights.get("lm_head.weight", self._embedding)
        self._inverse_wavelength_D2 = self.shape.rope_theta ** -(
            torch.arange(0, self.shape.head_size, 2).double() / self.shape.head_size
        )

    @property
    def frequencies(self) -> npt.NDArray[np.float64]:
        """Radians per token, of channels i and i + D / 2."""
        found: npt.NDArray[np.float64] = self._inverse_wavelength_D2.numpy()
        return found

    def _weight(self, layer: int, name: str) -> torch.Tensor:
        return self._weights[f"model.layers.{layer}.{name}.weight"]

    def _norm(self, x_SE: torch.Tensor, weight_E: torch.Tensor) -> torch.Tensor:
        return (
            x_SE
            * torch.rsqrt(x_SE.square().mean(dim=-1, keepdim=True) + self.shape.norm_eps)
            * weight_E
        )

    def _rotated(self, x_SHD: torch.Tensor, positions_S: torch.Tensor) -> torch.Tensor:
        """Channels i and i + D / 2 turn together."""
        angle_SD2 = positions_S.double()[:, None] * self._inverse_wavelength_D2
        cos, sin = angle_SD2.cos().float()[:, None], angle_SD2.sin().float()[:, None]
        low, high = x_SHD.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    def embed(self, tokens_S: torch.Tensor) -> torch.Tensor:
        """[S, E]."""
        return self._embedding[tokens_S]

    def queries_keys_values(
        self, layer: int, x_SE: torch.Tensor, positions_S: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[S, Q, D], [S, H, D], [S, H, D]; queries and keys after RoPE."""
        normed = self._norm(x_SE, self._weight(layer, "input_layernorm"))
        query, key, value = (
            functional.linear(normed, self._weight(layer, f"self_attn.{name}_proj")).unflatten(
                -1, (-1, self.shape.head_size)
            )
            for name in ("q", "k", "v")
        )
        return self._rotated(query, positions_S), self._rotated(key, positions_S), value

    def after_attention(
        self, layer: int, x_SE: torch.Tensor, attended_SQD: torch.Tensor
    ) -> torch.Tensor:
        """[S, E]: projects and adds attention's output, then adds the MLP."""
        x_SE = x_SE + functional.linear(
            attended_SQD.flatten(1), self._weight(layer, "self_attn.o_proj")
        )
        normed = self._norm(x_SE, self._weight(layer, "post_attention_layernorm"))
        gate = functional.silu(functional.linear(normed, self._weight(layer, "mlp.gate_proj")))
        inner = gate.mul_(functional.linear(normed, self._weight(layer, "mlp.up_proj")))
        return x_SE + functional.linear(inner, self._weight(layer, "mlp.down_proj"))

    def log_probs(self, x_SE: torch.Tensor) -> torch.Tensor:
        """Log probabilities [S, W] of the next token."""
        return functional.log_softmax(
            functional.linear(self._norm(x_SE, self._weights["model.norm.weight"]), self._head),
            dim=-1,
        )


@dataclass(frozen=True, slots=True)
class Dense:
    """A text's dense pass; sparse attention decodes the last N tokens again.

    keys_LHSD, values_LHSD: of all tokens, from layer `first_layer` on.
    inputs_NE: of layer `first_layer`, for the last N tokens.
    log_probs_NW: of these.
    moments_L: of queries and keys over all tokens, for centres and axes.
    short_moments_L: over the first `SHORT_TOKENS`.
    moved_moments_L: over the same, as if at positions all over the text.
    sampled_queries_LQND: of the tokens `sampled_N`, ascending.
    """

    first_layer: int
    keys_LHSD: tuple[torch.Tensor, ...]
    values_LHSD: tuple[torch.Tensor, ...]
    inputs_NE: torch.Tensor
    log_probs_NW: torch.Tensor
    moments_L: tuple[AxesEstimate, ...]
    short_moments_L: tuple[AxesEstimate, ...]
    moved_moments_L: tuple[AxesEstimate, ...]
    sampled_N: tuple[int, ...]
    sampled_queries_LQND: tuple[torch.Tensor, ...]


def _moments(
    keys_HSD: torch.Tensor,
    query_QSD: torch.Tensor,
    num_tokens: int,
    frequencies: npt.NDArray[np.float64] | None = None,
) -> AxesEstimate:
    """Without the first `FIRST_TOKENS`, which include sinks. `frequencies`: as if the tokens
    were all over the text."""
    kv_heads, context_tokens, head_size = keys_HSD.shape
    estimate = AxesEstimate(kv_heads, head_size)
    keys, queries = (
        part[:, FIRST_TOKENS:num_tokens].transpose(0, 1).numpy() for part in (keys_HSD, query_QSD)
    )
    if frequencies is None:
        estimate.add(keys, queries)
    else:
        positions = np.arange(FIRST_TOKENS, FIRST_TOKENS + len(keys))
        estimate.add_moved(keys, queries, positions, frequencies, context_tokens)
    return estimate


def dense_pass(model: Llama, tokens_S: torch.Tensor, num_compared: int, first_layer: int) -> Dense:
    """With causal attention. num_compared: last tokens to decode again. first_layer: the first
    sparse one."""
    shape, positions = model.shape, torch.arange(len(tokens_S))
    scale = 1.0 / math.sqrt(shape.head_size)
    sampled = tuple(
        range(min(SAMPLE_EVERY_TOKENS, len(tokens_S)) - 1, len(tokens_S), SAMPLE_EVERY_TOKENS)
    )
    keys, values, queries, x = [], [], [], model.embed(tokens_S)
    moments, short_moments, moved_moments = [], [], []
    inputs = x[-num_compared:]
    for layer in range(shape.num_layers):
        if layer == first_layer:
            inputs = x[-num_compared:].clone()
        parts = model.queries_keys_values(layer, x, positions)
        query, key, value = (part.transpose(0, 1).contiguous()[None] for part in parts)
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True, scale=scale
        )
        if layer >= first_layer:
            keys.append(key[0])
            values.append(value[0])
            moments.append(_moments(key[0], query[0], len(tokens_S)))
            short_moments.append(_moments(key[0], query[0], SHORT_TOKENS))
            moved_moments.append(_moments(key[0], query[0], SHORT_TOKENS, model.frequencies))
            queries.append(query[0, :, sampled].clone())
        x = model.after_attention(layer, x, attended[0].transpose(0, 1))
    return Dense(
        first_layer,
        tuple(keys),
        tuple(values),
        inputs,
        model.log_probs(x[-num_compared:]),
        tuple(moments),
        tuple(short_moments),
        tuple(moved_moments),
        sampled,
        tuple(queries),
    )


# -------------------------------------------------------------------------------------- Calibration
# Computes centres, biases and axes before a variant decodes a text. In a scorer's name, the part
# behind `+` is the source:
# - `mu`: the whole of another text.
# - `mu2k`: its first 2048 tokens.
# - `first`: these at positions all over the context, as an engine calibrates from its first prompt.
# - `own`: the text's own first 2048 tokens.
# - `file`: a file of `hotkv_sparse.vllm.calibrate`.
# Shapes: L layers, H KV heads, Q query heads, D channels, S tokens, N sampled tokens.


@dataclass(frozen=True, slots=True)
class Calibration:
    """By source, for all sparse layers (None: 0)."""

    centres: Mapping[str, Sequence[LayerCentre | None]]


@dataclass(frozen=True, slots=True)
class Own:
    """From the whole text; from its first `SHORT_TOKENS`; from these, as if at positions all
    over the text."""

    whole_L: Sequence[LayerCentre]
    short_L: Sequence[LayerCentre]
    moved_L: Sequence[LayerCentre]

    @staticmethod
    def of(dense: Dense) -> "Own":
        num_tokens = dense.keys_LHSD[0].shape[1]
        return Own(
            _centres(dense, dense.moments_L, num_tokens),
            _centres(dense, dense.short_moments_L, min(SHORT_TOKENS, num_tokens)),
            _centres(dense, dense.moved_moments_L, num_tokens, is_moved=True),
        )


def _centres(
    dense: Dense, moments_L: Sequence[AxesEstimate], num_tokens: int, *, is_moved: bool = False
) -> tuple[LayerCentre, ...]:
    """With biases, unless `is_moved`: an engine that calibrates itself measures none."""
    positions = [position for position in dense.sampled_N if position < num_tokens]
    found = []
    for keys_HSD, query_QND, moments in zip(
        dense.keys_LHSD, dense.sampled_queries_LQND, moments_L, strict=True
    ):
        keys_SHD = keys_HSD[:, :num_tokens].transpose(0, 1).contiguous().numpy()
        queries_NQD = query_QND[:, : len(positions)].transpose(0, 1).contiguous().numpy()
        calibrated = moments.axes(min_tokens=1)
        assert calibrated is not None, "a dense pass has tokens"
        mu_HD, axes = calibrated
        names = () if is_moved else TOKEN_FORMATS
        found.append(
            LayerCentre(
                mu_HD,
                {
                    name: measured_bias(name, mu_HD, keys_SHD, queries_NQD, positions, axes=axes)
                    for name in names
                },
                axes,
            )
        )
    return tuple(found)


def calibration(other: Own, own: Own, file: Centres | None, first_layer: int) -> Calibration:
    """What variants may use, by source. Raises ValueError if the file is of another model."""
    centres: dict[str, Sequence[LayerCentre | None]] = {
        "mu": other.whole_L,
        "mu2k": other.short_L,
        "first": other.moved_L,
        "own": own.short_L,
    }
    if file is not None:
        centres["file"] = [
            file.layers.get(first_layer + layer) for layer in range(len(own.whole_L))
        ]
        for mine, layer in zip(own.whole_L, centres["file"], strict=True):
            if layer is not None and layer.mu.shape != mine.mu.shape:
                raise ValueError(
                    f"--centres: a layer has {list(layer.mu.shape)} channels, the model "
                    f"{list(mine.mu.shape)}; calibrate this model"
                )
    return Calibration(centres)
