"""A short and readable forward pass of Llama, in which the caller computes attention.

It computes in float32, whatever the type of the stored weights, so that runs differ only in the
tokens to which they attend. Keys are those after RoPE, as attention uses them. It refuses models
that are not plain Llama.

Shapes: S tokens, V sequences of one token each, Q query heads, H KV heads, D channels of a head, E
channels of the model, W words."""

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
"""An engine computes mean keys and axes once it has seen this many tokens. To imitate it, they are
computed from the first tokens of a text, up to this number."""
SAMPLE_EVERY_TOKENS = 256
"""One query in this many tokens is recorded, to measure the biases of centres (mean keys)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The part of a model's config.json that the forward pass reads."""

    num_layers: int
    query_heads: int
    kv_heads: int
    head_size: int
    max_tokens: int
    norm_eps: float
    rope_theta: float

    @staticmethod
    def read(folder: Path) -> "Shape":
        """Returns the shape of the model in `folder`. Raises ValueError if it is not plain
        Llama."""
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
    """A model's weights in float32, and the parts of a forward pass before and after attention."""

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
        """Returns RoPE's frequencies in radians per token. RoPE rotates channel i together with
        channel i + D / 2."""
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
        """Applies RoPE, which rotates channel i together with channel i + D / 2."""
        angle_SD2 = positions_S.double()[:, None] * self._inverse_wavelength_D2
        cos, sin = angle_SD2.cos().float()[:, None], angle_SD2.sin().float()[:, None]
        low, high = x_SHD.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    def embed(self, tokens_S: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings of token ids, [S, E]."""
        return self._embedding[tokens_S]

    def queries_keys_values(
        self, layer: int, x_SE: torch.Tensor, positions_S: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns a layer's queries [tokens, query heads, channels] and keys [tokens, KV heads,
        channels] after RoPE, and values with the shape of the keys."""
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
        """Returns the layer's output [tokens, channels of the model]: projects and adds attention's
        output, then adds the MLP."""
        x_SE = x_SE + functional.linear(
            attended_SQD.flatten(1), self._weight(layer, "self_attn.o_proj")
        )
        normed = self._norm(x_SE, self._weight(layer, "post_attention_layernorm"))
        gate = functional.silu(functional.linear(normed, self._weight(layer, "mlp.gate_proj")))
        inner = gate.mul_(functional.linear(normed, self._weight(layer, "mlp.up_proj")))
        return x_SE + functional.linear(inner, self._weight(layer, "mlp.down_proj"))

    def log_probs(self, x_SE: torch.Tensor) -> torch.Tensor:
        """Returns the log probabilities [S, W] of the next token."""
        return functional.log_softmax(
            functional.linear(self._norm(x_SE, self._weights["model.norm.weight"]), self._head),
            dim=-1,
        )


@dataclass(frozen=True, slots=True)
class Dense:
    """The forward pass of a text of S tokens with dense attention. The last N tokens are those that
    sparse attention will decode again, to be compared.

    keys_LHSD, values_LHSD: of all tokens, in the layers from `first_layer` on.
    inputs_NE: input of layer `first_layer` for the last N tokens.
    log_probs_NW: the model's output for these tokens.
    moments_L: statistics of queries and keys in the same layers, over all tokens, from which
        centres (mean keys) and axes are computed.
    short_moments_L: the same over the first `SHORT_TOKENS`.
    moved_moments_L: the same over the first `SHORT_TOKENS`, as if they were at positions all over
        the text.
    sampled_queries_LQND: queries of the tokens `sampled_N`, ascending.
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
    """Returns the moments (sums from which mean keys and axes are computed) of a layer's queries
    and keys over the first `num_tokens` tokens, without the first `FIRST_TOKENS`, which include
    attention sinks. If `frequencies` of RoPE are given, computes them as if the tokens were at
    positions all over the text."""
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
    """Runs all tokens through the model with causal attention, and records the values that `Dense`
    describes.

    num_compared: number of last tokens that sparse attention will decode again.
    first_layer: the first layer that will be sparse.
    """
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
# Calibration: computes the centres (mean keys) with their biases (mean errors of scores), and the
# axes of the keys, before a variant (way to select blocks) decodes a text.
#
# In a scorer's name, the part after `+` says where the calibration comes from:
# - `mu`: from the whole of another text.
# - `mu2k`: from the first 2048 tokens of that other text.
# - `first`: from the same 2048 tokens, with their positions moved all over the context, as an
#   engine calibrates from its first prompt.
# - `own`: from the first 2048 tokens of the text itself.
# - `file`: from a file that `hotkv_vllm.sparse.calibrate` wrote.
#
# Shapes: L layers, H KV heads, Q query heads, D channels, S tokens, N sampled tokens.


@dataclass(frozen=True, slots=True)
class Calibration:
    """Centres (mean keys) by the name of their source (`mu`, `own`, `file` …), each for all sparse
    layers in order (None: 0)."""

    centres: Mapping[str, Sequence[LayerCentre | None]]


@dataclass(frozen=True, slots=True)
class Own:
    """The calibrations (mean keys and axes) that a text yields, for each layer.

    whole_L: from the whole text.
    short_L: from its first `SHORT_TOKENS`.
    moved_L: from the first `SHORT_TOKENS`, as if they were at positions all over the text.
    """

    whole_L: Sequence[LayerCentre]
    short_L: Sequence[LayerCentre]
    moved_L: Sequence[LayerCentre]

    @staticmethod
    def of(dense: Dense) -> "Own":
        """Computes the calibrations from a text's dense pass."""
        num_tokens = dense.keys_LHSD[0].shape[1]
        return Own(
            _centres(dense, dense.moments_L, num_tokens),
            _centres(dense, dense.short_moments_L, min(SHORT_TOKENS, num_tokens)),
            _centres(dense, dense.moved_moments_L, num_tokens, is_moved=True),
        )


def _centres(
    dense: Dense, moments_L: Sequence[AxesEstimate], num_tokens: int, *, is_moved: bool = False
) -> tuple[LayerCentre, ...]:
    """Returns the centre (mean keys) of each layer from the first `num_tokens` tokens, and the
    biases (mean errors of scores) with this centre.

    moments_L: statistics of each layer's queries and keys, from which centres are computed.
    is_moved: True: measures no biases, as an engine that calibrates itself does not.
    """
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
    """Returns the centres (mean keys) that variants may use for a text, by the name of their
    source: from another text (`other`), from the text itself (`own`), and from a file.

    Raises ValueError if the file is of another model.
    """
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
