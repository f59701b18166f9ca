"""Settings of sparse decode, as an operator writes them.

A `SparseConfig` checks its values when it is made. Callers must also `check` it against the
model. Errors name field, value and fix.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse.formats import FORMATS, token_scorer

COPY_METHODS = ("memcpy", "batch", "kernel", "auto")
RESIDENCIES = ("off", "host", "auto")
CACHE_POLICIES = ("lru", "none")
USUAL_SETS = 2
"""With `lru`, a step selects the budget divided by this, so that half of the blocks it attends
to are from earlier steps. 2 gave better results than 1 (SmolLM2)."""
MIN_ADAPTIVE_TOKENS = 128
"""Of a selection with `adaptive_p`, besides sinks and recent window."""
MAX_COUNT = 1 << 30
"""Messages and kernels use int32, and kernels add a block's tokens to a count."""


def _refuse(name: str, value: object, fix: str) -> HotKVError:
    return HotKVError(Reason.INVALID_FIELD, f"sparse.{name} is {value!r}; {fix}")


@dataclass(frozen=True, slots=True)
class SparseConfig:
    """Settings of sparse decode. Raises HotKVError (INVALID_FIELD) if a setting is out of range or
    contradicts another setting.

    sparse_topk: the budget: most tokens to which a layer attends, those always kept included, which
        it keeps even if they are more. A whole number counts tokens; a fraction is a share of the
        context.
    adaptive_p: share of the mass, 0 to 1, at which a selection ends. At .85 answers change more, at
        .95 less; .9 is usual. Needs `rot2u`, `rot3u` or `mix2`; refused if `residency` is not
        `off`.
    scorer: format of the sketches by which blocks are scored.
    fusion: for research: scorers with their exponents. Their weighted geometric mean scores blocks
        instead of `scorer`. Empty: not used.
    sink_tokens, recent_tokens: tokens at the start and at the end of the context that are always
        kept; the partial block is too.
    dense_layers: layers that attend to the whole context.
    max_correction_blocks: most blocks per layer that a step adds to the hot set before it attends.
        Further selected blocks are added one step later.
    cache_policy: what leaves the hot set. `lru`: the least recently selected block. `none`: every
        block that is not selected.
    copy_method: how pages are copied into hot slots, with residency. `memcpy`: a call for each run
        of pages that are consecutive in both memories; `batch`: one call for all; `kernel` and
        `auto`: compiled code on several threads, on CUDA a kernel. CUDA has only the last two.
    min_context_tokens: shorter contexts attend to the whole context.
    residency: `off` keeps the whole context on the device, `host` old blocks only in host memory,
        so a context may exceed the device's memory; `auto` moves a context there when the device
        has no room.
    """

    sparse_topk: int | float = 0.2
    adaptive_p: float | None = None
    scorer: str = "rot2u"
    sink_tokens: int = 32
    recent_tokens: int = 64
    dense_layers: tuple[int, ...] = (0, 1)
    max_correction_blocks: int = 4
    copy_method: str = "auto"
    cache_policy: str = "lru"
    min_context_tokens: int = 4096
    residency: str = "off"
    fusion: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_budget()
        self._check_scorers()
        if self.copy_method not in COPY_METHODS:
            raise _refuse("copy_method", self.copy_method, f"use one of {', '.join(COPY_METHODS)}")
        if self.cache_policy not in CACHE_POLICIES:
            raise _refuse(
                "cache_policy", self.cache_policy, f"use one of {', '.join(CACHE_POLICIES)}"
            )
        self._check_residency()

    def _check_residency(self) -> None:
        if self.residency not in RESIDENCIES:
            raise _refuse("residency", self.residency, f"use one of {', '.join(RESIDENCIES)}")
        if self.residency == "off":
            return
        if self.dense_layers:
            raise _refuse(
                "dense_layers",
                self.dense_layers,
                f"with residency = {self.residency!r} no layer is dense; use ()",
            )
        if type(self.sparse_topk) is not int:
            fix = (
                f"with residency = {self.residency!r} the budget is a number of tokens, such as "
                "2048"
            )
            raise _refuse("sparse_topk", self.sparse_topk, fix)
        if not self.sink_tokens:
            # Workers tell requests apart by the page of their first block, so it must stay on
            # the device.
            fix = f"with residency = {self.residency!r} the first block stays; use 1 or more"
            raise _refuse("sink_tokens", self.sink_tokens, fix)

    def _check_counts(self) -> None:
        for name, least in (
            ("sink_tokens", 0),
            ("recent_tokens", 1),
            ("max_correction_blocks", 0),
            ("min_context_tokens", 0),
        ):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= MAX_COUNT:
                raise _refuse(name, value, f"use an integer from {least} to {MAX_COUNT}")
        for layer in self.dense_layers:
            if type(layer) is not int or layer < 0:
                raise _refuse("dense_layers", self.dense_layers, "use layer numbers from 0 up")

    def _check_budget(self) -> None:
        topk = self.sparse_topk
        if (
            type(topk) not in (int, float)
            or not 0 < topk <= MAX_COUNT
            or (type(topk) is float and topk > 1.0)
        ):
            raise _refuse(
                "sparse_topk",
                topk,
                f"use a number of tokens (an integer up to {MAX_COUNT}) or a share of the context "
                "(above 0.0, at most 1.0)",
            )
        if self.adaptive_p is not None and not 0.0 < self.adaptive_p < 1.0:
            raise _refuse(
                "adaptive_p",
                self.adaptive_p,
                "use a share of the attention mass between 0 and 1, such as 0.9, or leave it out",
            )

    def _check_scorers(self) -> None:
        named = [("scorer", self.scorer), *(("fusion", name) for name in self.fusion)]
        for where, name in named:
            if name not in FORMATS:
                raise _refuse(where, name, f"use one of {', '.join(FORMATS)}")
            if self.adaptive_p is not None and not token_scorer(name):
                raise _refuse(
                    where,
                    name,
                    (
                        "adaptive_p needs a scorer that estimates mass: rot2u, rot3u or mix2; or "
                        "leave adaptive_p out"
                    ),
                )
        for name, exponent in self.fusion.items():
            if not 0.0 < exponent <= sys.float_info.max:
                raise _refuse(f"fusion[{name}]", exponent, "use an exponent above 0")

    def check(self, num_layers: int, block_tokens: int) -> None:
        """Raises INVALID_FIELD if the settings do not fit the model."""
        for layer in self.dense_layers:
            if layer >= num_layers:
                raise _refuse(
                    "dense_layers",
                    self.dense_layers,
                    f"the model has {num_layers} layers; use numbers from 0 to {num_layers - 1}",
                )
        least = self.max_always_blocks(block_tokens) + 1
        shortest = max(self.min_context_tokens, least * block_tokens)
        if (
            self.covers(MAX_COUNT, block_tokens)
            or self.selected_blocks(shortest, block_tokens) >= least
        ):
            return
        least_tokens = self.sets * least * block_tokens
        share = f"1 / {self.sets} of it" if self.sets > 1 else "it"
        fix = (
            f"sinks, recent window, the partial block and one more take {least} blocks of "
            f"{block_tokens} tokens, and a step selects {share}"
        )
        if type(self.sparse_topk) is int:
            raise _refuse("sparse_topk", self.sparse_topk, f"{fix}; use at least {least_tokens}")
        needed = math.ceil(min(least_tokens / self.sparse_topk, MAX_COUNT))
        raise _refuse(
            "sparse_topk",
            self.sparse_topk,
            f"{fix}; use more, or set min_context_tokens to {needed} or more",
        )

    def max_always_blocks(self, block_tokens: int) -> int:
        """Most blocks with sinks or recent tokens, and the partial block."""
        return (
            -(-self.sink_tokens // block_tokens)
            + (self.recent_tokens + block_tokens - 2) // block_tokens
            + 1
        )

    @property
    def sets(self) -> int:
        """Budget / size of a selection."""
        return USUAL_SETS if self.cache_policy == "lru" else 1

    def budget_tokens(self, context_tokens: int) -> int:
        topk = self.sparse_topk
        return topk if type(topk) is int else math.floor(topk * context_tokens)

    def budget_blocks(self, context_tokens: int, block_tokens: int) -> int:
        """Most blocks to which a step attends, always kept ones included."""
        budget_tokens = self.budget_tokens(context_tokens)
        if context_tokens <= budget_tokens:
            return -(-context_tokens // block_tokens)
        return budget_tokens // block_tokens

    def most_blocks(self, context_tokens: int, block_tokens: int) -> int:
        """The most `budget_blocks` of a context of up to `context_tokens`."""
        most_tokens = min(self.budget_tokens(context_tokens), context_tokens)
        return -(-most_tokens // block_tokens)

    def selected_blocks(self, context_tokens: int, block_tokens: int) -> int:
        """Most blocks that a step selects for a hot set: the budget divided by `sets`. A
        sequence's first step selects the whole budget."""
        selected = -(-self.budget_tokens(context_tokens) // (self.sets * block_tokens))
        return min(selected, self.budget_blocks(context_tokens, block_tokens))

    def covers(self, context_tokens: int, block_tokens: int) -> bool:
        """Whether the budget covers the context, so that attention is exact."""
        count = -(-context_tokens // block_tokens)
        return self.budget_blocks(context_tokens, block_tokens) == count

    def scorers_of(self, layer: int) -> Mapping[str, float]:
        """Scorers with their exponents in `fusion`; empty if the layer is dense."""
        if layer in self.dense_layers:
            return {}
        return self.fusion or {self.scorer: 1.0}
