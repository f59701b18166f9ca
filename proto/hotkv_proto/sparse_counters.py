"""Counters of sparse decode, and the figures that operators see of them."""

SPARSE_COUNTERS: tuple[str, ...] = (
    "selects",
    "context_blocks",
    "selected_blocks",
    "attended_blocks",
    "seeded_blocks",
    "corrected_blocks",
    "prefetched_blocks",
    "wanted_blocks",
    "hit_blocks",
    "estimated_mass",
    "swap_bytes",
    "select_s",
    "built_blocks",
    "build_s",
    "recall_samples",
    "recall",
    "true_mass",
    "faults",
    "loaded_blocks",
)
"""Per layer, as in `hotkv.v1.LayerCounters`."""


def sparse_figures(counters: dict[str, float]) -> dict[str, float | None]:
    """What operators see of a layer. None if the denominator is 0.

    hit_ratio: selected blocks that were in the hot set, without those always kept.
    recall_ratio: attended share of the truly best blocks, over sampled selections.
    """

    def ratio(part: str, whole: str) -> float | None:
        return counters[part] / counters[whole] if counters[whole] > 0 else None

    return {
        "hit_ratio": ratio("hit_blocks", "wanted_blocks"),
        "recall_ratio": ratio("recall", "recall_samples"),
        "mean_estimated_mass": ratio("estimated_mass", "selects"),
        "mean_selected_blocks": ratio("selected_blocks", "selects"),
        "mean_select_s": ratio("select_s", "selects"),
    }
