"""The tests of each source file, for `tools.mutate`."""

CORE = (
    "tests/core/test_cache.py tests/core/test_space.py tests/core/test_slabs.py "
    "tests/core/test_cache_cases.py tests/core/test_inspect.py "
    "tests/core/test_shares_of_books.py tests/core/test_pins.py tests/core/test_tenants.py "
    "tests/core/test_verifier.py tests/core/test_checks.py tests/core/test_index.py "
    "tests/core/test_sketches.py tests/core/test_catalog.py tests/core/test_incremental.py "
    "tests/core/test_residencies.py tests/core/test_restore.py "
    "tests/core/test_reserve.py tests/core/test_starvation.py"
)
KERNELS = (
    "tests/core/test_index.py tests/core/test_slabs.py tests/core/test_chains.py "
    "tests/core/test_incremental.py tests/core/test_cache.py"
)
POLICY = (
    "tests/core/test_duel.py tests/core/test_hotness.py "
    "tests/core/test_chains.py tests/core/test_policy.py "
    "tests/simulate/test_replay.py tests/simulate/test_policies.py"
)
LOWER = (
    "tests/core/test_lower.py tests/core/test_place_sizes.py tests/tiers/test_runtime.py "
    "tests/server/test_tiers.py"
)
COPIES = (
    "tests/dataplane/test_streaming.py tests/dataplane/test_contract.py "
    "tests/core/test_checks.py tests/dataplane/test_machine.py"
)
CUDA = (
    "tests/dataplane/test_pieces.py tests/dataplane/test_calibration.py "
    "tests/dataplane/test_cuda.py tests/dataplane/test_gates.py "
    f"{COPIES}"
)
WIRE = (
    "tests/server/test_service.py tests/server/test_ranks.py "
    "tests/server/test_sketches.py tests/server/test_refusals.py "
    "tests/server/test_fence.py"
)
LIFE = "tests/server/test_service.py tests/server/test_life.py tests/server/test_transfers.py"
DOOR = (
    "tests/offloading/test_tier.py tests/offloading/test_machine.py "
    "tests/offloading/test_engines.py"
)
ENGINE = (
    "tests/vllm/test_traps.py tests/vllm/test_reports.py "
    "tests/vllm/test_callbacks.py tests/vllm/test_sleep.py "
    "tests/sparse/engines/test_exactness.py tests/vllm/test_multi_connector.py "
    "tests/vllm/test_ranks_together.py tests/vllm/test_setup.py tests/vllm/test_rekeying.py "
    "tests/vllm/test_revocations.py tests/vllm/test_diverging_hits.py tests/vllm/test_hybrid.py"
)
SEAMS = (
    "tests/vllm/test_seams.py tests/vllm/test_setup.py tests/vllm/test_traps.py "
    "tests/vllm/test_sleep.py tests/vllm/test_reset.py tests/vllm/test_events.py "
    "tests/vllm/test_hybrid.py"
)
REQUESTS = (
    "tests/vllm/test_hit_finder.py tests/vllm/test_store_planner.py "
    "tests/sparse/engines/test_resident_hits.py "
    f"tests/vllm/test_admission.py tests/vllm/test_scheduler_books.py {ENGINE}"
)
"""Tests of the connector's scheduler side, those without an engine first."""
RANK = f"tests/vllm/test_worker_stores.py tests/vllm/test_worker_loads.py {ENGINE}"
"""Tests of its worker side, those without an engine first."""
RESIDENTS = (
    "tests/sparse/engines/test_residents.py tests/sparse/engines/test_resident_manager.py "
    "tests/sparse/engines/test_resident_hits.py tests/sparse/engines/test_residency.py "
    "tests/sparse/engines/test_residency_faults.py"
)
TIERS = (
    "tests/tiers/test_runtime.py tests/tiers/test_shared_runtime.py "
    "tests/tiers/test_copies_again.py tests/tiers/test_moved_events.py "
    "tests/tiers/test_reads.py "
    "tests/server/test_tiers.py tests/server/test_shared_tiers.py"
)
"""Tests of tiers in the server, with tiers in memory."""
DISK = (
    "tests/tiers/test_slab_file.py tests/tiers/test_disk_tier.py tests/tiers/test_disk_encoded.py "
    "tests/tiers/test_disk_calls.py tests/tiers/test_disk_kernels.py"
)
S3 = (
    "tests/tiers/test_s3_words.py tests/tiers/test_s3_packs.py tests/tiers/test_s3_lister.py "
    "tests/tiers/test_s3_faults.py tests/tiers/test_s3_generations.py "
    "tests/tiers/test_remote_faults.py "
    "tests/tiers/test_s3_sharing.py"
)
VALKEY = (
    "tests/tiers/test_valkey_words.py tests/tiers/test_valkey_values.py "
    "tests/tiers/test_valkey_generations.py tests/tiers/test_remote_faults.py "
    "tests/tiers/test_valkey_contract.py "
    "tests/tiers/test_valkey_cluster.py"
)
CALLS = (
    "tests/wire/test_message_limits.py tests/wire/test_errors.py tests/server/test_in_place.py "
    f"{WIRE} tests/server/test_hostile.py tests/server/test_client_memory.py "
    "tests/server/test_security.py tests/server/test_life.py"
)
"""Tests of gRPC calls."""
NODE = (
    f"{LIFE} tests/server/test_ranks.py tests/server/test_restart.py tests/server/test_flush.py "
    "tests/server/test_health.py tests/server/test_audit.py"
)
TOLD = (
    "tests/server/test_metrics.py tests/server/test_page_access.py "
    "tests/server/test_status_page.py tests/server/test_timings.py "
    "tests/server/test_reports.py tests/server/test_health.py tests/server/test_command_line.py"
)
SPARSE_SERVER = (
    "tests/sparse/test_sequences.py tests/sparse/test_server_selection.py "
    "tests/server/test_refusals.py tests/server/test_sparse_service.py"
)
SPARSE_ENGINE = " ".join(
    f"tests/sparse/engines/test_{name}.py"
    for name in (
        *("sparse_parts", "sparse_worker", "sparse_memory", "sparse_pool", "callbacks_sparse"),
        *("sparse_first_prompt", "sparse_description", "sparse_settings"),
    )
)
RESIDENT_PARTS = "tests/sparse/engines/test_resident_parts.py"
CUDA_RESIDENCY = "tests/sparse/engines/test_cuda_residency.py"
TESTS: dict[str, str] = {
    "proto/hotkv_proto/order.py": "tests/core/test_order.py",
    "proto/hotkv_proto/table.py": "tests/wire/test_rereads.py tests/core/test_index.py",
    "proto/hotkv_proto/limits.py": "tests/core/test_filling.py",
    "proto/hotkv_proto/costs.py": "tests/wire/test_costs.py",
    "proto/hotkv_proto/layout.py": "tests/core/test_layout.py tests/dataplane/test_layouts.py",
    "proto/hotkv_proto/table_reading.py": (
        "tests/wire/test_rereads.py tests/dataplane/test_streaming.py tests/core/test_index.py "
        "tests/dataplane/test_layouts.py"
    ),
    "server/hotkv_server/cache/room/policies/": POLICY,
    "server/hotkv_server/ledger/book/outcome.py": (
        "tests/ledger/test_outcome.py tests/server/test_ledger.py"
    ),
    "server/hotkv_server/ledger/book/accounts.py": "tests/ledger/test_accounts.py",
    "server/hotkv_server/ledger/book/forecast.py": "tests/ledger/test_forecast.py",
    "server/hotkv_server/ledger/book/pack.py": "tests/ledger/test_pack.py",
    "server/hotkv_server/ledger/book/shadow.py": "tests/ledger/test_shadow.py",
    "proto/hotkv_proto/messages/report_messages.py": (
        "tests/wire/test_packing.py tests/server/test_reports.py"
    ),
    "client/hotkv_client/command/savings_tables.py": "tests/server/test_ledger.py",
    "server/hotkv_server/cache/room/shares.py": f"tests/core/test_shares_of_books.py {CORE}",
    "server/hotkv_server/cache/histogram.py": "tests/core/test_inspect.py",
    "server/hotkv_server/cache/leases/books.py": f"tests/core/test_chains.py {CORE}",
    "server/hotkv_server/cache/leases/leases.py": f"tests/core/test_lower.py {CORE}",
    "server/hotkv_server/cache/leases/retentions.py": (
        f"tests/core/test_pins.py tests/core/test_chains.py {CORE}"
    ),
    "server/hotkv_server/cache/table/table_kernels.py": KERNELS,
    "server/hotkv_server/cache/table/index.py": (
        f"tests/core/test_index.py tests/core/test_chains.py {CORE}"
    ),
    "server/hotkv_server/cache/room/slabs.py": (
        f"tests/core/test_slabs.py tests/core/test_residencies.py {CORE}"
    ),
    "server/hotkv_server/cache/room/removal.py": (
        f"tests/core/test_space.py tests/core/test_starvation.py {CORE}"
    ),
    "server/hotkv_server/monitoring/verdicts.py": "tests/server/test_verdicts.py",
    "server/hotkv_server/node/growth.py": "tests/server/test_filling.py",
    "server/hotkv_server/cache/room/removed.py": "tests/core/test_space.py",
    "server/hotkv_server/cache/room/reserve.py": "tests/core/test_reserve.py",
    "server/hotkv_server/cache/restore.py": f"tests/core/test_restore.py {CORE}",
    "server/hotkv_server/tiers/book/lower.py": LOWER,
    "server/hotkv_server/tiers/book/moves.py": LOWER,
    "server/hotkv_server/tiers/book/place_sizes.py": "tests/core/test_place_sizes.py",
    "server/hotkv_server/tiers/book/demotion.py": LOWER,
    "server/hotkv_server/tiers/book/promotion.py": LOWER,
    "server/hotkv_server/cache/": CORE,
    "sparse/hotkv_sparse/server/residency/book/": CORE,
    "server/hotkv_server/tiers/book/": f"{LOWER} {CORE}",
    "server/hotkv_server/dataplane/cuda/": CUDA,
    "server/hotkv_server/integrity/checksums.py": (
        f"tests/core/test_checks.py tests/core/test_verifier.py {CORE}"
    ),
    "server/hotkv_server/integrity/sum_kernels.py": "tests/core/test_checks.py",
    "server/hotkv_server/integrity/sums.py": (
        "tests/core/test_checks.py tests/dataplane/test_contract.py"
    ),
    "server/hotkv_server/integrity/": (
        f"tests/core/test_checks.py tests/core/test_verifier.py {CORE}"
    ),
    "server/hotkv_server/dataplane/host.py": f"tests/dataplane/test_fair_queue.py {COPIES}",
    "server/hotkv_server/dataplane/": (
        f"tests/dataplane/test_plans.py {COPIES} tests/dataplane/test_layouts.py "
        "tests/dataplane/test_gates.py tests/server/test_health.py"
    ),
    "server/hotkv_server/device/": (
        "tests/device/test_cupy_runtime.py tests/server/test_devices_order.py "
        "tests/server/test_devices_start.py tests/device/test_copy_kernel.py "
        "tests/server/test_devices.py tests/device/test_timed_gpu.py "
        "tests/device/test_virtual_memory.py"
    ),
    "server/hotkv_server/startup/": (
        "tests/server/test_places.py tests/server/test_start.py tests/server/test_devices_start.py "
        "tests/server/test_reload.py tests/server/test_restart.py tests/server/test_security.py"
    ),
    "server/hotkv_server/settings/": (
        "tests/server/test_identity.py tests/server/test_start.py tests/server/test_reload.py "
        "tests/deploy/test_configuration.py"
    ),
    "client/hotkv_client/fence.py": (
        "tests/server/test_fence.py tests/vllm/test_revocations.py tests/server/test_life.py"
    ),
    "client/hotkv_client/session.py": f"{LIFE} tests/vllm/test_device_order_server.py",
    "client/hotkv_client/connection.py": (f"tests/wire/test_connection.py {LIFE}"),
    "client/hotkv_client/life.py": (
        f"tests/wire/test_connection.py {LIFE} tests/server/test_security.py "
        "tests/vllm/test_life_cycle.py"
    ),
    "client/hotkv_client/link.py": (
        f"{LIFE} tests/server/test_arena.py tests/server/test_security.py"
    ),
    "client/hotkv_client/command/recorder.py": "tests/server/test_record.py",
    "client/hotkv_client/arena.py": "tests/server/test_arena.py",
    "client/hotkv_client/channels.py": (
        "tests/wire/test_channels.py tests/server/test_security.py"
    ),
    "client/hotkv_client/wire/admin.py": (
        "tests/wire/test_errors.py tests/server/test_record.py tests/server/test_health.py "
        "tests/server/test_flush.py"
    ),
    "client/hotkv_client/wire/sparse.py": (
        "tests/server/test_sparse_service.py tests/server/test_refusals.py"
    ),
    "client/hotkv_client/wire/answers.py": (
        f"tests/wire/test_packing.py tests/wire/test_outbox.py {WIRE} "
        "tests/wire/test_errors.py tests/wire/test_versions.py"
    ),
    "client/hotkv_client/wire/call_messages.py": (
        f"tests/wire/test_packing.py tests/wire/test_outbox.py {WIRE} "
        "tests/server/test_devices_order.py "
        "tests/server/test_security.py tests/server/test_events.py"
    ),
    "client/hotkv_client/parts.py": "tests/wire/test_packing.py tests/wire/test_connection.py",
    "client/hotkv_client/selects.py": "tests/server/test_sparse_service.py",
    "client/hotkv_client/": f"{WIRE} tests/server/test_life.py",
    "connector_vllm/hotkv_vllm/identity/adapters.py": (
        "tests/vllm/test_adapters_scheduler.py tests/vllm/test_adapters.py"
    ),
    "connector_vllm/hotkv_vllm/identity/adapter_watch.py": "tests/vllm/test_adapters.py",
    "connector_vllm/hotkv_vllm/worker/layout.py": (
        f"tests/vllm/test_folding.py tests/vllm/test_cuda_export.py {SEAMS}"
    ),
    "connector_vllm/hotkv_vllm/identity/ranks.py": (
        "tests/vllm/test_ranks.py tests/vllm/test_ranks_together.py"
    ),
    "connector_vllm/hotkv_vllm/identity/rekeying.py": "tests/vllm/test_rekeying.py",
    "connector_vllm/hotkv_vllm/worker/rank_session.py": (
        f"tests/vllm/test_rekeying.py {RANK} {ENGINE}"
    ),
    "connector_vllm/hotkv_vllm/compat/model_weights.py": (
        "tests/vllm/test_weights_files.py tests/vllm/test_file_digests.py "
        "tests/vllm/test_unread_weights.py tests/vllm/test_rekeying.py"
    ),
    "connector_vllm/hotkv_vllm/file_digests.py": "tests/vllm/test_file_digests.py",
    "connector_vllm/hotkv_vllm/compat/foreign_code.py": "tests/vllm/test_foreign_code.py",
    "connector_vllm/hotkv_vllm/identity/weights_watch.py": (
        "tests/vllm/test_weights_watch.py tests/vllm/test_rekeying.py"
    ),
    "connector_vllm/hotkv_vllm/compat/fingerprint.py": "tests/vllm/test_fingerprint.py",
    "connector_vllm/hotkv_vllm/compat/events.py": (
        "tests/vllm/test_events.py tests/offloading/test_tier.py"
    ),
    "connector_vllm/hotkv_vllm/compat/uses.py": "tests/vllm/test_versions.py",
    "connector_vllm/hotkv_vllm/versions.py": "tests/vllm/test_versions.py",
    "connector_vllm/hotkv_vllm/compat/kv_groups.py": f"tests/vllm/test_kv_groups.py {SEAMS}",
    "connector_vllm/hotkv_vllm/compat/steps.py": (
        f"tests/vllm/test_steps.py {SEAMS} tests/offloading/test_engines.py"
    ),
    "sparse/hotkv_sparse/vllm/attention_layers.py": (
        "tests/sparse/engines/test_sparse_layers.py tests/sparse/engines/test_sparse_parts.py "
        "tests/sparse/engines/test_cuda_residency.py"
    ),
    "connector_vllm/hotkv_vllm/compat/": f"tests/vllm/test_fingerprint.py {SEAMS}",
    "connector_vllm/hotkv_vllm/worker/device_order.py": (
        "tests/vllm/test_marks.py tests/vllm/test_device_order.py tests/vllm/test_cuda_export.py"
    ),
    "connector_vllm/hotkv_vllm/worker/rank_stores.py": RANK,
    "connector_vllm/hotkv_vllm/worker/rank_loads.py": f"{RANK} tests/vllm/test_stress.py",
    "connector_vllm/hotkv_vllm/worker/side.py": (
        f"tests/sparse/engines/test_callbacks_sparse.py {RANK}"
    ),
    "connector_vllm/hotkv_vllm/scheduler/": REQUESTS,
    "connector_vllm/hotkv_vllm/scheduler/find/prefill_wait.py": "tests/vllm/test_prefill_wait.py",
    "connector_vllm/hotkv_vllm/scheduler/reports.py": f"tests/vllm/test_ledger.py {REQUESTS}",
    "connector_vllm/hotkv_vllm/scheduler/reset.py": f"tests/vllm/test_reset.py {REQUESTS}",
    "connector_vllm/hotkv_vllm/scheduler/store/stores.py": f"tests/vllm/test_hybrid.py {REQUESTS}",
    "sparse/hotkv_sparse/vllm/scheduler/": RESIDENTS,
    "sparse/hotkv_sparse/vllm/block_manager.py": RESIDENTS,
    "sparse/hotkv_sparse/vllm/device_pool.py": RESIDENTS,
    "connector_vllm/hotkv_vllm/scheduler/sharing.py": (
        "tests/vllm/test_ranks.py tests/vllm/test_revocations.py tests/vllm/test_callbacks_hung.py "
        f"{ENGINE}"
    ),
    "connector_vllm/hotkv_vllm/identity/exactness.py": (
        f"tests/sparse/engines/test_exactness.py {ENGINE}"
    ),
    "connector_vllm/hotkv_vllm/metadata.py": f"tests/vllm/test_metadata.py {ENGINE}",
    "connector_vllm/hotkv_vllm/compat/checks.py": "tests/vllm/test_multi_connector.py",
    "connector_vllm/hotkv_vllm/scheduler/load/orders.py": (
        "tests/vllm/test_scheduler_books.py tests/vllm/test_multi_connector.py "
        f"tests/vllm/test_load_room.py tests/vllm/test_stress.py {ENGINE}"
    ),
    "connector_vllm/hotkv_vllm/scheduler/admission.py": f"tests/vllm/test_load_room.py {REQUESTS}",
    "connector_vllm/hotkv_vllm/scheduler/load/load_room.py": (
        f"tests/vllm/test_load_room.py tests/offloading/test_door_pairs.py {ENGINE}"
    ),
    "connector_vllm/hotkv_vllm/offloading/connector.py": (
        f"tests/offloading/test_door_pairs.py {DOOR}"
    ),
    "connector_vllm/hotkv_vllm/offloading/": DOOR,
    "connector_vllm/hotkv_vllm/offloading/promotions.py": (
        f"tests/offloading/test_requests.py {DOOR}"
    ),
    "connector_vllm/hotkv_vllm/offloading/scheduler.py": (
        f"tests/offloading/test_weights.py {DOOR}"
    ),
    "connector_vllm/hotkv_vllm/connector.py": f"tests/vllm/test_sides.py {ENGINE}",
    "connector_vllm/hotkv_vllm/": ENGINE,
    "server/hotkv_server/cache/inspect.py": (f"tests/core/test_inspect.py {CORE}"),
    "server/hotkv_server/cache/room/policies/shared.py": f"tests/core/test_lower.py {POLICY}",
    "server/hotkv_server/tiers/book/generations.py": "tests/core/test_generation_book.py",
    "server/hotkv_server/tiers/book/write_gate.py": "tests/core/test_write_gate.py",
    "server/hotkv_server/tiers/drive/records.py": (
        "tests/core/test_lower_memory.py tests/server/test_tiers.py"
    ),
    "server/hotkv_server/tiers/drive/reads.py": (
        "tests/tiers/test_reads.py tests/server/test_tiers.py"
    ),
    "server/hotkv_server/tiers/drive/breaker.py": (
        "tests/tiers/test_runtime.py tests/tiers/test_shared_runtime.py "
        "tests/server/test_hung_disk.py"
    ),
    "server/hotkv_server/tiers/drive/generation_notes.py": (
        "tests/tiers/test_generation_notes.py tests/tiers/test_copies_again.py"
    ),
    "server/hotkv_server/tiers/drive/": TIERS,
    "server/hotkv_server/tiers/disk/": DISK,
    "server/hotkv_server/tiers/s3/": S3,
    "server/hotkv_server/tiers/valkey/": f"tests/tiers/test_resp.py {VALKEY}",
    "server/hotkv_server/tiers/mooncake/": (
        "tests/tiers/test_mooncake_child.py tests/tiers/test_mooncake.py"
    ),
    "server/hotkv_server/tiers/remote/": (
        f"tests/tiers/test_remote_workers.py tests/tiers/test_resp.py {VALKEY} {S3} "
        "tests/tiers/test_encoding.py"
    ),
    "server/hotkv_server/tiers/compression/": (
        "tests/tiers/test_compression.py "
        "tests/tiers/test_encoding.py tests/tiers/test_disk_encoded.py"
    ),
    "server/hotkv_server/wire/session_stream.py": (
        f"tests/wire/test_outbox.py tests/wire/test_versions.py {CALLS}"
    ),
    "server/hotkv_server/wire/server.py": f"tests/server/test_reload.py {CALLS}",
    "server/hotkv_server/wire/guard/audit.py": f"tests/server/test_audit.py {CALLS}",
    "server/hotkv_server/wire/guard/peers.py": f"tests/server/test_identity.py {CALLS}",
    "server/hotkv_server/wire/admin_service.py": (
        "tests/server/test_explain.py tests/server/test_tiers.py tests/server/test_hostile.py "
        f"{CALLS}"
    ),
    "server/hotkv_server/wire/": CALLS,
    "server/hotkv_server/node/order.py": (
        "tests/server/test_devices_order.py tests/server/test_devices.py"
    ),
    "server/hotkv_server/node/live_session.py": (
        "tests/server/test_devices_order.py tests/server/test_fence.py "
        f"tests/server/test_refusals.py {NODE}"
    ),
    "server/hotkv_server/node/broadcast.py": "tests/core/test_broadcast.py",
    "server/hotkv_server/node/capability.py": f"tests/server/test_refusals.py {NODE}",
    "server/hotkv_server/node/event_loop.py": (
        f"tests/server/test_slices.py tests/server/test_timings.py {NODE}"
    ),
    "server/hotkv_server/node/in_place.py": "tests/server/test_in_place.py",
    "server/hotkv_server/node/names.py": "tests/server/test_names.py",
    "server/hotkv_server/node/removals.py": f"tests/server/test_slices.py {NODE}",
    "server/hotkv_server/node/reports.py": f"tests/server/test_reports.py {CALLS}",
    "server/hotkv_server/node/sessions.py": (
        "tests/server/test_in_place.py tests/server/test_devices_order.py "
        "tests/server/test_openings.py "
        f"tests/server/test_refusals.py tests/server/test_sparse_service.py {NODE}"
    ),
    "server/hotkv_server/node/survey.py": "tests/server/test_status_page.py",
    "server/hotkv_server/node/transfers.py": (
        f"tests/server/test_fence.py tests/server/test_timings.py {NODE}"
    ),
    "server/hotkv_server/node/": NODE,
    "server/hotkv_server/monitoring/http_endpoint.py": f"{TOLD} tests/server/test_hostile.py",
    "server/hotkv_server/monitoring/pages/": f"{TOLD} tests/server/test_questions.py",
    "server/hotkv_server/monitoring/metrics.py": f"{TOLD} tests/server/test_devices.py",
    "server/hotkv_server/monitoring/": TOLD,
    "server/hotkv_server/memory/": (
        "tests/core/test_memory.py tests/core/test_filling.py "
        "tests/core/test_numa.py tests/server/test_arenas.py "
        "tests/server/test_restart.py"
    ),
    "sparse/hotkv_sparse/server/residency/": (
        "tests/server/test_in_place.py tests/server/test_residencies.py "
        "tests/server/test_refusals.py"
    ),
    "server/hotkv_server/hints/book": f"tests/core/test_hint_book.py {POLICY}",
    "server/hotkv_server/hints/book/actions.py": (
        "tests/core/test_chains.py tests/server/test_hint_turns.py tests/server/test_hints.py"
    ),
    "server/hotkv_server/hints/": (
        "tests/core/test_hint_parsing.py tests/server/test_hint_turns.py tests/server/test_hints.py"
    ),
    "server/hotkv_server/ledger/": (
        "tests/ledger/test_history.py tests/server/test_status_page.py "
        "tests/server/test_live_ledger.py tests/server/test_ledger.py"
    ),
    "server/hotkv_server/events/contents.py": (
        "tests/server/test_event_contents.py tests/server/test_tier_events.py"
    ),
    "server/hotkv_server/events/questions.py": "tests/server/test_questions.py",
    "server/hotkv_server/events/service.py": (
        "tests/server/test_event_contents.py tests/server/test_tier_events.py "
        "tests/server/test_events.py tests/server/test_questions.py "
        "tests/vllm/test_shared_events.py"
    ),
    "server/hotkv_server/events/capability.py": (
        "tests/server/test_start.py tests/server/test_events.py tests/server/test_questions.py "
        "tests/server/test_openings.py"
    ),
    "server/hotkv_server/events/": (
        "tests/server/test_event_contents.py tests/server/test_questions.py "
        "tests/server/test_publisher.py tests/server/test_slices.py "
        "tests/tiers/test_moved_events.py tests/server/test_events.py "
        "tests/server/test_openings.py tests/server/test_tier_events.py"
    ),
    "server/hotkv_server/tracing/": "tests/server/test_tracing.py",
    "server/hotkv_server/warm_start/": "tests/server/test_warm_start.py",
    "server/hotkv_server/proof/": "tests/core/test_proof_book.py tests/server/test_proof.py",
    "server/hotkv_server/slow/": "tests/core/test_slow_book.py tests/server/test_slow.py",
    "sparse/hotkv_sparse/server/select/": SPARSE_SERVER,
    "server/hotkv_server/security/": (
        "tests/server/test_identity.py tests/server/test_page_access.py "
        "tests/server/test_security.py tests/server/test_audit.py"
    ),
    "client/hotkv_client/command/top/": (
        "tests/server/test_top.py tests/server/test_command_line.py"
    ),
    "client/hotkv_client/command/doctor.py": "tests/server/test_doctor.py",
    "client/hotkv_client/command/host_bench.py": (
        "tests/server/test_host_bench.py tests/server/test_command_line.py"
    ),
    "client/hotkv_client/command/": (
        "tests/server/test_command_line.py tests/server/test_commands.py "
        "tests/server/test_named_blocks.py tests/server/test_ledger.py"
    ),
    "client/hotkv_client/hints.py": ("tests/server/test_hints.py tests/server/test_security.py"),
    "connector_vllm/hotkv_vllm/config.py": "tests/vllm/test_setup.py",
    "connector_vllm/hotkv_vllm/companion.py": "tests/vllm/test_setup.py",
    "sparse/hotkv_sparse/vllm/settings.py": (
        "tests/sparse/engines/test_sparse_settings.py "
        "tests/sparse/engines/test_sparse_description.py "
        f"tests/sparse/engines/test_resident_manager.py {CUDA_RESIDENCY}"
    ),
    "connector_vllm/hotkv_vllm/scheduler/find/load_choice.py": (
        "tests/vllm/test_load_choice.py tests/vllm/test_scheduler_books.py"
    ),
    "connector_vllm/hotkv_vllm/costs/": (
        "tests/vllm/test_load_choice.py tests/vllm/test_prefill_speed.py "
        "tests/vllm/test_scheduler_books.py"
    ),
    "connector_vllm/hotkv_vllm/hints/": (
        f"tests/vllm/test_reports.py tests/vllm/test_hints.py {ENGINE}"
    ),
    "connector_vllm/hotkv_vllm/tracing/": "tests/vllm/test_tracing.py",
    "sparse/hotkv_sparse/vllm/": SPARSE_ENGINE,
    "sparse/hotkv_sparse/vllm/cpu/resident_pages.py": (
        f"{RESIDENT_PARTS} tests/sparse/engines/test_staging.py "
        "tests/sparse/engines/test_residency.py"
    ),
    "sparse/hotkv_sparse/vllm/cpu/swap.py": (
        f"{RESIDENT_PARTS} tests/sparse/engines/test_sparse_offloading.py"
    ),
    "sparse/hotkv_sparse/vllm/host_blocks.py": "tests/sparse/engines/test_sparse_offloading.py",
    "sparse/hotkv_sparse/vllm/offloading.py": "tests/sparse/engines/test_sparse_offloading.py",
    "sparse/hotkv_sparse/vllm/cpu/resident_worker.py": (
        f"{RESIDENT_PARTS} {RESIDENTS} tests/sparse/engines/test_residency_callbacks.py"
    ),
    "sparse/hotkv_sparse/vllm/cpu/resident_sequences.py": RESIDENT_PARTS,
    "sparse/hotkv_sparse/vllm/worker/resident_book.py": f"{RESIDENT_PARTS} {CUDA_RESIDENCY}",
    "sparse/hotkv_sparse/vllm/cuda/": f"{RESIDENT_PARTS} {RESIDENTS} {CUDA_RESIDENCY}",
    "connector_vllm/hotkv_vllm/scheduler/side.py": (
        f"tests/vllm/test_reset.py tests/vllm/test_adapters.py tests/vllm/test_seams.py {REQUESTS}"
    ),
    "sparse/hotkv_sparse/cuda/": (
        "tests/sparse/test_cuda_arena.py tests/sparse/test_cuda_choice.py "
        "tests/sparse/test_cuda_index.py tests/sparse/engines/test_cuda_residency.py"
    ),
    "sparse/hotkv_sparse/": (
        "tests/sparse/test_scores.py tests/sparse/test_selection.py tests/sparse/test_selector.py "
        "tests/sparse/test_decode.py "
        "tests/sparse/test_hotset.py tests/sparse/test_axes.py tests/sparse/test_centre.py "
        "tests/sparse/test_centre_file.py tests/sparse/test_config.py "
        "tests/sparse/test_sketches.py"
    ),
}
"""By beginning of the path (the longest counts), fast tests first."""
