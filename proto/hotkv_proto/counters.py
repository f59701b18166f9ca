"""Names of the counters that engines keep per layer of sparse decode; those of
`hotkv.v1.LayerCounters`, which says what they mean."""

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


def sparse_figures(counters: dict[str, float]) -> dict[str, float | None]:
    """Figures of a layer for operators, from its counters; None if nothing was counted.

    `hit_ratio`: of the selected blocks, always kept ones aside, the share that the hot set had.
    `recall_ratio`: of sampled selections, the share of the exactly best blocks that was attended.
    `mean_estimated_mass`, `mean_selected_blocks`, `mean_select_s`: per selection.
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
