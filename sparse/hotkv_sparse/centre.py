"""The centre of a layer's keys, subtracted before a sketch spends its few bits per channel.

Calibrated once per model from any ordinary text. Example (SmolLM2-135M, 4k tokens, budget 5 %,
rot2u, another text): where the model copies from far back, the share of the heaviest blocks that
are selected rises from .90 to .98. A wrong centre is worse than none. Sketches with different
centres have different versions and never mix.

`axes.AxesEstimate` measures a centre, `measured_bias` the error that remains, `centre_file` stores
`Centres`.

Shapes: N tokens, S tokens of a context, Q query heads, H KV heads, D channels, B blocks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse.axes import MIN_TOKENS, Axes
from hotkv_sparse.formats import FORMATS, RUN_TOKENS, format_named
from hotkv_sparse.scores import prepare, score
from hotkv_sparse.sketches import build

F32 = npt.NDArray[np.float32]
FIRST_TOKENS = 64
"""Left out of a calibration: attention sinks have keys unlike all others."""
SINK_TOKENS, RECENT_TOKENS = 32, 64
"""Defaults of `SparseConfig`."""


def measured_bias(
    name: str,
    mu_HD: F32 | None,
    keys_SHD: F32,
    queries_NQD: F32,
    positions_N: Sequence[int],
    scale: float | None = None,
    axes: Axes | None = None,
) -> float:
    """By how much scores in a token format overestimate the log mass, in nats: the mean of
    (estimated - exact) over blocks of 16 tokens and query heads, weighted by the exact mass; the
    format's bias without mass. Sinks and recent tokens need no score and are left out.

    mu_HD: None: 0.
    keys_SHD: of a context from its first token on.
    queries_NQD: at `positions_N`.
    scale: None: 1 / sqrt(D).
    axes: for mix2.
    """
    form = format_named(name)
    num_blocks, kv_heads, head_size = (
        len(keys_SHD) // RUN_TOKENS,
        keys_SHD.shape[1],
        keys_SHD.shape[2],
    )
    scale = 1.0 / math.sqrt(head_size) if scale is None else scale
    packed = build(
        name,
        np.ascontiguousarray(keys_SHD[: num_blocks * RUN_TOKENS]).reshape(
            num_blocks, RUN_TOKENS, kv_heads, head_size
        ),
        mu_HD,
        axes=axes,
    )
    keys_HDS = keys_SHD.transpose(1, 2, 0)
    first, excess, mass = SINK_TOKENS // RUN_TOKENS, 0.0, 0.0
    for query_QD, position in zip(queries_NQD, positions_N, strict=True):
        last = (position + 1 - RECENT_TOKENS) // RUN_TOKENS
        if last <= first:
            continue
        grouped = (
            query_QD.reshape(kv_heads, -1, head_size)
            @ keys_HDS[..., : position + 1]
            * np.float32(scale)
        )
        token_QS = grouped.reshape(len(query_QD), -1)
        peak = token_QS.max(axis=1, keepdims=True)
        share_QS = np.exp(token_QS - peak)
        share_QB = (
            share_QS[:, first * RUN_TOKENS : last * RUN_TOKENS]
            .reshape(len(query_QD), -1, RUN_TOKENS)
            .sum(axis=2)
        )
        candidates = np.arange(first, last, dtype=np.int32)
        query = prepare(name, query_QD, mu_HD, scale, 0.0, axes)
        estimated_QB = score(query, packed, candidates) - peak
        share_of_all_QB = share_QB / share_QS.sum(axis=1, keepdims=True)
        exact_QB = np.log(np.maximum(share_QB, np.float32(1e-30)))
        excess += float((share_of_all_QB * (estimated_QB - exact_QB)).sum())
        mass += float(share_of_all_QB.sum())
    return excess / mass if mass > 0.0 else form.bias


TOKEN_FORMATS = tuple(name for name, form in FORMATS.items() if form.bits)
"""Formats that use a centre."""


@dataclass(frozen=True, slots=True)
class LayerCentre:
    """A layer's calibration.

    mu: float32 [H, D].
    bias: by token format: by how much scores overestimate the log mass, in nats.
    axes: for mix2; None if not calibrated.
    """

    mu: F32
    bias: Mapping[str, float]
    axes: Axes | None = None


@dataclass(frozen=True, slots=True)
class Centres:
    """Mean keys of a model's layers, and their axes. Raises INVALID_FIELD if a part can't be used.

    model: only shown to operators.
    num_tokens: behind each centre.
    layers: by index; a missing one has the centre 0.
    """

    model: str
    num_tokens: int
    layers: Mapping[int, LayerCentre]

    def __post_init__(self) -> None:
        if type(self.model) is not str:
            raise _refuse("model", f"is {type(self.model).__name__}, not text")
        if type(self.num_tokens) is not int or self.num_tokens < MIN_TOKENS:
            raise _refuse(
                "num_tokens", f"is {self.num_tokens!r}; a centre takes {MIN_TOKENS} tokens or more"
            )
        if not self.layers:
            raise _refuse("layers", "is empty; there is no centre of any layer")
        for index, layer in self.layers.items():
            if type(index) is not int or index < 0:
                raise _refuse("layers", f"has the number {index!r}; layers count from 0")
            _check_layer(index, layer)

    def __repr__(self) -> str:
        return f"Centres({self.model!r}, {len(self.layers)} layers, {self.num_tokens} tokens)"

    def mu(self, layer: int) -> F32 | None:
        """float32 [H, D]; None: 0."""
        found = self.layers.get(layer)
        return None if found is None else found.mu

    def bias(self, layer: int, name: str) -> float | None:
        """In nats; None if not measured."""
        found = self.layers.get(layer)
        return None if found is None else found.bias.get(name)

    def axes(self, layer: int) -> Axes | None:
        """None if not calibrated."""
        found = self.layers.get(layer)
        return None if found is None else found.axes


def _check_layer(index: int, layer: LayerCentre) -> None:
    mu = layer.mu
    if mu.dtype != np.float32 or mu.ndim != 2 or not mu.size:
        raise _refuse(
            f"mu of layer {index}",
            f"is {mu.dtype} {list(mu.shape)}, not float32 [kv_heads, head_size]",
        )
    if not np.isfinite(mu).all():
        raise _refuse(f"mu of layer {index}", "has values that are not finite")
    if layer.axes is not None and layer.axes.into.shape[:2] != mu.shape:
        raise _refuse(
            f"axes of layer {index}",
            f"are of {list(layer.axes.into.shape[:2])}, its mu is {list(mu.shape)}",
        )
    for name, bias in layer.bias.items():
        if name not in TOKEN_FORMATS:
            raise _refuse(
                f"bias of layer {index}",
                f"is for {name!r}; token formats are {', '.join(TOKEN_FORMATS)}",
            )
        if type(bias) is not float or not math.isfinite(bias):
            raise _refuse(f"bias of layer {index}", f"is {bias!r} for {name}, not a finite number")


def _refuse(field: str, problem: str) -> HotKVError:
    return HotKVError(
        Reason.INVALID_FIELD,
        f"centres: {field} {problem}; calibrate again (python -m hotkv_sparse.vllm.calibrate)",
    )
