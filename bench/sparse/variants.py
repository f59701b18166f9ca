"""Variants that are compared: ways to choose the blocks that a decode step attends to.

A variant is a scorer, a budget, a block size, a set for all KV heads together or for each, and how
fresh selections are:
- `fresh`: the blocks that this step's query chooses.
- `lru`: a hot set of twice the budget, fed by the previous steps' selections; all of it is
  attended. At most `corrections` missing blocks a set are loaded with the fresh query before that;
  the rest arrives before the next step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.sparse.sketch import SKETCHES
from hotkv_sparse import FORMATS, SparseConfig
from hotkv_sparse.centre import RECENT_TOKENS, SINK_TOKENS
from hotkv_sparse.formats import head_bytes

ORACLE, ENDS, CENTRED = "oracle", "ends", "+"
"""Scorers besides the formats of `hotkv_sparse`: exact block mass, and only sinks and recent
window. Then the sign before the name of a centre."""
FRESH, LRU = "fresh", "lru"


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to choose the blocks of a decode step, as the module describes.

    budget: a share of the context (float) or tokens (int), always kept tokens included.
    ends: numbers of tokens at the start and at the end that are always kept.
    """

    scorer: str
    budget: int | float
    block_tokens: int
    shared: bool
    freshness: str = FRESH
    corrections: int = 0
    ends: tuple[int, int] = (SINK_TOKENS, RECENT_TOKENS)

    @property
    def key(self) -> str:
        """Returns the name of its figures in JSON, such as `rot2u_10_32_shared_lru_2`; it leaves
        out `ends`, which all rows of a table have in common."""
        freshness = f"{LRU}_{self.corrections}" if self.freshness == LRU else self.freshness
        sets = "shared" if self.shared else "per_head"
        budget = f"{self.budget * 100:g}" if isinstance(self.budget, float) else f"{self.budget}t"
        return f"{self.scorer}_{budget}_{self.block_tokens}_{sets}_{freshness}"

    def config(self) -> SparseConfig:
        """Returns the variant as a config of hotkv_sparse; scorers that hotkv_sparse lacks are
        ignored there."""
        scorer = self.scorer if self.scorer in FORMATS else "rot2u"
        return SparseConfig(
            sparse_topk=self.budget,
            scorer=scorer,
            max_correction_blocks=self.corrections,
            sink_tokens=self.ends[0],
            recent_tokens=self.ends[1],
        )


TIGHT = (0.05, 16, False)
"""Budget, block size and sharing of the variants of the first target."""
SERVED = (0.10, 32, True)
"""Likewise of the second target, within the limits of vLLM's block tables."""


TIGHT_SCORERS = (
    *(ORACLE, "rot3u", "rot2u", "rot2u+mu", "rot2u+mu2k", "rot2u+own"),
    *("mix2+mu", "mix2+first", "mean", "quest", ENDS),
)
SERVED_SCORERS = (ORACLE, "rot2u", "rot2u+mu", "mix2+mu", "mix2+first", "mean", "quest")
FROM_FILE = ("rot2u+file", "mix2+file")
RESIDENT = (32, True, LRU, 4)
"""Block size, sharing and freshness of residency, which has no dense layers."""
RESIDENT_BUDGETS = (0.10, 1024, 512, 256)
RESIDENT_SCORERS = ("rot2u", "mix2+first")
FIELD = (16, False)
"""Block size and sharing of published comparisons: a fresh selection for each KV head."""
FIELD_ENDS = (16, 16)
"""Always-kept tokens of published comparisons: a block at each end, within the budget."""
FIELD_BUDGETS = (128, 512, 2048)
FIELD_SCORERS = (ORACLE, "rot2u", "rot2u+mu", "mix2+mu", "sketch4", "rot3u", "sketch8", "quest")


def default_variants(*, with_file: bool = False) -> list[Variant]:
    """Returns the variants that have targets, and beside them exact scores, summaries, codes on
    trial, and sinks and recent window alone."""
    more = FROM_FILE if with_file else ()
    tight = [Variant(scorer, *TIGHT) for scorer in (*TIGHT_SCORERS, *more)]
    served = [Variant(scorer, *SERVED, LRU, 2) for scorer in (*SERVED_SCORERS, *more)]
    return [
        *tight,
        *served,
        Variant("rot2u", *SERVED, LRU, 4),
        Variant("rot2u+mu", *SERVED, LRU, 4),
        Variant("mix2+first", *SERVED, LRU, 4),
    ]


def resident_variants(*, with_file: bool = False) -> list[Variant]:
    """Returns the variants of residency: sparse in every layer, at shares of the context and at
    absolute budgets."""
    more = FROM_FILE if with_file else ()
    rows = [
        Variant(scorer, budget, *RESIDENT)
        for budget in RESIDENT_BUDGETS
        for scorer in (*RESIDENT_SCORERS, *more)
    ]
    rows += [
        Variant(scorer, 0.10, *RESIDENT)
        for scorer in (ORACLE, "mix2+mu", "mix2+mu2k", "rot2u+first")
    ]
    return list(dict.fromkeys(rows))


def field_variants(*, with_file: bool = False) -> list[Variant]:
    """Returns the variants of published comparisons: absolute budgets beside exact block mass, no
    dense layers."""
    more = FROM_FILE if with_file else ()
    return [
        Variant(scorer, budget, *FIELD, ends=FIELD_ENDS)
        for budget in FIELD_BUDGETS
        for scorer in (*FIELD_SCORERS, *more)
    ]


def bytes_per_token(variant: Variant, head_size: int) -> float | None:
    """Returns the bytes of a representation for a token and KV head, or None."""
    name = variant.scorer.partition(CENTRED)[0]
    if name in SKETCHES:
        size = SKETCHES[name].page_bytes(variant.block_tokens, head_size)
    elif name in FORMATS:
        size = head_bytes(name, variant.block_tokens, head_size)
    else:
        return None
    return size / variant.block_tokens


def passes(variants: Sequence[Variant], size: int) -> list[Sequence[Variant]]:
    """Returns groups of at most `size` variants that decode together. Variants that share
    representations are neighbours."""
    ordered = sorted(variants, key=lambda variant: (variant.block_tokens, variant.scorer))
    return [ordered[first : first + size] for first in range(0, len(ordered), size)]
