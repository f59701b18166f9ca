"""Counters of sparse decode and residency with their help texts. Doesn't import vLLM."""

COUNTERS: dict[str, str] = {
    "sparse_selects": "Selections, one for each sequence, sparse layer and decode step.",
    "sparse_context_blocks": "Blocks of the contexts that selections chose from.",
    "sparse_selected_blocks": "Blocks that selections chose.",
    "sparse_attended_blocks": "Blocks that steps attended to: the hot sets.",
    "sparse_seeded_blocks": "Blocks that hot sets began with, without those that are always kept.",
    "sparse_corrected_blocks": "Blocks that joined a hot set with the fresh query.",
    "sparse_prefetched_blocks": "Blocks that joined a hot set a step after their selection.",
    "sparse_wanted_blocks": "Selected blocks, without those that are always kept.",
    "sparse_hit_blocks": "Wanted blocks that the hot set had.",
    "sparse_estimated_mass": "Sum over selections of the estimated share of attention mass.",
    "sparse_swap_bytes": "Bytes of the pages that joined hot sets.",
    "sparse_select_s": "Seconds spent on selections.",
    "sparse_built_blocks": "Sketches built, one for each block and layer.",
    "sparse_build_s": "Seconds spent on building sketches.",
    "sparse_loaded_blocks": ("Sketches loaded with their blocks, one for each block and layer."),
    "resident_pulled_pages": "Pages copied from host memory into hot slots.",
    "resident_staged_pages": "Pages copied into a staging area.",
    "refused_residencies": "Requests that waited for room in host memory.",
    "parked_residencies": "Requests that gave their room in host memory to others.",
    "moved_residencies": "Requests moved from the device to host memory (residency auto).",
    "lost_residencies": "Requests computed again because their bytes in host memory were lost.",
    "failed_residencies": (
        "Requests that ended with an error because the server did not accept their blocks."
    ),
    "sparse_recall_samples": "Selections measured against exact attention.",
    "sparse_recall": "Sum over samples of the share of the best blocks that was attended to.",
    "sparse_true_mass": (
        "Sum over samples of the exact share of attention mass that was attended to."
    ),
    "sparse_faults": "Faults of sparse attention; the layer used dense attention.",
}
