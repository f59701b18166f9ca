"""What variants know of a model before they see a text: centres of its keys with their biases, and
their axes.

A calibration's name is what follows the `+` of a scorer's name:
- `mu`: from another text, all of it.
- `mu2k`: from the first 2048 tokens of that other text.
- `first`: from those, moved all over the context, as an engine takes it from the first prompt that
  it sees.
- `own`: from the first 2048 tokens of the text itself.
- `file`: from a file that `hotkv_vllm.sparse.calibrate` wrote.

Shapes: H KV heads, Q query heads, D channels, S tokens, N sampled tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.sparse.llama import SHORT_TOKENS, Dense
from hotkv_sparse.axes import AxesEstimate
from hotkv_sparse.centre import TOKEN_FORMATS, Centres, LayerCentre, measured_bias


@dataclass(frozen=True, slots=True)
class Calibration:
    """Centres by name, for each sparse layer in order (None: 0)."""

    centres: Mapping[str, Sequence[LayerCentre | None]]


@dataclass(frozen=True, slots=True)
class Own:
    """What one text gives: centres from all of it, from its beginning, and from its beginning
    moved."""

    whole_L: Sequence[LayerCentre]
    short_L: Sequence[LayerCentre]
    moved_L: Sequence[LayerCentre]

    @staticmethod
    def of(dense: Dense) -> "Own":
        """Statistics of a dense pass."""
        num_tokens = dense.keys_LHSD[0].shape[1]
        return Own(
            _centres(dense, dense.moments_L, num_tokens),
            _centres(dense, dense.short_moments_L, min(SHORT_TOKENS, num_tokens)),
            _centres(dense, dense.moved_moments_L, num_tokens, is_moved=True),
        )


def _centres(
    dense: Dense, moments_L: Sequence[AxesEstimate], num_tokens: int, *, is_moved: bool = False
) -> tuple[LayerCentre, ...]:
    """Of the first `num_tokens` tokens. An engine that calibrates itself (`is_moved`) measures no
    biases."""
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
    """For a text that gives `own`, beside another that gives `other`; ValueError if a file is of
    another model."""
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
