"""The HELP text of every metric: what it counts, and when it matters to an operator.

Always true: each counter, gauge and histogram of a node has a text here, under its name without the
prefix `hotkv_`; a test compares both. Labels have few values, and clients can't add any.
"""

HELP_BY_TOPIC: dict[str, dict[str, str]] = {
    "Is it working": {
        "build_info": "Always 1. The labels name the versions of server, protocol and Python.",
        "ready": "1 while the server takes work, as /readyz says: not while it drains, nor while a "
        "part has a problem.",
        "problem": "1 while a part of the server has a problem; /readyz and `hotkv status` say "
        "which. A tier's does not keep the server from serving.",
        "draining": "1 while the server drains: it takes no new work.",
        "loop_lag_p50_seconds": "Median delay of the event loop. All calls wait for it.",
        "loop_lag_p99_seconds": "99th percentile of the delay of the event loop.",
        "loop_lag_longest_seconds": "Longest delay of the event loop. `hotkv status` names its "
        "cause.",
    },
    "Does it pay": {
        "ledger_hit_tokens_total": "Tokens of prompts that hit, by the tier in which they lay; "
        "device: the engine's own memory. Those of a load that fails later count as missed, too.",
        "ledger_missed_tokens_total": "Tokens of prompts that were computed, by reason. Many "
        "evicted ones mean that a larger cache would hit more.",
        "ledger_saved_seconds_total": "Seconds of prefill that hits have saved, by the engines' "
        "own measured speed.",
        "ledger_taken_back_seconds_total": "Seconds of these that loads have taken back by "
        "failing. ledger_saved_seconds less these is what the cache has saved.",
        "ledger_waited_seconds_total": "Seconds that requests have waited for lookups, leases and "
        "loads.",
        "ledger_rows": "Rows of the ledger: engines by tenant and key space.",
        "ledger_folded_rows_total": "Rows that were joined with others because there were too "
        "many.",
        "ledger_lost_reports_total": "Requests that the forecast of a larger cache has not "
        "followed, because they came too fast. They are counted in the rows.",
        "ledger_ceiling_ratio": "Share of the tokens of the last hour's prompts that an endless "
        "cache would have hit.",
        "ledger_next_gib_ratio": "Share of them that one GiB more would have hit besides.",
    },
    "Lookups and leases": {
        "lookup_seconds": "Time of lookups by call, from message to answer, with what shared tiers "
        "take to say what they have.",
        "lookup_blocks_total": "Blocks that lookups by call asked for. Engines that map the block "
        "table look up without a call and are not counted.",
        "lookup_hit_blocks_total": "Blocks that lookups by call found. Compare with lookup_blocks.",
        "acquired_blocks_total": "Blocks that read leases pinned: those that engines hit.",
        "missed_blocks_total": "Blocks that read leases asked for and did not get. It grows if "
        "blocks are evicted between an engine's lookup and its lease.",
        "lease_seconds": "Time of read leases, from message to answer, with reads of blocks that "
        "lie in tiers.",
        "acquired_representations_total": "Representations that read leases pinned.",
        "missed_representations_total": "Representations that read leases asked for and did not "
        "get.",
        "expired_leases_total": "Leases that expired before they were released. It grows if "
        "engines hang or die.",
    },
    "Stores and loads": {
        "stored_blocks_total": "Blocks that stores made ready.",
        "stored_bytes_total": "Bytes that stores copied out of engines' memory.",
        "store_seconds": "Time of stores that were done, from when they had room to the end. It "
        "includes waiting for an engine's device and for a copy thread.",
        "store_bytes": "Sizes of stores that were done.",
        "stored_representations_total": "Representations that stores made ready.",
        "loaded_blocks_total": "Blocks that loads copied into engines' memory.",
        "loaded_bytes_total": "Bytes that loads copied into engines' memory.",
        "load_seconds": "Time of loads that were done, from call to end. It includes waiting for "
        "an engine's device and for a copy thread.",
        "load_bytes": "Sizes of loads that were done.",
        "present_blocks_total": "Blocks that a store brought although they were ready: no copy was "
        "needed.",
        "in_flight_blocks_total": "Blocks that a store brought while another store was writing "
        "them.",
        "no_space_blocks_total": "Blocks that were not stored because everything else was pinned, "
        "guaranteed to other tenants, being written or held for sessions (see "
        "eviction_hold_seconds). If it grows, the arena is too small.",
        "aborted_blocks_total": "Blocks whose store failed, was cancelled or was revoked.",
        "transfers_in_flight": "Loads and stores that have begun and not ended.",
        "transfers_total": "Loads and stores that have ended, by outcome. If failed ones grow, the "
        "log says why.",
        "copy_pieces_queued": "Pieces of copies that wait for a copy thread or a device. If it "
        "stays high, copies are the bottleneck.",
        "copy_wait_seconds": "How long copies waited for a copy thread or a device to begin with "
        "them. If it grows, copies are the bottleneck.",
        "copy_busy_seconds_total": "Seconds that copy threads have been busy, all together. Its "
        "rate divided by copy_threads is the share of time in which they copy.",
        "copy_threads": "Threads that copy in host memory.",
    },
    "The arena": {
        "arena_capacity_bytes": "Bytes of the arena that have memory. It grows after a start.",
        "arena_full_capacity_bytes": "Bytes of the arena once all of it has memory.",
        "arena_used_bytes": "Bytes of slots that hold blocks and representations.",
        "arena_pinned_bytes": "Bytes that leases pin. Pinned blocks can't be evicted: near the "
        "capacity, stores are refused.",
        "arena_lent_bytes": "Bytes of slabs that are lent to a slot size.",
        "arena_idle_bytes": "Bytes of free slots in lent slabs.",
        "arena_tail_bytes": "Bytes at the ends of lent slabs that no slot covers.",
        "arena_stranded_bytes": "Bytes of free slabs that do not lie together as the widest slot "
        "size needs them.",
        "arena_fragmentation_ratio": "Share of lent memory that holds nothing: idle and tail bytes "
        "of lent bytes.",
        "arena_imbalance_ratio": "Share of lent memory lent to other slot sizes than those that "
        "use it. If it stays high, one slot size keeps slabs from others.",
        "arena_huge_page_bytes": "Bytes of the arena in huge pages. Copies are slower without "
        "them.",
        "arena_registered_bytes": "Bytes of the arena that are pinned for GPUs. Copies of the rest "
        "are slow.",
        "free_slabs": "Slabs that are lent to no slot size.",
        "ready_blocks": "Blocks that engines can load.",
        "representation_bytes": "Bytes of representations for sparse decode.",
    },
    "Tiers": {
        "tier_demoted_blocks_total": "Blocks that were written to the tier.",
        "tier_encoded_blocks_total": "Blocks of these that were written in fewer bytes: "
        "tiers.disk.compress.",
        "tier_promoted_blocks_total": "Blocks that came up from the tier for a request.",
        "tier_refused_blocks_total": "Blocks for which the tier had no place.",
        "tier_lost_blocks_total": "Blocks that the tier could not give back whole: damaged or cut "
        "off. If it grows, look at the disk.",
        "tier_read_bytes_total": "Bytes read from the tier.",
        "tier_written_bytes_total": "Bytes written to the tier. What wears an SSD.",
        "tier_failed_blocks_total": "Blocks whose reading or writing failed. If it grows, the log "
        "says why.",
        "tier_used_bytes": "Bytes of places that hold blocks.",
        "tier_capacity_bytes": "Bytes of all places of the tier; 0 without one.",
        "tier_queued_bytes": "Bytes that the tier has been asked to read or write and has not yet.",
        "tier_waiting_blocks": "Blocks in host memory that wait to be written to the tier. If it "
        "stays high, the tier is slower than the engines store.",
        "tier_unsaved_blocks": "Blocks in the tier that a kill now would lose: their records are "
        "not written yet. If it stays high, the tier's disk hangs or is full.",
        "tier_memory_bytes": "Memory that the tier takes besides the arena: its records, and "
        "staging memory if it encodes.",
        "tier_memory_limit_bytes": "The most of it.",
        "shared_memory_bytes": "Memory that shared tiers take besides the arena: buffers, staging "
        "memory, indexes, child processes.",
        "shared_memory_limit_bytes": "The most of it; 0 if a tier has no bound.",
        "shared_copied_blocks_total": "Blocks that shared tiers have, written by this node or "
        "there already.",
        "shared_refused_blocks_total": "Blocks that shared tiers did not take: full, away, no "
        "epoch.",
        "shared_fetched_blocks_total": "Blocks that came from shared tiers for a request.",
        "shared_read_bytes_total": "Bytes of blocks read from shared tiers.",
        "shared_written_bytes_total": "Bytes of blocks written to shared tiers.",
        "shared_corrupt_blocks_total": "Blocks of shared tiers that were damaged or foreign: a "
        "miss.",
        "shared_failed_blocks_total": "Blocks whose reading or writing in a shared tier failed.",
        "shared_queued_bytes": "Bytes that shared tiers were asked to read or write and have not "
        "yet.",
        "shared_waiting_blocks": "Blocks in host memory that wait to be copied to shared tiers.",
        "shared_up": "1 if there are shared tiers and nothing is known against any.",
        "tier_up": "1 if there is a tier and nothing is known against it.",
        "tier_asked_blocks_total": "Blocks that lookups asked for and host memory lacked, while "
        "the tier was up.",
        "tier_hit_blocks_total": "Blocks of these that lay in the tier.",
        "tier_left_blocks_total": "Blocks of these that were left there, because the engine "
        "computes them sooner than the tier brings them in.",
        "tier_budget_bytes": "Most bytes that may be written to the tier in 24 hours; 0 for no "
        "limit.",
        "tier_budget_left_bytes": "Bytes that are left of the budget. At 0 nothing is written.",
        "tier_read_seconds": "How long reads from each tier took, a read for all blocks that a "
        "lease asks it for.",
        "shared_asked_blocks_total": "Blocks that lookups asked for and neither host memory nor a "
        "tier before had.",
        "shared_hit_blocks_total": "Blocks of these that were found in shared tiers.",
        "shared_left_blocks_total": "Blocks of these that were left there, because the engine "
        "computes them sooner than the tier brings them in.",
    },
    "Residencies": {
        "residencies": "Requests whose blocks stay in the arena as long as they run.",
        "residencies_opened_total": "Residencies that were opened.",
        "residencies_refused_total": "Times that a residency was refused. It grows while requests "
        "wait for room; `hotkv residencies` says for how much.",
        "residencies_waiting": "Engines whose last residency was refused. If it stays above 0, the "
        "arena is too small for their requests.",
        "residency_pinned_bytes": "Bytes of the arena that residencies pin.",
        "residency_promised_bytes": "Bytes of the arena that are reserved for what residencies do "
        "not pin yet.",
        "residency_bound_bytes": "Most that pinned and promised bytes of residencies may come to.",
        "residency_grace_bytes": "Bytes that are kept after a restart for engines that read them "
        "under the server before. It falls to 0 after residency.grace_s.",
    },
    "Eviction and retention": {
        "evicted_blocks_total": "Blocks that were evicted to make room.",
        "eviction_age_seconds": "Time between the last use of a block and its eviction. If it is "
        "shorter than the pause between the turns of a session, the arena is too small.",
        "flushed_blocks_total": "Blocks that were dropped because an engine or operator flushed "
        "their key space.",
        "held_blocks_total": "Blocks that requests asked to keep (retention with pin).",
        "hints_accepted_total": "Actions of routers' hints that were done at once, for all blocks.",
        "hints_clipped_total": "Actions that were done for some blocks, or for less than was "
        "asked.",
        "hints_deferred_total": "Actions that waited: for the end of a request, or for a tier.",
        "hints_rejected_total": "Actions that were not done; `hotkv hints` says why.",
        "hints_missing_total": "Actions whose session or blocks were not there.",
        "hint_sessions": "Sessions that routers have named and the server knows.",
        "held_bytes": "Bytes that are kept because requests asked for it.",
        "held_budget_bytes": "Most bytes that requests may keep (leases.held_share). At the "
        "budget, further requests keep nothing.",
        "eviction_half_life_seconds": "Seconds in which a use loses half its weight, as the policy "
        "has learned.",
        "eviction_memory_seconds": "Seconds after which the policy counts an older use half.",
        "eviction_recency": "Weight of recency against frequency in the policy; -1 keeps the older "
        "of equally frequent blocks.",
        "eviction_hold_seconds": "Seconds for which the policy keeps a block after a use, while "
        "stores that find no other room are refused; 0 for none.",
        "eviction_sample_ratio": "Share of keys that the policy samples to learn its setting.",
        "eviction_once_blocks": "Blocks that were used once (policy arc).",
        "eviction_again_blocks": "Blocks that were used more than once (policy arc).",
        "eviction_once_target_blocks": "Number of once-used blocks that the policy aims at (policy "
        "arc).",
        "eviction_small_blocks": "Blocks in the queue of new blocks (policy s3fifo).",
        "eviction_main_blocks": "Blocks in the queue of blocks that were used again (policy "
        "s3fifo).",
    },
    "Integrity": {
        "restored_blocks_total": "Blocks that came back at the start from an earlier server.",
        "verified_blocks_total": "Blocks whose bytes were compared with their check value and "
        "agreed.",
        "condemned_blocks_total": "Blocks that were dropped because their bytes had changed. Above "
        "0, something else writes to the arena, or memory is faulty.",
        "unverified_blocks": "Blocks that came back and have not been compared yet. Each is "
        "compared before its first load.",
        "scrub_passes_total": "Times that the scrubber has compared all blocks.",
    },
    "Sessions and refusals": {
        "sessions": "Open sessions.",
        "leases": "Read and write leases.",
        "refused_total": "Calls and sessions that were refused, by reason.",
        "notices_queued": "Notices in the longest outbox of a session. If it grows, an engine does "
        "not read.",
    },
    "What engines report": {
        "reported_requests_total": "Requests that engines scheduled.",
        "reported_prompt_tokens_total": "Prompt tokens of those requests.",
        "reported_device_hit_tokens_total": "Prompt tokens that engines had in their own device "
        "cache.",
        "reported_hit_tokens_total": "Prompt tokens that engines did not compute: in the device "
        "cache or loaded from here. Divided by reported_prompt_tokens it is the hit ratio.",
        "request_watchers": "Readers of reported requests, such as `hotkv record`.",
        "watched_requests_lost_total": "Reported requests that a reader missed because it reads "
        "too slowly.",
    },
    "Events": {
        "events_published_total": "KV events that were published over ZMQ.",
        "events_lost_total": "KV events that were dropped because too many waited. "
        "events.buffer_bytes is the bound.",
        "events_lost_by_readers_total": "KV events that a reader over gRPC missed because it reads "
        "too slowly.",
        "events_queued_bytes": "Bytes of KV events that wait to be published.",
        "event_readers": "Readers of KV events over gRPC.",
    },
    "Traces": {
        "trace_spans_exported_total": "Spans that the collector of traces has taken.",
        "trace_spans_failed_total": "Spans that were sent and that the collector did not take. It "
        "grows while the collector is away.",
        "trace_spans_dropped_total": "Spans that were not recorded because too many were waiting "
        "or too many ended in a second. If it grows, raise tracing.queue_spans or "
        "tracing.max_spans_per_s, or trace fewer requests.",
        "trace_contexts_malformed_total": "Calls whose trace context could not be read; they were "
        "served as calls without one.",
    },
    "Devices": {
        "device_allocations_open": "Allocations of engines on GPUs that are open here.",
        "device_copied_bytes_total": "Bytes that a device has copied, by direction and method. "
        "Much of method pageable means that the arena is not pinned.",
        "device_pieces_total": "Pieces that a device has copied, by direction and method.",
        "device_busy_seconds_total": "Seconds in which a device had pieces to copy, by direction.",
        "device_failed_jobs_total": "Copy jobs of a device that failed.",
        "device_pieces_queued": "Pieces that wait for a device.",
        "device_pieces_in_flight": "Pieces that a device is copying.",
        "device_usable": "1 while a device copies; 0 once it is lost, which only a restart "
        "repairs.",
    },
    "Sparse decode": {
        "sparse_reports_total": "Messages in which engines reported their sparse decode.",
        "sparse_unknown_sequences_total": "Reports of sequences that this server does not know, "
        "for example after a restart.",
        "sparse_used_blocks_total": "Blocks that sparse decode used and that count for hotness.",
        "sparse_served_selects_total": "Selections that the server made for engines.",
        "sparse_selects_in_flight": "Selections that wait or run. If it stays high, engines wait "
        "for them.",
        "sparse_select_seconds": "Time of selections by the server, from request to answer.",
        "sparse_sequences": "Sequences that engines decode sparsely.",
        "sparse_sequence_blocks": "Blocks of those sequences.",
    },
}
"""In the order of an operator's questions."""
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
"""Labels of metrics that have labels. Metrics of `SPARSE_LAYER_HELP` have `layer`."""
LABEL_HELP: dict[str, str] = {
    "component": "a part of the server that is watched, or `tier NAME`; some 15",
    "device": "number of a GPU of the node",
    "direction": "`load` or `store`, from the engine's side",
    "layer": "number of a layer with sparse decode, at most 256",
    "method": "a way of copying: `memcpy`, `batch`, `kernel`, `staged`, or `pageable`",
    "outcome": "`done`, `cancelled` or `failed`",
    "protocol": "newest version of the wire that the server speaks",
    "python": "version of its interpreter",
    "reason": "of refusals, the wire's `Reason`; of misses, those of [savings.md](savings.md)",
    "tier": "`host`, `disk` or the name of a shared tier; of hits also `device`",
    "version": "version of hotkv",
}
"""The meaning of each label. Each has few values."""

SPARSE_LAYER_HELP: dict[str, str] = {
    "selects": "Selections, one for each sequence and step.",
    "context_blocks": "Blocks of the contexts that selections chose from.",
    "selected_blocks": "Blocks that selections chose.",
    "attended_blocks": "Blocks that were attended to. Divided by context_blocks it is the share of "
    "the context that sparse decode reads.",
    "seeded_blocks": "Blocks that hot sets began with.",
    "corrected_blocks": "Blocks that joined a hot set in the step that selected them.",
    "prefetched_blocks": "Blocks that joined a hot set a step after they were selected.",
    "wanted_blocks": "Selected blocks besides those that are always kept.",
    "hit_blocks": "Wanted blocks that the hot set had. Divided by wanted_blocks it is the hit "
    "ratio: if it falls, hot sets are too small.",
    "estimated_mass": "Sum over selections of the estimated share of attention mass.",
    "swap_bytes": "Bytes of pages of blocks that joined hot sets.",
    "select_s": "Seconds spent on selections.",
    "built_blocks": "Representations that engines built.",
    "build_s": "Seconds spent on building representations.",
    "recall_samples": "Selections that were measured against exact attention.",
    "recall": "Sum over samples of the share of the best blocks that was attended to. "
    "Divided by recall_samples it should be near 1.",
    "true_mass": "Sum over samples of the exact share of attention mass that was attended to.",
    "faults": "Faults of sparse attention; the call fell back to dense attention.",
    "loaded_blocks": "Representations that engines loaded.",
}
"""By name of `hotkv_proto.reports.SPARSE_COUNTERS`. Each is per layer, summed over all engines."""
