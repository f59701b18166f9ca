"""The variants that `bench.sparse_quality` compares: ways to choose the blocks to which a decode
step attends.

A variant consists of a scorer (the way to score blocks), a budget, a block size, one set of blocks
for all KV heads or one for each, and one of two ways to use a selection:
- `fresh`: a step attends to the blocks that its query selects.
- `lru`: a step selects half of the budget, and attends to a whole hot set, which previous steps'
  selections have filled. Before that, at most `corrections` selected blocks that the set lacks are
  loaded for this step; the others are loaded before the next step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.sparse.low_rank import LOW_RANKS
from hotkv_sparse import FORMATS, SparseConfig
from hotkv_sparse.centre import RECENT_TOKENS, SINK_TOKENS
from hotkv_sparse.formats import head_bytes

ORACLE, ENDS, CENTRED = "oracle", "ends", "+"
"""ORACLE and ENDS are scorers besides the formats of `hotkv_sparse`. ORACLE scores blocks by their
exact attention mass. ENDS selects only the first and the last tokens of the context. CENTRED is the
sign in a scorer's name before the source of its centre (mean key)."""
FRESH, LRU = "fresh", "lru"


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to choose the blocks of a decode step, as the module describes.

    scorer: name of the way to score blocks.
    budget: the most to which a step attends, including the tokens that are always kept: a share of
        the context (float) or tokens (int).
    shared: True: one set of blocks for all KV heads; False: one for each.
    freshness: `fresh` or `lru`.
    corrections: with `lru`, most selected blocks that a step loads before it attends.
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
        """Returns the variant's name in JSON, such as `rot2u_10_32_shared_lru_2`. The name omits
        `ends`, which are the same in all rows of a table."""
        freshness = f"{LRU}_{self.corrections}" if self.freshness == LRU else self.freshness
        sets = "shared" if self.shared else "per_head"
        budget = f"{self.budget * 100:g}" if isinstance(self.budget, float) else f"{self.budget}t"
        return f"{self.scorer}_{budget}_{self.block_tokens}_{sets}_{freshness}"

    def config(self) -> SparseConfig:
        """Returns the variant as settings of hotkv_sparse. If the variant's scorer is none of
        hotkv_sparse's, the settings name `rot2u`, and the caller does not use it."""
        scorer = self.scorer if self.scorer in FORMATS else "rot2u"
        return SparseConfig(
            sparse_topk=self.budget,
            scorer=scorer,
            max_correction_blocks=self.corrections,
            sink_tokens=self.ends[0],
            recent_tokens=self.ends[1],
        )


TIGHT = (0.05, 16, False)
"""`budget`, `block_tokens` and `shared` of the variants with a tight budget: the first of two sets
of variants that have targets."""
SERVED = (0.20, 32, True)
"""`budget`, `block_tokens` and `shared` of the variants as engines use them: the second set of
variants that have targets. vLLM's block tables allow only one set of blocks for all KV heads."""


TIGHT_SCORERS = (
    *(ORACLE, "rot3u", "rot2u", "rot2u+mu", "rot2u+mu2k", "rot2u+own"),
    *("mix2+mu", "mix2+first", "mean", "quest", ENDS),
)
SERVED_SCORERS = (ORACLE, "rot2u", "rot2u+mu", "mix2+mu", "mix2+first", "mean", "quest")
FROM_FILE = ("rot2u+file", "mix2+file")
RESIDENT = (32, True, LRU, 4)
"""`block_tokens`, `shared`, `freshness` and `corrections` of the variants for residency (contexts
in host memory), which has no dense layers."""
RESIDENT_BUDGETS = (0.20, 2048, 1024, 512)
RESIDENT_SCORERS = ("rot2u", "mix2+first")
FIELD = (16, False)
"""`block_tokens` and `shared` in published comparisons with other methods: a fresh selection for
each KV head."""
FIELD_ENDS = (16, 16)
"""`ends` in published comparisons: a block of always kept tokens at each end, within the budget."""
FIELD_BUDGETS = (128, 512, 2048)
FIELD_SCORERS = (ORACLE, "rot2u", "rot2u+mu", "mix2+mu", "lowrank4", "rot3u", "lowrank8", "quest")


def default_variants(*, with_file: bool = False) -> list[Variant]:
    """Returns the variants that have targets, and further variants to compare them with.

    with_file: also variants whose mean keys come from a file.
    """
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
    """Returns the variants for residency (contexts in host memory): sparse in every layer, with
    budgets as shares of the context and in tokens."""
    more = FROM_FILE if with_file else ()
    rows = [
        Variant(scorer, budget, *RESIDENT)
        for budget in RESIDENT_BUDGETS
        for scorer in (*RESIDENT_SCORERS, *more)
    ]
    rows += [
        Variant(scorer, 0.20, *RESIDENT)
        for scorer in (ORACLE, "mix2+mu", "mix2+mu2k", "rot2u+first")
    ]
    return list(dict.fromkeys(rows))


def field_variants(*, with_file: bool = False) -> list[Variant]:
    """Returns variants with the settings of published comparisons: budgets in tokens, no dense
    layers, and the selection by exact attention mass as a reference."""
    more = FROM_FILE if with_file else ()
    return [
        Variant(scorer, budget, *FIELD, ends=FIELD_ENDS)
        for budget in FIELD_BUDGETS
        for scorer in (*FIELD_SCORERS, *more)
    ]


def bytes_per_token(variant: Variant, head_size: int) -> float | None:
    """Returns how many bytes per token and KV head a variant stores to score blocks (its compact
    form of keys). Returns None if the variant stores nothing."""
    name = variant.scorer.partition(CENTRED)[0]
    if name in LOW_RANKS:
        size = LOW_RANKS[name].page_bytes(variant.block_tokens, head_size)
    elif name in FORMATS:
        size = head_bytes(name, variant.block_tokens, head_size)
    else:
        return None
    return size / variant.block_tokens


def passes(variants: Sequence[Variant], size: int) -> list[Sequence[Variant]]:
    """Divides the variants into groups of at most `size` that decode together. Variants that share
    sketches are neighbours."""
    ordered = sorted(variants, key=lambda variant: (variant.block_tokens, variant.scorer))
    return [ordered[first : first + size] for first in range(0, len(ordered), size)]
