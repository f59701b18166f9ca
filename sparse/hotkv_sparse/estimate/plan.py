"""The case to be sized: context, batch, budget, and where things lie.

A `Plan` is checked when it is made, and against the model by `check`; every refusal names the field
and the fix. Blocks that a request has on the device are counted here.
"""

import dataclasses
import enum
import math
from dataclasses import dataclass, field

from hotkv_sparse.config import SparseConfig
from hotkv_sparse.estimate.figures import check_count, check_number, refuse
from hotkv_sparse.estimate.models import Model
from hotkv_sparse.formats import head_bytes
from hotkv_sparse.hotset import USUAL_SETS

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class Mode(enum.Enum):
    """How a request is decoded."""

    DENSE = "dense"
    """All KV on the device, all attended."""
    SPARSE = "sparse"
    """All KV on the device, the hot set attended."""
    RESIDENT = "resident"
    """All KV in host memory; on the device sinks, recent window and hot slots."""


def default_sparse() -> SparseConfig:
    """2048 tokens in all layers, the budget of the publications that RESIDENCY.md compares with."""
    return SparseConfig(sparse_topk=2048, dense_layers=(), min_context_tokens=0)


@dataclass(frozen=True, slots=True)
class Plan:
    """INVALID_FIELD if a value makes no sense.

    `tokens`: the context of a request. `batch`: requests that decode together. `sparse`: budget,
    scorer, sinks, recent window and dense layers, as operators set them. `hot_sets`: blocks of the
    hot set over blocks of the budget. `representations_on_host`: they take no device
    memory. `chunk_tokens`: tokens of a prefill step (max_num_batched_tokens). `staging_layers`:
    layers of context that a prefill of mode `RESIDENT` assembles at a time; two overlap copy and
    attention. `memory_ratio`: share of the device that vLLM may use (gpu_memory_utilization).
    `host_memory_bytes`: None: as much as it takes.
    """

    tokens: int
    batch: int = 1
    block_tokens: int = 16
    sparse: SparseConfig = field(default_factory=default_sparse)
    hot_sets: float = USUAL_SETS
    representations_on_host: bool = False
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
        check_number("hot_sets", self.hot_sets)
        if self.hot_sets < 1.0:
            raise refuse("hot_sets", self.hot_sets, "use 1 or more: a hot set holds the budget")
        check_number("memory_ratio", self.memory_ratio, most=1.0)
        if self.dtype not in DTYPE_BYTES:
            raise refuse("dtype", self.dtype, f"use one of {', '.join(DTYPE_BYTES)}")
        if self.weight_bits not in (0, 4, 8, 16, 32):
            raise refuse("weight_bits", self.weight_bits, "use 4, 8, 16 or 32, or 0 for the dtype")

    def check(self, model: Model) -> None:
        """Refuses what does not fit the model."""
        self.sparse.check(model.layers, self.block_tokens)
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
        """The plan with some fields replaced, checked again."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    # ------------------------------------------------------------------------- counts of one layer

    @property
    def element_bytes(self) -> int:
        """Bytes of a number in keys and values."""
        return DTYPE_BYTES[self.dtype]

    @property
    def weight_bytes(self) -> float:
        """Bytes of a parameter."""
        return (self.weight_bits or 8 * self.element_bytes) / 8

    @property
    def context_blocks(self) -> int:
        """Blocks of a request's context."""
        return -(-self.tokens // self.block_tokens)

    @property
    def always_blocks(self) -> int:
        """Blocks of sinks, recent window and partial block."""
        return min(self.sparse.max_always_blocks(self.block_tokens), self.context_blocks)

    @property
    def budget_blocks(self) -> int:
        """Blocks that a step chooses, K, those that are always kept included."""
        return self.sparse.budget_blocks(self.tokens, self.block_tokens)

    @property
    def hot_blocks(self) -> int:
        """Blocks that a request has on the device and attends to: the hot set, always kept blocks
        included, at most the context."""
        hot = max(math.ceil(self.hot_sets * self.budget_blocks), self.always_blocks)
        return min(hot, self.context_blocks)

    # ----------------------------------------------------------------------- share of one device

    def sparse_layers(self, model: Model) -> int:
        """Layers that choose."""
        return model.layers - len(set(self.sparse.dense_layers))

    def rank_kv_heads(self, model: Model) -> int:
        """KV heads of a device; heads are copied if there are more devices."""
        return max(1, model.kv_heads // self.tensor_parallel)

    def layer_token_bytes(self, model: Model) -> int:
        """Keys and values of a token in one layer, on one device."""
        return 2 * self.rank_kv_heads(model) * model.head_size * self.element_bytes

    def block_representation_bytes(self, model: Model) -> int:
        """Representations of a block in all sparse layers, on one device."""
        names = [name for layer in range(model.layers) for name in self.sparse.scorers_of(layer)]
        heads = self.rank_kv_heads(model)
        return heads * sum(head_bytes(name, self.block_tokens, model.head_size) for name in names)
