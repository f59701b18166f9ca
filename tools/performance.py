"""Writes docs/performance.md from the last recorded figures: `bench/records.json`, and
`bench/gpu/records.json`, which a person writes from a GPU machine's output.

`python -m tools.performance` writes it; `--check` fails if it is out of date.
"""

import argparse
import json
import sys
from pathlib import Path

from bench.gpu.figures import Figure
from bench.targets import Record, read_records, shown

PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance.md"
BUSY_LOAD = 1.0
"""Per core; above it, a machine is busy."""
HEAD = """# Measured against targets

`make bench` runs a short form of every benchmark that has a target, beside the last recorded
figures; `make bench BENCH=--record` writes `bench/records.json`. *busy*: missed while other work
used the cores. "a / b": a divided by b. `bench/NAME.py` describes each figure fully.
"""
MEANINGS = {
    "store_cpu_ms": "processor time to store 16 blocks, ms",
    "hit_256_cpu_ms": "processor time to lease, load and release 256 blocks, ms",
    "lane_hit_256": "lease, load and release of 256 blocks, lane / gRPC",
    "control_load_ms": "load of 256 MiB beyond a plain copy, stand-in device, ms",
    "control_store_ms": "store of 256 MiB beyond a plain copy, stand-in device, ms",
    "first_piece_us": "engine's call of a load to its first copy, us",
    "gb_per_cpu_s": "bytes per processor second, checksums of stores included, GB",
    "idle_core_share": "idle server, share of a core",
    "arena_loss_worst": "unusable share of the arena, worst mix of models",
    "prompt_1024_ms": "time of the core for 1,024 new blocks, ms",
    "bytes_per_block_10m": "index at ten million blocks, bytes per block",
    "cost_growth": "time per block, largest cache / smallest",
    "longest_hold_ms": "longest hold of the event loop, ms",
    "loop_ms": "status answer on the event loop, ms",
    "ready_s_1gib": "start until ready, 1 GiB, s",
    "ready_s_8gib": "start until ready, 8 GiB, s",
    "idle_rss_mb": "resident memory without the arena, MB",
    "import_s": "import of the client, s",
    "base_dependencies": "packages that `pip install hotkv` requires",
    "ready_s": "restart over a full arena until ready, s",
    "served_ratio": "share of blocks found after a kill",
    "p99_ratio": "latency, p99 at half load / idle median",
    "server_p99_ratio": "loop's delay, p99 at half load / idle median",
    "bystander_p99_ratio": "lookups of one quiet session, p99 at half load / idle median",
    "flood_ratio": "latency beside a flooding client / a busy process",
    "garbage_ratio": "latency beside garbage / a busy process",
    "deaf_ratio": "latency beside a client that reads no answers / a busy process",
    "disk_read_ratio": "reads, disk tier / fio",
    "disk_write_ratio": "writes, disk tier / fio",
    "disk_read_ratio_busy": "reads beside a busy loop, disk tier / fio",
    "disk_write_ratio_busy": "writes beside a busy loop, disk tier / fio",
    "restart_s": "restart with a full disk tier until ready, s",
    "compress_ratio": "bytes of a block / compressed",
    "compress_stored_ratio": "bytes of a block / compressed, on the disk",
    "compress_encode_gb_s": "compression by one thread, GB/s",
    "compress_decode_gb_s": "decompression by one thread, GB/s",
    "digest_s_per_gib": "digest of weights, s per GiB",
    "kept_over_named": "engine's start, digests kept / weights named",
    "unread_over_named": "engine's start, weights read / named",
    "warm_over_cold": "first token, hit in hotkv / computed",
    "warm_over_apc": "first token, hit in hotkv / in vLLM's cache",
    "hook_share": "callbacks / engine steps, for misses",
    "miss_overhead": "request that misses, with hotkv / without",
    "slow_over_plain": "requests beside a slow server / without hotkv",
    "valkey_over_compute": "first token from another node's Valkey / computed",
    "tokens_equal": "1 if all compared tokens are equal",
    "max_logprob_diff": "largest difference of logprobs",
    "preemptions": "preempted requests",
    "lost": "lost residencies",
    "context_over_pool": "longest context / size of the device's pool",
    "concurrency_gain": "requests at once, residency / vLLM alone",
    "throughput_gain": "tokens per second, residency / vLLM alone",
    "step_over_resident": "decode step, residency / sparse on the device",
    "step_over_dense_32k": "decode step at 32k, residency / dense",
    "prefill_overhead": "prefill, residency / dense on the device",
    "hit_bytes_share": "bytes loaded at a hit of 32k / its KV",
    "hit_representations_share": "sketches copied at a hit / its KV",
    "hit_first_token_share": "first token, hit / computed",
    "hit_over_connector": "first token, hit of 32k, residency / dense engine with hotkv",
    "representations_overhead": "building sketches / prefill",
    "representations_overhead_hit": "share of a hit's sketches built again",
    "auto_over_host": "tokens per second, residency auto / host",
    "auto_over_dense": "tokens per second, residency auto / vLLM alone",
    "auto_over_dense_roomy": "the same in a pool that holds all contexts",
    "worst_ratio": "KL of sparse decode, in vLLM / outside",
    "missed_count": "scorers that answer two prompts fewer than dense decode, or more",
    "own_equal": "1 if hits through HotKVConnector give the computed tokens",
    "door_equal": "1 if hits through both offloading connectors give the same tokens",
    "door_over_own": "first token, hit of 4k, offloading connector / HotKVConnector",
    "door_over_primary": ("first token, hit of 4k, offloading connector / vLLM's CPU tier"),
    "door_over_own_32k": "first token, hit of 32k, offloading connector / HotKVConnector",
    "door_over_primary_32k": ("first token, hit of 32k, offloading connector / vLLM's CPU tier"),
    "large_hotkv_over_vllm": ("chat turns per second, device for a third of the KV, hotkv / vLLM"),
    "large_hotkv_over_roomy": ("chat turns per second, hotkv on a small device / vLLM on a large"),
    "fits_hotkv_over_vllm": "chat turns per second, device for all KV, hotkv / vLLM",
    "first: store, runs of 64 KiB, of plain copy": "stores, runs of 64 KiB / plain copy",
    "first: load, runs of 64 KiB, of plain copy": "loads, runs of 64 KiB / plain copy",
    "first: both at once, runs of 64 KiB, of the sum of plain": (
        "both at once, runs of 64 KiB / sum of plain copies"
    ),
    "first: store, runs of 16 KiB, of plain copy": "stores, runs of 16 KiB / plain copy",
    "first: load, runs of 16 KiB, of plain copy": "loads, runs of 16 KiB / plain copy",
    "first: submission to first byte, 16 blocks, us": ("call to first copied byte, 16 blocks, µs"),
    "first: matrix products lose while loads run": "slowdown of matrix products beside loads",
    "sparse: score rot2u, of device copy": "scorer rot2u / a copy on the device",
    "sparse: build, of prefill": "building sketches / prefill",
    "sparse: selection step of 128k tokens, us a layer": (
        "selection in a context of 128k, µs per layer"
    ),
}
"""Of figures with a target. "a / b" is a ratio of two measurements."""
GPU_RECORDS = Path(__file__).resolve().parent.parent / "bench" / "gpu" / "records.json"
TABLE_HEAD = "| figure | measured | target |\n|---|---|---|"
GPU_HEAD = """
## On a GPU

No other process used the GPU. `bench/gpu/records.json` has all figures,
[cuda.md](cuda.md#measured-on-a-gpu) explains them. *stale*: not measured since the change named.
"""


def page(records: dict[str, Record]) -> str:
    machines = list(dict.fromkeys(one.machine for one in records.values()))
    parts = [HEAD, *(f"Machine: {one}.\n" for one in machines)]
    parts.append(TABLE_HEAD)
    for record in records.values():
        cores = int(record.machine.split()[0])
        missed = "busy" if record.load > BUSY_LOAD * cores else "missed"
        parts.append(head_row(record.command, record.date))
        parts += [
            row(name, shown(one.value), f"{compact(one.bound)}, {'met' if one.is_hit else missed}")
            for name, one in record.figures.items()
        ]
    return "\n".join([*parts, *gpu_part()]) + "\n"


def gpu_part() -> list[str]:
    records = json.loads(GPU_RECORDS.read_text())
    machines = dict.fromkeys(one["machine"] for one in records)
    parts = [GPU_HEAD, *(f"Machine: {one}.\n" for one in machines)]
    parts.append(TABLE_HEAD)
    for record in records:
        figures = [Figure(**one) for one in record["figures"] if one.get("target") is not None]
        if record["busy"] or not figures:
            continue
        gpu = record["machine"].split()[1].strip(",")
        commit = f"{record['date']}, {gpu}, commit {record['commit']}"
        parts.append(head_row(record["command"], commit))
        if since := record.get("since"):
            parts.append(f"| *stale: {since}* |")
        for figure in figures:
            bound = f"{'≤' if figure.at_most else '≥'}{figure.target:g}"
            hit = "met" if figure.met else "missed"
            parts.append(row(figure.name, shown(figure.measured), f"{bound}, {hit}"))
    return parts


def head_row(command: str, date: str) -> str:
    return f"| **`{command}`** {date} |"


def row(name: str, measured: str, target: str) -> str:
    return f"| {meaning(name)} | {measured} | {target} |"


def compact(bound: str) -> str:
    """Returns a bound of the records as the page shows it: `≤2` for `<= 2`."""
    return bound.replace("<= ", "≤").replace(">= ", "≥")


def meaning(name: str) -> str:
    """A name of several words is its own. Raises KeyError if MEANINGS lacks it."""
    is_key = " " not in name
    return f"{MEANINGS[name]} (`{name}`)" if is_key else MEANINGS.get(name, name)


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--check", action="store_true", help="only compare")
    made = page(read_records())
    if not flags.parse_args().check:
        PAGE.write_text(made)
        return 0
    if PAGE.exists() and PAGE.read_text() == made:
        return 0
    print(f"{PAGE.name} is out of date; run: python -m tools.performance", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
