"""The HELP text of every metric: what it counts, and when it matters to an operator.

Always true: each counter, gauge and histogram of a node has a text here, under its name without
`hotkv_`; a test checks this. Labels have few values, and clients can't add values.
"""

HELP_BY_TOPIC: dict[str, dict[str, str]] = {
    "Is it working": {
        "build_info": "Always 1. The labels name the versions of server, protocol and Python.",
        "ready": (
            "1 while the server takes work, as /readyz; 0 while it drains or a part has a problem."
        ),
        "problem": (
            "1 while a part of the server has a problem; `hotkv status` describes it. The server "
            "serves without a broken tier."
        ),
        "draining": "1 while the server drains.",
        "loop_lag_p50_seconds": "Median delay of the event loop, for which all calls wait.",
        "loop_lag_p99_seconds": "99th percentile of the loop's delay.",
        "loop_lag_longest_seconds": "Longest delay of the loop; `hotkv status` names its cause.",
    },
    "Does it pay": {
        "ledger_hit_tokens_total": (
            "Prompt tokens that hit, by tier; device: the engine's own memory. Tokens of a failed "
            "load count as missed too."
        ),
        "ledger_missed_tokens_total": (
            "Prompt tokens that were computed, by reason. If many are evicted, a larger cache hits"
            " more."
        ),
        "ledger_saved_seconds_total": (
            "Seconds of prefill that hits saved, by the engines' own measured speed."
        ),
        "ledger_taken_back_seconds_total": (
            "Seconds counted as saved by hits whose load then failed. Subtract them from "
            "ledger_saved_seconds."
        ),
        "ledger_waited_seconds_total": (
            "Seconds that requests waited for lookups, leases and loads."
        ),
        "ledger_rows": "Rows of the ledger: engines by tenant and key space.",
        "ledger_folded_rows_total": "Rows that were merged because there were too many.",
        "ledger_lost_reports_total": (
            "Requests that the forecast of a larger cache skipped because they came too fast."
        ),
        "ledger_ceiling_ratio": (
            "Share of the last hour's prompt tokens that an endless cache would have hit."
        ),
        "ledger_next_gib_ratio": "Share of prompt tokens that one more GiB would have added.",
    },
    "Lookups and leases": {
        "lookup_seconds": "Time of lookups by call, with the answers of shared tiers.",
        "lookup_blocks_total": (
            "Blocks that lookups by call asked for; not lookups in the mapped block table."
        ),
        "lookup_hit_blocks_total": "Blocks that lookups by call found.",
        "acquired_blocks_total": "Blocks that read leases pinned: the hits of engines.",
        "missed_blocks_total": (
            "Blocks that read leases asked for and did not get, for example blocks evicted after "
            "their lookup."
        ),
        "lease_seconds": "Time of read leases, with reads from tiers.",
        "acquired_sketches_total": "Sketches that read leases pinned.",
        "missed_sketches_total": ("Sketches that read leases asked for and did not get."),
        "expired_leases_total": (
            "Leases that expired before their release, because an engine hung or died."
        ),
    },
    "Stores and loads": {
        "stored_blocks_total": "Blocks that stores made ready.",
        "stored_bytes_total": "Bytes that stores copied from engines.",
        "store_seconds": "Time of finished stores, with waits for a device or copy thread.",
        "store_bytes": "Sizes of finished stores.",
        "stored_sketches_total": "Sketches that stores made ready.",
        "loaded_blocks_total": "Blocks that loads copied to engines.",
        "loaded_bytes_total": "Bytes that loads copied to engines.",
        "load_seconds": "Time of finished loads, with waits for a device or copy thread.",
        "load_bytes": "Sizes of finished loads.",
        "present_blocks_total": "Blocks that stores offered and that were ready already.",
        "in_flight_blocks_total": "Blocks offered by a store while another store was writing them.",
        "no_space_blocks_total": (
            "Blocks refused because all memory was pinned, guaranteed to other tenants, being "
            "written or held for sessions (eviction_hold_seconds). If it grows, the arena is too "
            "small."
        ),
        "aborted_blocks_total": "Blocks whose store failed, was cancelled or was revoked.",
        "transfers_in_flight": "Loads and stores in progress.",
        "transfers_total": (
            "Loads and stores that ended, by outcome. The log has the reason of failures."
        ),
        "copy_pieces_queued": (
            "Pieces of copies that wait for a copy thread or a device. If it stays high, copies "
            "are the bottleneck."
        ),
        "copy_wait_seconds": "Time that copies waited for a copy thread or a device.",
        "copy_busy_seconds_total": (
            "Seconds that copy threads were busy. Its rate divided by copy_threads is their load."
        ),
        "copy_threads": "Threads that copy in host memory.",
    },
    "The arena": {
        "arena_capacity_bytes": "Bytes of the arena that have memory. It grows after a start.",
        "arena_full_capacity_bytes": "Bytes of the whole arena.",
        "arena_used_bytes": "Bytes of slots that hold blocks and sketches.",
        "arena_pinned_bytes": (
            "Bytes that leases, residencies and requests pin. Near the capacity, stores are "
            "refused."
        ),
        "arena_lent_bytes": "Bytes of slabs that are assigned (lent) to a slot size.",
        "arena_idle_bytes": "Bytes of free slots in lent slabs.",
        "arena_tail_bytes": "Bytes at the ends of lent slabs that no slot covers.",
        "arena_stranded_bytes": (
            "Bytes of free slabs that the widest slot size can't use because they are not adjacent."
        ),
        "arena_fragmentation_ratio": "Share of arena_lent_bytes that is idle or tail bytes.",
        "arena_imbalance_ratio": "Share of lent bytes that other slot sizes need more.",
        "arena_huge_page_bytes": (
            "Bytes of the arena in huge pages. Copies are slower without them."
        ),
        "arena_registered_bytes": (
            "Bytes of the arena that are pinned for GPUs. Copies of the rest are slow."
        ),
        "free_slabs": "Slabs that are lent to no slot size.",
        "ready_blocks": "Blocks that engines can load.",
        "sketch_bytes": "Bytes of sketches for sparse decode.",
    },
    "Tiers": {
        "tier_up": "1 if there is a disk tier and it works.",
        "tier_asked_blocks_total": (
            "Blocks that lookups did not find in host memory, while the disk was up."
        ),
        "tier_hit_blocks_total": "Blocks that lookups found on the disk.",
        "tier_left_blocks_total": "Blocks left on the disk because computing them is faster.",
        "tier_read_seconds": "Time of reads by tier; a read fetches all blocks of a lease.",
        "tier_demoted_blocks_total": "Blocks written to the disk.",
        "tier_encoded_blocks_total": "Blocks compressed for the disk (tiers.disk.compress).",
        "tier_promoted_blocks_total": "Blocks read from the disk for a request.",
        "tier_refused_blocks_total": "Blocks for which the disk had no place.",
        "tier_lost_blocks_total": (
            "Blocks lost on the disk: damaged, or cut off with the end of the file. If it grows, "
            "check the disk."
        ),
        "tier_failed_blocks_total": (
            "Blocks whose reading or writing failed. The log has the reason."
        ),
        "tier_read_bytes_total": "Bytes read from the disk.",
        "tier_written_bytes_total": "Bytes written to the disk; they wear an SSD.",
        "tier_used_bytes": "Bytes of places that hold blocks.",
        "tier_capacity_bytes": "Bytes of all places on the disk; 0 without a disk tier.",
        "tier_queued_bytes": "Bytes of reads and writes in progress.",
        "tier_waiting_blocks": (
            "Blocks in host memory that wait to be written. If it stays high, the disk is too slow."
        ),
        "tier_unsaved_blocks": (
            "Blocks on the disk whose records are not written yet; a kill now would lose them. If "
            "it stays high, the disk hangs or is full."
        ),
        "tier_budget_bytes": "Bytes that may be written in 24 hours; 0 for no limit.",
        "tier_budget_left_bytes": "Bytes left of the budget. At 0 writing stops.",
        "tier_memory_bytes": (
            "Memory of the disk tier outside the arena: records, and staging if it compresses."
        ),
        "tier_memory_limit_bytes": "Limit of tier_memory_bytes.",
        "shared_up": "1 if there are shared tiers and all work.",
        "shared_asked_blocks_total": (
            "Blocks that lookups found neither in host memory nor on the disk."
        ),
        "shared_hit_blocks_total": "Blocks that shared tiers had.",
        "shared_left_blocks_total": "Blocks left in shared tiers because computing them is faster.",
        "shared_copied_blocks_total": (
            "Blocks that shared tiers have, written by this node or present before."
        ),
        "shared_fetched_blocks_total": "Blocks fetched from shared tiers for a request.",
        "shared_refused_blocks_total": (
            "Blocks not written because a shared tier was full, down or without a generation."
        ),
        "shared_corrupt_blocks_total": "Damaged or foreign blocks in shared tiers; each is a miss.",
        "shared_failed_blocks_total": "Blocks whose reading or writing in a shared tier failed.",
        "shared_read_bytes_total": "Bytes of blocks read from shared tiers.",
        "shared_written_bytes_total": "Bytes of blocks written to shared tiers.",
        "shared_queued_bytes": "Bytes of reads and writes in progress.",
        "shared_waiting_blocks": "Blocks in host memory that wait to be copied to shared tiers.",
        "shared_memory_bytes": (
            "Memory of shared tiers outside the arena: buffers, staging, indexes, child processes."
        ),
        "shared_memory_limit_bytes": "Limit of shared_memory_bytes; 0 for no limit.",
    },
    "Residencies": {
        "residencies": "Requests whose blocks stay in the arena while they run.",
        "residencies_opened_total": "Residencies that were opened.",
        "residencies_refused_total": (
            "Refusals of residencies; `hotkv residencies` has the reasons."
        ),
        "residencies_waiting": (
            "Engines whose last residency was refused. If it stays above 0, the arena is too small."
        ),
        "residency_pinned_bytes": "Bytes of the arena that residencies pin.",
        "residency_promised_bytes": (
            "Bytes of the arena reserved for residencies and not pinned yet."
        ),
        "residency_bound_bytes": "Limit of pinned and promised bytes together.",
        "residency_grace_bytes": (
            "Bytes kept after a restart for engines that still read them; 0 after "
            "residency.grace_s."
        ),
    },
    "Eviction and retention": {
        "evicted_blocks_total": "Blocks evicted for room or on request.",
        "eviction_age_seconds": (
            "Time from a block's last use to its eviction for room. If it is shorter than the "
            "pauses of a session, the arena is too small."
        ),
        "flushed_blocks_total": "Blocks dropped by a flush of their key space.",
        "held_blocks_total": "Blocks that requests pinned (retention with pin).",
        "held_bytes": "Bytes that pins of requests hold.",
        "held_budget_bytes": (
            "Limit of held_bytes (leases.held_share). At the limit, further requests keep no "
            "blocks."
        ),
        "hints_accepted_total": "Actions of routers' hints done at once for all blocks.",
        "hints_clipped_total": "Actions done for some blocks, or for less than asked.",
        "hints_deferred_total": "Actions that waited for the end of a request or for a tier.",
        "hints_rejected_total": "Actions not done; `hotkv hints` has the reason.",
        "hints_missing_total": "Actions whose session or blocks were not there.",
        "hint_sessions": "Sessions that routers named and the server knows.",
        "eviction_half_life_seconds": (
            "Seconds in which a use loses half its weight, as the policy learned."
        ),
        "eviction_memory_seconds": (
            "Seconds after which a use counts half in the number of a block's uses."
        ),
        "eviction_recency": (
            "Weight of recency against frequency; -1 keeps the older of equally frequent blocks."
        ),
        "eviction_hold_seconds": (
            "Seconds for which the policy keeps a block after a use; stores that find no other "
            "room are refused. 0: off."
        ),
        "eviction_sample_ratio": "Share of keys that the policy samples to learn its setting.",
        "eviction_once_blocks": "Blocks that were used once (policy arc).",
        "eviction_again_blocks": "Blocks that were used more than once (policy arc).",
        "eviction_once_target_blocks": "Target of eviction_once_blocks (policy arc).",
        "eviction_small_blocks": "Blocks in the queue of new blocks (policy s3fifo).",
        "eviction_main_blocks": (
            "Blocks in the queue of blocks that were used again (policy s3fifo)."
        ),
    },
    "Integrity": {
        "restored_blocks_total": "Blocks of an earlier server that the start found again.",
        "verified_blocks_total": "Blocks whose bytes matched their checksum.",
        "condemned_blocks_total": (
            "Blocks dropped because their bytes had changed. Above 0, another program writes to "
            "the arena, or memory is faulty."
        ),
        "unverified_blocks": "Restored blocks to be compared before their first load.",
        "scrub_passes_total": "Times that the background check compared all blocks.",
    },
    "Sessions and refusals": {
        "sessions": "Open sessions.",
        "leases": "Read and write leases.",
        "refused_total": "Refused calls and sessions, by reason.",
        "notices_queued": (
            "Notices that wait to be sent in the longest queue of a session. If it grows, an "
            "engine does not read."
        ),
    },
    "What engines report": {
        "reported_requests_total": "Requests that engines scheduled.",
        "reported_prompt_tokens_total": "Prompt tokens of reported requests.",
        "reported_device_hit_tokens_total": "Prompt tokens found in engines' own caches.",
        "reported_hit_tokens_total": (
            "Prompt tokens that engines did not compute. Divided by reported_prompt_tokens it is "
            "the hit ratio."
        ),
        "request_watchers": "Readers of reported requests, such as `hotkv record`.",
        "watched_requests_lost_total": "Reported requests that slow readers missed.",
    },
    "Events": {
        "events_published_total": "KV events published over ZMQ.",
        "events_lost_total": "KV events dropped because too many waited (events.buffer_bytes).",
        "events_without_tokens_total": (
            "Blocks that a tier announced without token ids, which were never sent or not kept "
            "(events.content_bytes)."
        ),
        "events_lost_by_readers_total": "KV events that slow readers over gRPC missed.",
        "events_queued_bytes": "Bytes of KV events that wait to be published.",
        "event_readers": "Readers of KV events over gRPC.",
        "events_content_blocks": (
            "Blocks whose token ids are kept for events (events.content_bytes)."
        ),
    },
    "Traces": {
        "trace_spans_exported_total": "Spans that the collector took.",
        "trace_spans_failed_total": (
            "Spans that the collector did not take, for example while it is down."
        ),
        "trace_spans_dropped_total": (
            "Spans not recorded because too many waited or ended in a second. If it grows, raise "
            "tracing.queue_spans or tracing.max_spans_per_s, or trace fewer requests."
        ),
        "trace_contexts_malformed_total": (
            "Calls with an unreadable trace context, served without it."
        ),
    },
    "Devices": {
        "device_usable": (
            "1 while a device copies; 0 once it is lost, which only a restart repairs."
        ),
        "device_copied_bytes_total": (
            "Bytes that a device copied. Method pageable: the arena was not pinned."
        ),
        "device_pieces_total": "Pieces that a device copied.",
        "device_busy_seconds_total": "Seconds in which a device had pieces to copy.",
        "device_failed_jobs_total": "Copy jobs of a device that failed.",
        "device_pieces_queued": "Pieces that wait for a device.",
        "device_pieces_in_flight": "Pieces that a device is copying.",
        "device_allocations_open": "Allocations of engines on GPUs that the server has open.",
    },
    "Sparse decode": {
        "sparse_reports_total": "Messages in which engines reported their sparse decode.",
        "sparse_unknown_sequences_total": (
            "Reports of unknown sequences, for example after a restart."
        ),
        "sparse_used_blocks_total": "Blocks that sparse decode used and that count for hotness.",
        "sparse_served_selects_total": "Selections that the server made for engines.",
        "sparse_selects_in_flight": (
            "Selections that wait or run. If it stays high, engines wait for them."
        ),
        "sparse_select_seconds": "Time of selections by the server, from request to answer.",
        "sparse_sequences": "Sequences that engines decode sparsely.",
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
    "device_pieces_queued": ("device",),
    "device_pieces_in_flight": ("device",),
    "device_usable": ("device",),
}
"""Of each metric with labels. The metrics of `SPARSE_LAYER_HELP` have the label `layer`."""
LABEL_HELP: dict[str, str] = {
    "component": "a part of the server that is watched, or `tier NAME`; some 15",
    "device": "number of a GPU of the node",
    "direction": "`load` or `store`, from the engine's side",
    "layer": "number of a layer with sparse decode, at most 256",
    "method": "a way of copying: `memcpy`, `batch`, `kernel`, `staged`, or `pageable`",
    "outcome": "`done`, `cancelled` or `failed`",
    "protocol": "newest version of the wire that the server speaks",
    "python": "version of the Python interpreter",
    "reason": "of a refusal: a `Reason` of the wire; of a miss: see [hit_rate.md](hit_rate.md)",
    "tier": "`host`, `disk` or the name of a shared tier; for hits also `device`",
    "version": "version of hotkv",
}

SPARSE_LAYER_HELP: dict[str, str] = {
    "selects": "Selections, one for each sequence and step.",
    "context_blocks": "Blocks of the contexts that selections chose from.",
    "selected_blocks": "Blocks that selections chose.",
    "attended_blocks": (
        "Blocks that steps attended to. Divided by context_blocks it is the share of the context "
        "that is read."
    ),
    "seeded_blocks": "Blocks that hot sets began with.",
    "corrected_blocks": "Blocks that joined a hot set in the step that selected them.",
    "prefetched_blocks": "Blocks that joined a hot set a step after their selection.",
    "wanted_blocks": "Selected blocks, without those that are always kept.",
    "hit_blocks": (
        "Wanted blocks that the hot set had. Divided by wanted_blocks it is the hit ratio: if it "
        "falls, hot sets are too small."
    ),
    "estimated_mass": "Sum over selections of the estimated share of attention mass.",
    "swap_bytes": "Bytes of the pages that joined hot sets.",
    "select_s": "Seconds spent on selections.",
    "built_blocks": "Sketches that engines built.",
    "build_s": "Seconds spent on building sketches.",
    "recall_samples": "Selections measured against exact attention.",
    "recall": (
        "Sum over samples of the share of the best blocks that was attended to. Divided by "
        "recall_samples it should be near 1."
    ),
    "true_mass": "Sum over samples of the exact share of attention mass that was attended to.",
    "faults": "Faults of sparse attention; the call used dense attention.",
    "loaded_blocks": "Sketches that engines loaded.",
}
"""By name in `hotkv_proto.reports.SPARSE_COUNTERS`. Each counter has a sample per layer, summed
over all engines."""
