"""The connector's counters with their help texts. Doesn't import vLLM, so that documentation can
be generated from it."""

from hotkv_vllm.companion import part

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
}


def every_counter() -> dict[str, str]:
    """With those of an installed companion."""
    found = part("counter_help")
    return COUNTERS if found is None else {**COUNTERS, **found.COUNTERS}


def exported(name: str) -> str:
    """Prometheus' spelling of the unit: `flush_seconds` for `flush_s`."""
    return f"{name.removesuffix('_s')}_seconds" if name.endswith("_s") else name
