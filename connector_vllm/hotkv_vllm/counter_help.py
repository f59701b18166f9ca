"""The connector's counters with their help texts. Doesn't import vLLM, so that documentation can
be generated from it."""

COUNTERS: dict[str, str] = {
    "offered_requests": "Requests offered tokens from hotkv.",
    "offered_tokens": "Tokens from hotkv offered.",
    "hit_requests": "Requests that used tokens from hotkv.",
    "hit_tokens": "Tokens used from hotkv.",
    "miss_requests": (
        "Requests that got no tokens from hotkv, although a cache could have had a block."
    ),
    "awaited_requests": "Requests that waited for another engine to store their prompt.",
    "awaited_in_vain": "Requests whose awaited blocks did not come in time.",
    "lookup_timeouts": "Lookups and leases not answered in time.",
    "short_grants": "Leases that pinned fewer blocks than requested.",
    "loads": "Loads begun.",
    "failed_loads": "Failed loads; their requests computed their prompt.",
    "hung_loads": (
        "Loads that did not end when cancelled. Their requests continued; their blocks stay "
        "reserved."
    ),
    "unserved_requests": "Requests that came while the scheduler or a worker had no session.",
    "left_requests": "Requests that computed because loading is slower.",
    "tried_requests": "Requests that tried a load, although computing seemed faster.",
    "late_requests": "Requests whose load took longer than computing, or than a trial may.",
    "judged_choices": "Measured choices (load or compute).",
    "right_choices": "Choices that were faster.",
    "load_prediction_error_s": "Differences of loads from their prediction.",
    "judged_load_s": "Seconds of loads so measured.",
    "prefill_prediction_error_s": "Differences of prefill steps from their prediction.",
    "judged_prefill_s": "Seconds of prefill steps so measured.",
    "load_bytes": "Bytes loaded.",
    "stores": "Stores begun.",
    "store_bytes": "Bytes stored.",
    "stored_blocks": "Blocks that the server made ready.",
    "present_blocks": "Blocks that the server had already.",
    "refused_blocks": "Blocks that the server refused.",
    "unreachable_blocks": (
        "Blocks not stored because no hit could use them, or because of the interval of states."
    ),
    "dropped_blocks": "Blocks not stored because too much was in flight when their request ended.",
    "flushes": "Stores that a step waited for.",
    "flush_s": "Seconds that steps waited.",
    "reported_requests": "Requests reported to the server.",
    "wrong_hints": "Hints (kv_hints, kv_transfer_params) that could not be used.",
    "resets": "Resets of the shared cache by vLLM.",
    "callback_errors": "Exceptions in callbacks, kept from vLLM.",
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


def exported(name: str) -> str:
    """Prometheus' spelling of the unit: `flush_seconds` for `flush_s`."""
    return f"{name.removesuffix('_s')}_seconds" if name.endswith("_s") else name
