"""How many small faults the tests see: changes the sources one place at a time, and runs the tests
that belong to the file.

    python -m tools.mutate --minutes 30            # a sample by chance; --seed repeats it
    python -m tools.mutate --only proto/hotkv_proto/order.py --number 999

Always true: a mutant lives in a copy of the tree, never in the checkout; each worker has a copy of
its own. A mutant is killed when a test fails that passes without it, or its tests do not end. One
that lives is a survivor, unless `mutate_equivalents.txt` lists it with the reason why no test could
see it. The score is killed / (mutants that ran - equivalent ones).
"""

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from demo.processes import ends_cleanly
from tools.mutate_worker import Worker, share_out
from tools.mutations import Mutant, mutants_of

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENTS = Path(__file__).with_name("mutate_equivalents.txt")
MIN_SCORE = 0.95

CORE = (
    "tests/core/test_cache_cases.py tests/core/test_ids.py tests/core/test_unadmitted.py "
    "tests/core/test_flush.py tests/core/test_inspect.py tests/core/test_ages.py "
    "tests/core/test_shares_of_books.py tests/core/test_pins.py tests/core/test_tenants.py "
    "tests/core/test_verifier.py "
    "tests/core/test_starvation.py tests/core/test_index.py tests/core/test_space.py "
    "tests/core/test_slabs.py tests/core/test_restore.py "
    "tests/core/test_representations.py tests/core/test_cache.py tests/core/test_catalog.py "
    "tests/core/test_incremental.py tests/core/test_counters.py tests/core/test_arrays.py "
    "tests/core/test_residencies.py tests/core/test_sums.py"
)
KERNELS = (
    "tests/core/test_index.py tests/core/test_slabs.py tests/core/test_chains.py "
    "tests/core/test_cache.py"
)
POLICY = (
    "tests/core/test_ghosts.py tests/core/test_duel.py tests/core/test_hotness.py "
    "tests/core/test_chains.py tests/core/test_policy.py "
    "tests/core/test_retention.py tests/simulate/test_policies.py"
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
    "tests/server/test_representations.py tests/server/test_refusals.py "
    "tests/server/test_links.py tests/server/test_odd_messages.py"
)
LIFE = (
    "tests/server/test_settling.py tests/server/test_service.py tests/server/test_life.py "
    "tests/server/test_transfers.py"
)
ENGINE = (
    "tests/vllm/test_traps.py tests/vllm/test_traps_transfers.py tests/vllm/test_reports.py "
    "tests/vllm/test_scenarios.py "
    "tests/vllm/test_hooks.py tests/vllm/test_sleep.py "
    "tests/vllm/test_exactness.py tests/vllm/test_multi_connector.py "
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
    "tests/vllm/test_stores_in_flight.py tests/vllm/test_admission.py "
    f"tests/vllm/test_load_books.py tests/vllm/test_scheduler_books.py {ENGINE}"
)
"""Parts of the scheduler side without an engine, then with one."""
RANK = (
    "tests/vllm/test_worker_stores.py tests/vllm/test_worker_loads.py "
    f"tests/vllm/test_worker_side.py {ENGINE}"
)
"""The same of the worker side."""
RESIDENTS = (
    "tests/vllm/test_residencies_books.py tests/vllm/test_resident_manager.py "
    "tests/vllm/test_resident_hits.py tests/vllm/test_residency.py "
    "tests/vllm/test_residency_faults.py"
)
TESTS: dict[str, str] = {
    "proto/hotkv_proto/order.py": "tests/core/test_order.py",
    "proto/hotkv_proto/table.py": "tests/wire/test_rereads.py tests/core/test_index.py",
    "proto/hotkv_proto/layout.py": "tests/core/test_layout.py tests/core/test_layout_copies.py",
    "proto/hotkv_proto/kernels.py": (
        "tests/wire/test_rereads.py tests/dataplane/test_streaming.py tests/core/test_index.py"
    ),
    "server/hotkv_server/cache/room/policies/": POLICY,
    "server/hotkv_server/ledger/book/outcome.py": "tests/server/test_ledger.py",
    "server/hotkv_server/ledger/book/accounts.py": "tests/ledger/test_accounts.py",
    "server/hotkv_server/ledger/book/forecast.py": "tests/ledger/test_forecast.py",
    "server/hotkv_server/ledger/book/pack.py": "tests/ledger/test_pack.py",
    "server/hotkv_server/ledger/book/shadow.py": "tests/ledger/test_shadow.py",
    "proto/hotkv_proto/messages/session.py": (
        "tests/wire/test_packing.py tests/server/test_reports.py"
    ),
    "client/hotkv_client/command/savings_tables.py": "tests/server/test_ledger.py",
    "server/hotkv_server/cache/room/shares.py": "tests/core/test_bounds.py",
    "server/hotkv_server/cache/histogram.py": "tests/core/test_histogram.py",
    "server/hotkv_server/cache/leases/retentions.py": (
        f"tests/core/test_pins.py tests/core/test_retention.py {CORE}"
    ),
    "server/hotkv_server/cache/table/kernels.py": KERNELS,
    "server/hotkv_server/cache/table/index.py": f"tests/core/test_index.py {CORE}",
    "server/hotkv_server/cache/room/slabs.py": f"tests/core/test_slabs.py {CORE}",
    "server/hotkv_server/cache/restore.py": f"tests/core/test_restore.py {CORE}",
    "server/hotkv_server/tiers/book/lower.py": LOWER,
    "server/hotkv_server/tiers/book/moves.py": LOWER,
    "server/hotkv_server/tiers/book/place_sizes.py": "tests/core/test_place_sizes.py",
    "server/hotkv_server/tiers/book/demotion.py": LOWER,
    "server/hotkv_server/tiers/book/promotion.py": LOWER,
    "server/hotkv_server/cache/": CORE,
    "server/hotkv_server/residency/book/": CORE,
    "server/hotkv_server/tiers/book/": CORE,
    "server/hotkv_server/dataplane/cuda/": CUDA,
    "server/hotkv_server/integrity/check_values.py": (
        f"tests/core/test_checks.py tests/core/test_verifier.py {CORE}"
    ),
    "server/hotkv_server/integrity/kernels.py": "tests/core/test_checks.py",
    "server/hotkv_server/integrity/sums.py": (
        "tests/core/test_checks.py tests/core/test_sums.py tests/dataplane/test_contract.py"
    ),
    "server/hotkv_server/integrity/": (
        f"tests/core/test_checks.py tests/core/test_verifier.py {CORE}"
    ),
    "server/hotkv_server/dataplane/host.py": f"tests/dataplane/test_fair_queue.py {COPIES}",
    "server/hotkv_server/dataplane/": (
        f"tests/dataplane/test_plans.py {COPIES} tests/dataplane/test_layouts.py "
        "tests/dataplane/test_gates.py tests/server/test_health.py"
    ),
    "client/hotkv_client/fence.py": (
        "tests/server/test_fence.py tests/vllm/test_revocations.py tests/server/test_life.py"
    ),
    "client/hotkv_client/session.py": LIFE,
    "client/hotkv_client/connection.py": LIFE,
    "client/hotkv_client/life.py": LIFE,
    "client/hotkv_client/link.py": (
        f"{LIFE} tests/server/test_arena.py tests/server/test_security.py"
    ),
    "client/hotkv_client/command/recorder.py": (
        "tests/wire/test_trace_lines.py tests/server/test_record.py"
    ),
    "client/hotkv_client/arena.py": "tests/server/test_arena.py",
    "client/hotkv_client/channels.py": (
        "tests/wire/test_channels.py tests/server/test_tcp.py tests/server/test_security.py"
    ),
    "client/hotkv_client/wire/admin.py": (
        "tests/server/test_record.py tests/server/test_health.py tests/server/test_flush.py"
    ),
    "client/hotkv_client/wire/sparse.py": (
        "tests/server/test_sparse_service.py tests/server/test_sparse_refusals.py"
    ),
    "client/hotkv_client/wire/answers.py": (
        f"tests/wire/test_packing.py {WIRE} tests/wire/test_errors.py tests/wire/test_versions.py"
    ),
    "client/hotkv_client/wire/requests.py": (
        f"tests/wire/test_packing.py {WIRE} tests/server/test_order_wire.py "
        "tests/server/test_tcp.py tests/server/test_events.py"
    ),
    "client/hotkv_client/": f"{WIRE} tests/server/test_life.py",
    "connector_vllm/hotkv_vllm/identity/adapters.py": (
        "tests/vllm/test_adapters_scheduler.py tests/vllm/test_adapters.py"
    ),
    "connector_vllm/hotkv_vllm/identity/adapter_watch.py": "tests/vllm/test_adapters.py",
    "connector_vllm/hotkv_vllm/worker/layout.py": (
        f"tests/vllm/test_folding.py tests/vllm/test_cuda_export.py {SEAMS} "
        "tests/vllm/test_sparse_parts.py"
    ),
    "connector_vllm/hotkv_vllm/identity/ranks.py": (
        "tests/vllm/test_ranks.py tests/vllm/test_ranks_together.py"
    ),
    "connector_vllm/hotkv_vllm/identity/rekeying.py": "tests/vllm/test_rekeying.py",
    "connector_vllm/hotkv_vllm/worker/session.py": (f"tests/vllm/test_rekeying.py {RANK} {ENGINE}"),
    "connector_vllm/hotkv_vllm/compat/model_weights.py": (
        "tests/vllm/test_weights_files.py tests/vllm/test_rekeying.py"
    ),
    "connector_vllm/hotkv_vllm/identity/weights_watch.py": (
        "tests/vllm/test_weights_watch.py tests/vllm/test_rekeying.py"
    ),
    "connector_vllm/hotkv_vllm/compat/fingerprint.py": "tests/vllm/test_fingerprint.py",
    "connector_vllm/hotkv_vllm/compat/kv_groups.py": f"tests/vllm/test_kv_groups.py {SEAMS}",
    "connector_vllm/hotkv_vllm/compat/steps.py": f"tests/vllm/test_steps.py {SEAMS}",
    "connector_vllm/hotkv_vllm/compat/sparse_layers.py": (
        "tests/vllm/test_sparse_layers.py tests/vllm/test_sparse_parts.py "
        "tests/vllm/test_cuda_residency.py"
    ),
    "connector_vllm/hotkv_vllm/compat/": f"tests/vllm/test_fingerprint.py {SEAMS}",
    "connector_vllm/hotkv_vllm/worker/device_order.py": (
        "tests/vllm/test_marks.py tests/vllm/test_device_order.py"
    ),
    "connector_vllm/hotkv_vllm/worker/rank_stores.py": RANK,
    "connector_vllm/hotkv_vllm/worker/rank_loads.py": RANK,
    "connector_vllm/hotkv_vllm/worker/side.py": RANK,
    "connector_vllm/hotkv_vllm/scheduler/": REQUESTS,
    "connector_vllm/hotkv_vllm/scheduler/reset.py": f"tests/vllm/test_reset.py {REQUESTS}",
    "connector_vllm/hotkv_vllm/scheduler/stores.py": f"tests/vllm/test_hybrid.py {REQUESTS}",
    "connector_vllm/hotkv_vllm/residency/resident_requests.py": RESIDENTS,
    "connector_vllm/hotkv_vllm/residency/resident.py": RESIDENTS,
    "connector_vllm/hotkv_vllm/residency/side.py": RESIDENTS,
    "connector_vllm/hotkv_vllm/residency/calls.py": RESIDENTS,
    "connector_vllm/hotkv_vllm/compat/residency.py": RESIDENTS,
    "connector_vllm/hotkv_vllm/scheduler/sharing.py": (
        f"tests/vllm/test_ranks.py tests/vllm/test_revocations.py {ENGINE}"
    ),
    "connector_vllm/hotkv_vllm/identity/exactness.py": f"tests/vllm/test_exactness.py {ENGINE}",
    "connector_vllm/hotkv_vllm/metadata.py": f"tests/vllm/test_metadata.py {ENGINE}",
    "connector_vllm/hotkv_vllm/compat/checks.py": "tests/vllm/test_multi_connector.py",
    "connector_vllm/hotkv_vllm/scheduler/loads.py": (
        "tests/vllm/test_load_books.py tests/vllm/test_multi_connector.py"
    ),
    "connector_vllm/hotkv_vllm/connector.py": f"tests/vllm/test_sides.py {ENGINE}",
    "connector_vllm/hotkv_vllm/": ENGINE,
}
"""The tests of a file: those of the longest entry that its path begins with, quick ones first."""
LEFT_OUT = (
    "client/hotkv_client/command/cli.py",
    "client/hotkv_client/command/tables.py",
    "client/hotkv_client/__init__.py",
    "connector_vllm/hotkv_vllm/sparse/",
    "client/hotkv_client/testing/",
)
"""Output that people read, code that is not of the product, and folders whose tests would take too
long."""


@dataclass(slots=True)
class Tally:
    """Results of the mutants that ran. Shared by the workers, under `lock`."""

    killed: list[Mutant] = field(default_factory=list)
    survivors: list[Mutant] = field(default_factory=list)
    equivalent: list[Mutant] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def score(self) -> float:
        """Of mutants that are not known to be equivalent; 1 if none ran."""
        counted = len(self.killed) + len(self.survivors)
        return len(self.killed) / counted if counted else 1.0


def tests_of(path: str) -> list[str]:
    """Test files of a source file."""
    entry = max((prefix for prefix in TESTS if path.startswith(prefix)), key=len)
    return list(dict.fromkeys(TESTS[entry].split()))


def sources(only: Sequence[str]) -> list[str]:
    """Files to change, by name."""
    found = {
        str(path.relative_to(ROOT))
        for prefix in TESTS
        for path in [*(ROOT / prefix).parent.rglob("*.py")]
        if str(path.relative_to(ROOT)).startswith(prefix)
    }
    wanted = [path for path in sorted(found) if not path.startswith(LEFT_OUT)]
    return (
        [path for path in wanted if any(path.startswith(prefix) for prefix in only)]
        if only
        else wanted
    )


def equivalents() -> set[str]:
    """The names in `mutate_equivalents.txt`."""
    lines = EQUIVALENTS.read_text().splitlines()
    return {line.strip() for line in lines if line.strip() and not line.startswith("#")}


def stale_entries() -> list[str]:
    """Returns what the tables name and the tree has not: mutants, sources and test files."""
    paths, known = sources(()), equivalents()
    files = {name.partition(":")[0] for name in known}
    mutants = {
        m.name for path in files & set(paths) for m in mutants_of(path, (ROOT / path).read_bytes())
    }
    found = [f"{EQUIVALENTS.name}: no such mutant: {name}" for name in known - mutants]
    for prefix, tests in TESTS.items():
        if not any(path.startswith(prefix) for path in paths):
            found.append(f"TESTS: no such source: {prefix}")
        found += [
            f"TESTS: no such test: {test}" for test in tests.split() if not (ROOT / test).is_file()
        ]
    return sorted(set(found))


def main() -> int:
    """Runs mutants, prints the survivors and the score. Returns 1 if the score is too low."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=30, help="begins no mutant after that")
    parser.add_argument("--number", type=int, default=100_000, help="at most so many mutants")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1, help="chooses the mutants, and their order")
    parser.add_argument(
        "--only", nargs="*", default=[], help="files or folders, as the table TESTS names them"
    )
    parser.add_argument("--match", default="", help="only mutants whose name has this text")
    parser.add_argument("--check", action="store_true", help="only look for stale table entries")
    flags = parser.parse_args()
    if flags.check:
        stale = stale_entries()
        print("\n".join(stale) or "mutate: the tables fit the tree")
        return int(bool(stale))
    began_s = time.monotonic()
    mutants = [
        m
        for path in sources(flags.only)
        for m in mutants_of(path, (ROOT / path).read_bytes())
        if flags.match in m.name
    ]
    random.Random(flags.seed).shuffle(mutants)
    num_all, mutants = len(mutants), mutants[: flags.number]
    hopeless = equivalents()
    tally = Tally()
    with (
        ends_cleanly(),
        tempfile.TemporaryDirectory(prefix="hotkv-mutate-", ignore_cleanup_errors=True) as folder,
    ):
        workers = [Worker(Path(folder) / str(number)) for number in range(flags.jobs)]
        sound: set[str] = set()
        print(f"{num_all} mutants to choose from", flush=True)

        def run(worker: Worker, job: Mutant) -> None:
            if job.name in hopeless:
                with tally.lock:
                    tally.equivalent.append(job)
                return
            seen_by = worker.seen_by(job, tests_of(job.path), sound)
            with tally.lock:
                (tally.killed if seen_by else tally.survivors).append(job)
            print(
                f"{'killed' if seen_by else 'LIVES '} {job.path}:{job.line} {job.function}: "
                f"{job.change}  {seen_by}",
                flush=True,
            )

        share_out(workers, mutants, run, began_s + 60 * flags.minutes)
    for mutant in sorted(tally.survivors, key=lambda m: (m.path, m.line)):
        print(f"survivor {mutant.path}:{mutant.line} {mutant.function}: {mutant.change}")
    counts = (
        f"{len(tally.killed)} killed, {len(tally.survivors)} survived, "
        f"{len(tally.equivalent)} known to be equivalent"
    )
    print(
        f"score {tally.score:.1%}: {counts}; seed {flags.seed}, "
        f"{(time.monotonic() - began_s) / 60:.0f} minutes"
    )
    return int(tally.score < MIN_SCORE)


if __name__ == "__main__":
    sys.exit(main())
