"""Random keys and queries for tests of scorers, and exact attention."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from hotkv_sparse.selection import Selection

F32 = npt.NDArray[np.float32]
TOKEN_FORMATS = ("rot2u", "rot3u")
SUMMARIES = ("quest", "mean")
UNCALIBRATED = TOKEN_FORMATS + SUMMARIES
"""All formats but mix2, whose axes need calibration (`test_axes.py`)."""


@dataclass(frozen=True)
class Case:
    """keys [B blocks, T tokens, H KV heads, D channels], valid tokens [B], queries [Q query
    heads, D], and centre [H, D] or None."""

    keys: F32
    num_tokens: npt.NDArray[np.int32]
    query: F32
    mu: F32 | None

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[2]

    def token_scores(self) -> F32:
        """q . k / sqrt(D): [Q, B, T], -inf for absent tokens."""
        num_blocks, block_tokens, kv_heads, head_size = self.keys.shape
        grouped = self.query.reshape(kv_heads, len(self.query) // kv_heads, head_size)
        exact = np.einsum("bthd,hgd->hgbt", self.keys, grouped).reshape(
            len(self.query), num_blocks, block_tokens
        ) / np.sqrt(head_size)
        return np.where(np.arange(block_tokens) < self.num_tokens[:, None], exact, -np.inf)

    def log_mass(self) -> F32:
        """Exact: logsumexp of a block's scores, [Q, B]."""
        with np.errstate(divide="ignore"):
            return np.log(np.exp(self.token_scores()).sum(axis=-1))


def make_case(
    seed: int,
    num_blocks: int,
    block_tokens: int,
    kv_heads: int,
    group: int,
    head_size: int,
    ragged: bool,
    centred: bool,
) -> Case:
    rng = np.random.default_rng(seed)
    centre = rng.standard_normal((kv_heads, head_size)).astype(np.float32) * rng.choice([0.0, 1.0])
    spread = np.float32(rng.choice([0.05, 1.0, 20.0]))
    shape = (num_blocks, block_tokens, kv_heads, head_size)
    keys = centre + rng.standard_normal(shape).astype(np.float32) * spread
    counts = np.full(num_blocks, block_tokens)
    if ragged:
        counts = rng.integers(0, block_tokens + 1, num_blocks)
    query = rng.standard_normal((kv_heads * group, head_size)).astype(np.float32)
    mu = centre.astype(np.float32) if centred else None
    return Case(keys.astype(np.float32), counts.astype(np.int32), query, mu)


def rows_of(data: st.DataObject, case: Case) -> npt.NDArray[np.int32]:
    """Indices of blocks, in any order, with repetitions."""
    numbers = st.lists(st.integers(0, len(case.keys) - 1), max_size=150)
    return np.array(data.draw(numbers) if len(case.keys) else [], np.int32)


cases = st.builds(
    make_case,
    seed=st.integers(0, 2**32 - 1),
    num_blocks=st.integers(0, 70),
    block_tokens=st.sampled_from([1, 7, 16, 20, 32, 64]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    head_size=st.sampled_from([16, 40, 64, 80, 96, 128, 192, 256]),
    ragged=st.booleans(),
    centred=st.booleans(),
)


def selection_of(weights: dict[int, float]) -> Selection:
    blocks = np.array(sorted(weights), np.int32)
    return Selection(blocks, np.array([weights[int(b)] for b in blocks], np.float32), 1.0)
