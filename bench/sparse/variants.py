"""What `bench.sparse_quality` compares: ways to choose the blocks that a decode step attends to.

A variant has a scorer, a budget, a block size, one set of blocks for all KV heads or one for each,
and one of two uses of a selection:

- `fresh`: a step attends to the blocks that its query selects.
- `lru`: it selects half of the budget and attends to a whole hot set of earlier selections. At
  most `corrections` selected blocks that the set lacks are loaded before; the others, before the
  next step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.sparse.low_rank import LOW_RANKS
from hotkv_sparse import FORMATS, SparseConfig
from hotkv_sparse.centre import RECENT_TOKENS, SINK_TOKENS
from hotkv_sparse.formats import head_bytes

ORACLE, ENDS, CENTRED = "oracle", "ends", "+"
PARTED = {"quest8": ("quest", 8), "mean4": ("mean", 4)}
"""Scorers besides `hotkv_sparse`'s: ORACLE by exact mass, ENDS only the first and last tokens.
CENTRED comes before the source of the centre. PARTED: with a summary for each so many tokens of a
block, so that they have the bytes of `rot2u` and `mix2`; the block's score is their largest, or
for `mean` their sum of masses."""
FRESH, LRU = "fresh", "lru"


@dataclass(frozen=True, slots=True)
class Variant:
    """budget: with the always-kept tokens: share of the context (float) or tokens (int).
    shared: one set of blocks for all KV heads.
    corrections: with `lru`, blocks loaded before a step attends.
    ends: always-kept tokens at start and end.
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
        """In JSON, such as `rot2u_10_32_shared_lru_2`; without `ends`, equal in a table's rows."""
        freshness = f"{LRU}_{self.corrections}" if self.freshness == LRU else self.freshness
        sets = "shared" if self.shared else "per_head"
        budget = f"{self.budget * 100:g}" if isinstance(self.budget, float) else f"{self.budget}t"
        return f"{self.scorer}_{budget}_{self.block_tokens}_{sets}_{freshness}"

    def config(self) -> SparseConfig:
        """A foreign scorer becomes `rot2u`, which the caller does not use."""
        scorer = self.scorer if self.scorer in FORMATS else "rot2u"
        return SparseConfig(
            sparse_topk=self.budget,
            scorer=scorer,
            max_correction_blocks=self.corrections,
            sink_tokens=self.ends[0],
            recent_tokens=self.ends[1],
        )


TIGHT = (0.05, 16, False)
"""`budget`, `block_tokens`, `shared` of the first set with targets."""
SERVED = (0.20, 32, True)
"""The same, as engines use it: vLLM's block tables allow one set of blocks for all KV heads."""


TIGHT_SCORERS = (
    *(ORACLE, "rot3u", "rot2u", "rot2u+mu", "rot2u+mu2k", "rot2u+own"),
    *("mix2+mu", "mix2+first", "mean", "quest", ENDS),
)
SERVED_SCORERS = (ORACLE, "rot2u", "rot2u+mu", "mix2+mu", "mix2+first", "mean", "quest")
FROM_FILE = ("rot2u+file", "mix2+file")
DEFAULT = Variant("mix2+first", *SERVED, LRU, 4)
"""Of engines."""
RESIDENT = (32, True, LRU, 4)
"""`block_tokens`, `shared`, `freshness`, `corrections` for residency, without dense layers."""
RESIDENT_BUDGETS = (0.20, 2048, 1024, 512)
RESIDENT_SCORERS = ("rot2u", "mix2+first")
FIELD_BLOCK_TOKENS = 16
"""In published comparisons, which select afresh for each KV head."""
FIELD_ENDS = (16, 16)
"""A block at each end, within the budget."""
FIELD_BUDGETS = (128, 512, 2048)
FIELD_SCORERS = (ORACLE, "mix2+first", "rot2u", "lowrank4", "quest8", "mean4", "quest")
"""All but the last have the same bytes; that is Quest as published."""
FIELD_SHARED = (ORACLE, "mix2+first")
"""Also with one set for all KV heads."""


def default_variants(*, with_file: bool = False) -> list[Variant]:
    """Those with targets, and more to compare. with_file: centres of a file too."""
    more = FROM_FILE if with_file else ()
    tight = [Variant(scorer, *TIGHT) for scorer in (*TIGHT_SCORERS, *more)]
    served = [Variant(scorer, *SERVED, LRU, 2) for scorer in (*SERVED_SCORERS, *more)]
    return [
        *tight,
        *served,
        Variant("rot2u", *SERVED, LRU, 4),
        Variant("rot2u+mu", *SERVED, LRU, 4),
        DEFAULT,
        *(
            replace(DEFAULT, budget=budget, shared=shared)
            for budget, shared in ((0.20, False), (0.10, True), (0.10, False))
        ),
    ]


def resident_variants(*, with_file: bool = False) -> list[Variant]:
    """Their budgets are shares and tokens."""
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
    """Budgets in tokens, no dense layers, exact mass as reference."""
    more = FROM_FILE if with_file else ()
    sets = [(scorer, False) for scorer in (*FIELD_SCORERS, *more)]
    sets += [(scorer, True) for scorer in FIELD_SHARED]
    return [
        Variant(scorer, budget, FIELD_BLOCK_TOKENS, shared, ends=FIELD_ENDS)
        for budget in FIELD_BUDGETS
        for scorer, shared in sets
    ]


def bytes_per_token(variant: Variant, head_size: int) -> float | None:
    """Stored per token and KV head for scores; None: nothing."""
    name = variant.scorer.partition(CENTRED)[0]
    if name in PARTED:
        form, part_tokens = PARTED[name]
        return head_bytes(form, part_tokens, head_size) / part_tokens
    if name in LOW_RANKS:
        size = LOW_RANKS[name].page_bytes(variant.block_tokens, head_size)
    elif name in FORMATS:
        size = head_bytes(name, variant.block_tokens, head_size)
    else:
        return None
    return size / variant.block_tokens


def passes(variants: Sequence[Variant], size: int) -> list[Sequence[Variant]]:
    """Groups of at most `size`; variants that share sketches are neighbours."""
    ordered = sorted(variants, key=lambda variant: (variant.block_tokens, variant.scorer))
    return [ordered[first : first + size] for first in range(0, len(ordered), size)]
