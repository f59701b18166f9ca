"""The HELP text of every metric: what it counts, and when it matters to an operator.

Always true: each counter, gauge and histogram of a node has a text here, under its name without
`hotkv_`; a test checks this. Labels have few values, and clients can't add values.
"""

HELP_BY_TOPIC: dict[str, dict[str, str]] = {
    "Is it working": {
        "build_info": "Always 1; labels name the versions.",
        "ready": "1 while the server takes work, as /readyz.",
        "problem": (
            "1 while a part has a problem (`hotkv status`). A broken tier does not stop the server."
        ),
        "draining": "1 while the server drains.",
        "loop_lag_p50_seconds": "Median delay of the event loop, for which all calls wait.",
        "loop_lag_p99_seconds": "99th percentile of the loop's delay.",
        "loop_lag_longest_seconds": "Longest delay of the loop; `hotkv status` names its cause.",
    },
    "Does it pay": {
        "ledger_hit_tokens_total": (
            "Prompt tokens that hit, also those of failed loads. Tier device: the engine's own "
            "memory."
        ),
        "ledger_missed_tokens_total": (
            "Prompt tokens computed. Many evicted: a larger cache hits more."
        ),
        "ledger_saved_seconds_total": (
            "Seconds of prefill that hits saved, at the engines' measured speed."
        ),
        "ledger_taken_back_seconds_total": (
            "Seconds of ledger_saved_seconds whose loads failed: subtract them."
        ),
        "ledger_waited_seconds_total": (
            "Seconds that requests waited for lookups, leases and loads."
        ),
        "ledger_rows": "Rows of the ledger.",
        "ledger_folded_rows_total": "Rows merged for lack of room.",
        "ledger_lost_reports_total": "Requests too fast for the outlook.",
        "ledger_ceiling_ratio": (
            "Share of the last hour's prompt tokens that an endless cache would have hit."
        ),
        "ledger_next_gib_ratio": "Share of prompt tokens that one more GiB would have added.",
    },
    "Lookups and leases": {
        "lookup_seconds": "Time of lookups by call, shared tiers included.",
        "lookup_blocks_total": "Blocks asked for by call, not in the mapped block table.",
        "lookup_hit_blocks_total": "Blocks that lookups by call found.",
        "acquired_blocks_total": "Blocks that read leases pinned: the engines' hits.",
        "missed_blocks_total": (
            "Blocks that read leases did not get, such as those evicted after the lookup."
        ),
        "lease_seconds": "Time of read leases, reads from tiers included.",
        "acquired_sketches_total": "Sketches that read leases pinned.",
        "missed_sketches_total": "Sketches that read leases did not get.",
        "expired_leases_total": "Leases that expired: an engine hung or died.",
    },
    "Stores and loads": {
        "stored_blocks_total": "Blocks made ready.",
        "stored_bytes_total": "Bytes copied from engines.",
        "store_seconds": "Time of stores, waits for a device or copy thread included.",
        "store_bytes": "Sizes of stores.",
        "stored_sketches_total": "Sketches made ready.",
        "loaded_blocks_total": "Blocks copied to engines.",
        "loaded_bytes_total": "Bytes copied to engines.",
        "load_seconds": "Time of loads, waits for a device or copy thread included.",
        "load_bytes": "Sizes of loads.",
        "present_blocks_total": "Blocks offered that were ready already.",
        "in_flight_blocks_total": "Blocks offered while another store was writing them.",
        "no_space_blocks_total": (
            "Blocks refused: all room was pinned, guaranteed to others, being written or held "
            "(eviction_hold_seconds). If it grows, the arena is too small."
        ),
        "aborted_blocks_total": "Blocks whose store failed or was cancelled or revoked.",
        "transfers_in_flight": "Transfers in progress.",
        "transfers_total": "Ended transfers; the log has the reason of failures.",
        "copy_pieces_queued": (
            "Pieces that wait for a copy thread or a device. Constantly high: copies are the "
            "bottleneck."
        ),
        "copy_wait_seconds": "Time that copies waited for a copy thread or a device.",
        "copy_busy_seconds_total": (
            "Seconds of busy copy threads. Its rate divided by copy_threads is their load."
        ),
        "copy_threads": "Threads that copy in host memory.",
    },
    "The arena": {
        "arena_capacity_bytes": "Bytes that have memory; it grows after a start.",
        "arena_full_capacity_bytes": "Bytes of the whole arena.",
        "arena_used_bytes": "Bytes of slots with blocks or sketches.",
        "arena_pinned_bytes": "Bytes pinned. Near the capacity, stores are refused.",
        "arena_lent_bytes": "Bytes of slabs lent (assigned) to a slot size.",
        "arena_idle_bytes": "Bytes of free slots in lent slabs.",
        "arena_tail_bytes": "Bytes at ends of lent slabs that no slot covers.",
        "arena_stranded_bytes": "Bytes of free slabs too scattered for the widest slot size.",
        "arena_fragmentation_ratio": "Share of lent bytes that is idle or tail.",
        "arena_imbalance_ratio": "Share of lent bytes that other slot sizes need more.",
        "arena_huge_page_bytes": "Bytes in huge pages, without which copies are slower.",
        "arena_registered_bytes": "Bytes pinned for GPUs; copies of the rest are slow.",
        "free_slabs": "Slabs lent to no slot size.",
        "ready_blocks": "Blocks that engines can load.",
        "sketch_bytes": "Bytes of sketches.",
    },
    "Tiers": {
        "tier_up": "1 if there is a disk tier and it works.",
        "tier_asked_blocks_total": (
            "Blocks that lookups did not find in host memory while the disk was up."
        ),
        "tier_hit_blocks_total": "Blocks that lookups found on the disk.",
        "tier_left_blocks_total": "Blocks left on the disk because computing is faster.",
        "tier_read_seconds": "Time of reads, each of all blocks of a lease.",
        "tier_demoted_blocks_total": "Blocks written to the disk.",
        "tier_encoded_blocks_total": "Blocks compressed (tiers.disk.compress).",
        "tier_promoted_blocks_total": "Blocks read from the disk for a request.",
        "tier_refused_blocks_total": "Blocks for which the disk had no room.",
        "tier_lost_blocks_total": (
            "Blocks damaged, or cut off with the end of the file: check the disk."
        ),
        "tier_failed_blocks_total": "Blocks whose read or write failed; the log has the reason.",
        "tier_read_bytes_total": "Bytes read.",
        "tier_written_bytes_total": "Bytes written; they wear an SSD.",
        "tier_used_bytes": "Bytes of the disk that hold blocks.",
        "tier_capacity_bytes": "Bytes for blocks on the disk; 0 without a disk tier.",
        "tier_queued_bytes": "Bytes of reads and writes in progress.",
        "tier_waiting_blocks": (
            "Blocks that wait to be written. Constantly high: the disk is too slow."
        ),
        "tier_unsaved_blocks": (
            "Blocks that a kill would lose: their records are not written. Constantly high: the "
            "disk hangs or is full."
        ),
        "tier_budget_bytes": "Bytes that may be written in 24 hours; 0 for no limit.",
        "tier_budget_left_bytes": "Bytes left of the budget; at 0 writing stops.",
        "tier_memory_bytes": "Memory outside the arena: records, staging for compression.",
        "tier_memory_limit_bytes": "Limit of tier_memory_bytes.",
        "shared_up": "1 if there are shared tiers and all work.",
        "shared_asked_blocks_total": (
            "Blocks that lookups found neither in host memory nor on the disk."
        ),
        "shared_hit_blocks_total": "Blocks that shared tiers had.",
        "shared_left_blocks_total": "Blocks left in shared tiers because computing is faster.",
        "shared_copied_blocks_total": "Blocks that shared tiers have, also those present before.",
        "shared_fetched_blocks_total": "Blocks fetched for a request.",
        "shared_refused_blocks_total": (
            "Blocks not written: the tier was full, down or without a generation."
        ),
        "shared_corrupt_blocks_total": "Damaged or foreign blocks; each is a miss.",
        "shared_failed_blocks_total": "Blocks whose read or write failed.",
        "shared_read_bytes_total": "Bytes read.",
        "shared_written_bytes_total": "Bytes written.",
        "shared_queued_bytes": "Bytes of reads and writes in progress.",
        "shared_waiting_blocks": "Blocks that wait to be copied to shared tiers.",
        "shared_memory_bytes": (
            "Memory outside the arena: buffers, staging, indexes, child processes."
        ),
        "shared_memory_limit_bytes": "Limit of shared_memory_bytes; 0 for no limit.",
    },
    "Residencies": {
        "residencies": "Open residencies.",
        "residencies_opened_total": "Residencies opened.",
        "residencies_refused_total": "Residencies refused; `hotkv residencies` has the reasons.",
        "residencies_waiting": (
            "Engines whose last residency was refused. Constantly above 0: the arena is too small."
        ),
        "residency_pinned_bytes": "Bytes that residencies pin.",
        "residency_promised_bytes": "Bytes reserved and not pinned yet.",
        "residency_bound_bytes": "Limit of pinned and promised bytes.",
        "residency_grace_bytes": (
            "Bytes kept after a restart for engines that read them, for residency.grace_s."
        ),
    },
    "Eviction and retention": {
        "evicted_blocks_total": "Blocks evicted for room or on request.",
        "eviction_age_seconds": (
            "Time from last use to eviction for room. If it is shorter than a conversation's "
            "pauses, the arena is too small."
        ),
        "flushed_blocks_total": "Blocks that flushes deleted.",
        "held_blocks_total": "Blocks that requests pinned.",
        "held_bytes": "Bytes that requests pinned.",
        "held_budget_bytes": (
            "Limit of held_bytes, a quarter of the arena, at which further requests pin none."
        ),
        "hints_accepted_total": "Actions of hints applied at once to all blocks.",
        "hints_clipped_total": "Actions applied to some blocks, or for less than asked.",
        "hints_deferred_total": "Actions that waited for a request's end or a tier.",
        "hints_rejected_total": "Actions not applied; `hotkv hints` has the reason.",
        "hints_missing_total": "Actions whose conversation or blocks were absent.",
        "hint_sessions": "Conversations that routers named and the server knows.",
        "eviction_half_life_seconds": "Seconds in which a use loses half its weight.",
        "eviction_memory_seconds": (
            "Seconds after which a use counts half in a block's number of uses."
        ),
        "eviction_recency": (
            "Weight of recency against frequency; -1 keeps the older of equally frequent blocks."
        ),
        "eviction_hold_seconds": (
            "Seconds for which a use holds a block (0: off); stores without other room are refused."
        ),
        "eviction_sample_ratio": "Share of keys sampled for learning.",
    },
    "Integrity": {
        "restored_blocks_total": "Blocks of an earlier server that a start kept.",
        "verified_blocks_total": "Blocks that matched their checksum.",
        "condemned_blocks_total": (
            "Blocks whose bytes had changed: another program writes to the arena, or memory is "
            "faulty."
        ),
        "unverified_blocks": "Restored blocks not yet compared.",
        "scrub_passes_total": "Background checks of all blocks.",
    },
    "Sessions and refusals": {
        "sessions": "Open sessions.",
        "leases": "Read and write leases.",
        "refused_total": "Refused calls and sessions.",
        "notices_queued": (
            "Longest queue of a session's notices. If it grows, an engine does not read."
        ),
    },
    "What engines report": {
        "reported_requests_total": "Requests that engines scheduled.",
        "reported_prompt_tokens_total": "Prompt tokens of reported requests.",
        "reported_device_hit_tokens_total": "Prompt tokens in engines' own caches.",
        "reported_hit_tokens_total": (
            "Prompt tokens not computed. Divided by reported_prompt_tokens: the hit ratio."
        ),
        "request_watchers": "Readers of reported requests, such as `hotkv record`.",
        "watched_requests_lost_total": "Requests that slow readers missed.",
    },
    "Events": {
        "events_published_total": "KV events published over ZMQ.",
        "events_lost_total": "KV events dropped: too many waited.",
        "events_without_tokens_total": (
            "Blocks of tiers announced without token ids, never sent or not kept "
            "(events.content_bytes)."
        ),
        "events_lost_by_readers_total": "KV events that slow readers over gRPC missed.",
        "events_queued_bytes": "Bytes of KV events that wait.",
        "event_readers": "Readers of KV events over gRPC.",
        "events_content_blocks": "Blocks whose token ids are kept (events.content_bytes).",
    },
    "Traces": {
        "trace_spans_exported_total": "Spans that the collector took.",
        "trace_spans_failed_total": "Spans that it did not take, for example while down.",
        "trace_spans_dropped_total": (
            "Spans not recorded: too many waited or ended in a second. Trace fewer requests."
        ),
        "trace_contexts_malformed_total": "Calls with an unreadable trace context.",
    },
    "Devices": {
        "device_usable": (
            "1 while a device copies; 0 while it hangs, or once it is lost, until a restart."
        ),
        "device_copied_bytes_total": "Bytes copied. Method pageable: the arena was not pinned.",
        "device_pieces_total": "Pieces copied.",
        "device_busy_seconds_total": "Seconds in which the device had pieces to copy.",
        "device_failed_jobs_total": "Copy jobs that failed.",
        "device_retried_jobs_total": "Copy jobs that were tried again, by a plainer method.",
        "device_method_failures_total": "Pieces that a copy method failed to copy.",
        "device_method_demoted": (
            "1 for a copy method that has failed often and is replaced by a plainer one for some "
            "minutes."
        ),
        "device_pieces_queued": "Pieces that wait.",
        "device_pieces_in_flight": "Pieces being copied.",
        "device_allocations_open": "Allocations of engines that the server has open or maps.",
    },
    "Sparse decode": {
        "sparse_reports_total": "Engines' reports of their sparse decode.",
        "sparse_unknown_sequences_total": "Reports of unknown sequences, as after a restart.",
        "sparse_used_blocks_total": "Blocks that sparse decode used, which counts for hotness.",
        "sparse_served_selects_total": "Selections that the server made.",
        "sparse_selects_in_flight": (
            "Selections that wait or run. Constantly high: engines wait for them."
        ),
        "sparse_select_seconds": "Time of selections by the server, from request to answer.",
        "sparse_sequences": "Sequences decoded sparsely.",
        "sparse_sequence_blocks": "Blocks of sequences decoded sparsely.",
    },
}
"""HELP texts by topic and metric. The topics are questions of an operator, in a usual order."""
HELP: dict[str, str] = {
    name: text for texts in HELP_BY_TOPIC.values() for name, text in texts.items()
}

LABELS: dict[str, tuple[str, ...]] = {
    "build_info": ("version", "protocol", "python"),
    "problem": ("component",),
    "ledger_hit_tokens_total": ("tier",),
    "ledger_missed_tokens_total": ("reason",),
    "transfers_total": ("direction", "outcome"),
    "tier_read_seconds": ("tier",),
    "refused_total": ("reason",),
    "device_copied_bytes_total": ("device", "direction", "method"),
    "device_pieces_total": ("device", "direction", "method"),
    "device_busy_seconds_total": ("device", "direction"),
    "device_failed_jobs_total": ("device",),
    "device_retried_jobs_total": ("device",),
    "device_method_failures_total": ("device", "direction", "method"),
    "device_method_demoted": ("device", "direction", "method"),
    "device_pieces_queued": ("device",),
    "device_pieces_in_flight": ("device",),
    "device_usable": ("device",),
}
"""Of each metric with labels. The metrics of `SPARSE_LAYER_HELP` have the label `layer`."""
LABEL_HELP: dict[str, str] = {
    "component": "a watched part of the server, or `tier NAME`; some 15",
    "device": "number of a GPU",
    "direction": "`load` or `store`, from the engine's side",
    "layer": "a layer with sparse decode, at most 256",
    "method": "of a copy: `memcpy`, `batch`, `kernel`, `staged`, or `pageable`",
    "outcome": "`done`, `cancelled` or `failed`",
    "protocol": "newest version of the wire",
    "python": "of the interpreter",
    "reason": "of a refusal: a `Reason` of the wire; of a miss: [hit_rate.md](hit_rate.md)",
    "tier": "`host`, `disk` or the name of a shared tier; for hits also `device`",
    "version": "of hotkv",
}

SPARSE_LAYER_HELP: dict[str, str] = {
    "selects": "Selections, one for each sequence and step.",
    "context_blocks": "Blocks of the contexts selected from.",
    "selected_blocks": "Blocks selected.",
    "attended_blocks": "Blocks attended to.",
    "seeded_blocks": "Blocks that hot sets began with.",
    "corrected_blocks": "Blocks that joined a hot set in the step that selected them.",
    "prefetched_blocks": "Blocks that joined a hot set a step after their selection.",
    "wanted_blocks": "Selected blocks, without those always kept.",
    "hit_blocks": "Wanted blocks that the hot set had.",
    "estimated_mass": "Sum over selections of the estimated share of mass.",
    "swap_bytes": "Bytes of pages that joined hot sets.",
    "select_s": "Seconds of selections.",
    "built_blocks": "Sketches that engines built.",
    "build_s": "Seconds of building sketches.",
    "recall_samples": "Selections measured against exact attention.",
    "recall": "Sum over samples of the share of the best blocks attended to.",
    "true_mass": "Sum over samples of the exact share of mass attended to.",
    "faults": "Faults of sparse attention; the call used dense attention.",
    "loaded_blocks": "Sketches that engines loaded.",
}
"""By name in `SPARSE_COUNTERS`. Each counter has a sample per layer, summed over all engines."""
