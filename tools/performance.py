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

`make bench` runs a short form of every benchmark that has a target. It prints hit or miss, beside
the last recorded figures. `make bench BENCH=--record` writes its figures to `bench/records.json`.
*busy* means that the figure missed its target while other work used the processor cores. "a / b"
means a divided by b. `bench/NAME.py` describes each figure fully.
"""
MEANINGS = {
    "store_cpu_ms": "processor time of a store of 16 blocks, ms",
    "hit_256_cpu_ms": "processor time to lease, load and release 256 blocks, ms",
    "idle_core_share": "processor time of an idle server, share of a core",
    "arena_loss_worst": "share of the arena that no block can use, for the worst mix of models",
    "prompt_1024_ms": "time of the cache's core for a prompt of 1,024 new blocks, ms",
    "bytes_per_block_10m": "memory of the index per block at ten million blocks, bytes",
    "cost_growth": "time per block in the largest cache / in the smallest",
    "longest_hold_ms": "longest time for which an operation blocks the event loop, ms",
    "loop_ms": "time of a status answer on the event loop, ms",
    "ready_s_1gib": "time from start until ready, arena of 1 GiB, s",
    "ready_s_8gib": "time from start until ready, arena of 8 GiB, s",
    "idle_rss_mb": "resident memory without the arena, MB",
    "import_s": "time to import the client, s",
    "base_dependencies": "packages that `pip install hotkv` requires",
    "ready_s": "time from a restart over a full arena until ready, s",
    "served_ratio": "share of the stored blocks found after kill and restart",
    "p99_ratio": "99th percentile of latency at half load / median when idle",
    "server_p99_ratio": "99th percentile of the event loop's delay at half load / median when idle",
    "flood_ratio": "latency while a client floods the server / while another process is busy",
    "garbage_ratio": "latency while a client sends garbage / while another process is busy",
    "deaf_ratio": "latency while a client reads no answers / while another process is busy",
    "disk_read_ratio": "speed of reads, disk tier / fio",
    "disk_write_ratio": "speed of writes, disk tier / fio",
    "disk_read_ratio_busy": "speed of reads beside a busy event loop, disk tier / fio",
    "disk_write_ratio_busy": "speed of writes beside a busy event loop, disk tier / fio",
    "restart_s": "restart with a full disk tier until ready, s",
    "compress_ratio": "bytes of a block / bytes of its compressed form",
    "compress_stored_ratio": "bytes of a block / bytes that its compressed form takes on the disk",
    "compress_encode_gb_s": "compression by one thread, GB/s",
    "compress_decode_gb_s": "decompression by one thread, GB/s",
    "digest_s_per_gib": "time to compute the digest of a GiB of weights, s",
    "kept_over_named": "an engine's start, digests kept / weights named by the user",
    "unread_over_named": "an engine's start, all weights read / weights named by the user",
    "warm_over_cold": "time to first token, hit in hotkv / computed",
    "warm_over_apc": "time to first token, hit in hotkv / in vLLM's own cache",
    "hook_share": "time in the connector's callbacks / time of engine steps, for misses",
    "miss_overhead": "time of a request that misses, with hotkv / without",
    "slow_over_plain": "seconds of requests beside a slow server / without hotkv",
    "valkey_over_compute": "first token from another node's Valkey / computed",
    "tokens_equal": "1 if all compared tokens are equal",
    "max_logprob_diff": "largest difference of logprobs",
    "preemptions": "preempted requests",
    "lost": "residencies (contexts in host memory) that were lost",
    "context_over_pool": "longest context / size of the device's pool",
    "concurrency_gain": "number of requests at once, residency / vLLM alone",
    "throughput_gain": "tokens per second, residency / vLLM alone",
    "step_over_resident": "time of a decode step, residency / sparse decode wholly on the device",
    "step_over_dense_32k": "time of a decode step at 32k, residency / dense decode",
    "prefill_overhead": "time of prefill, residency / dense, wholly on the device",
    "hit_bytes_share": "bytes loaded at a hit of 32k / all its KV",
    "hit_representations_share": "bytes of sketches copied at a hit / all its KV",
    "hit_first_token_share": "time to first token, hit / computed",
    "representations_overhead": "time to build sketches / prefill",
    "representations_overhead_hit": "share of a hit's sketches built again",
    "auto_over_host": "tokens per second, contexts moved under pressure / always in host memory",
    "auto_over_dense": "tokens per second, contexts moved under pressure / vLLM alone",
    "worst_ratio": "error (KL) of sparse decode, in vLLM / outside vLLM",
    "missed_count": "scorers that answer two prompts fewer than dense decode, or more",
    "own_equal": "1 if hits through HotKVConnector give the computed tokens",
    "door_equal": "1 if hits through both offloading connectors give the same tokens",
    "door_over_own": "time to first token, hit of 4k, offloading connector / HotKVConnector",
    "door_over_primary": (
        "time to first token, hit of 4k, offloading connector / vLLM's host memory"
    ),
    "door_over_own_32k": "time to first token, hit of 32k, offloading connector / HotKVConnector",
    "door_over_primary_32k": (
        "time to first token, hit of 32k, offloading connector / vLLM's host memory"
    ),
    "large_hotkv_over_vllm": (
        "chat turns per second if the device holds a third of the KV, hotkv / vLLM"
    ),
    "large_hotkv_over_roomy": (
        "chat turns per second, hotkv on a small device / vLLM on a large device"
    ),
    "fits_hotkv_over_vllm": "chat turns per second if the device holds all KV, hotkv / vLLM",
    "first: store, runs of 64 KiB, of plain copy": "speed of stores, runs of 64 KiB / a plain copy",
    "first: load, runs of 64 KiB, of plain copy": "speed of loads, runs of 64 KiB / a plain copy",
    "first: both at once, runs of 64 KiB, of the sum of plain": (
        "speed of loads and stores at once, runs of 64 KiB / the sum of plain copies"
    ),
    "first: store, runs of 16 KiB, of plain copy": "speed of stores, runs of 16 KiB / a plain copy",
    "first: load, runs of 16 KiB, of plain copy": "speed of loads, runs of 16 KiB / a plain copy",
    "first: submission to first byte, 16 blocks, us": (
        "time from the call to the first copied byte, 16 blocks, µs"
    ),
    "first: matrix products lose while loads run": "slowdown of matrix products beside loads",
    "sparse: score rot2u, of device copy": "speed of the scorer rot2u / a copy on the device",
    "sparse: build, of prefill": "time to build sketches / prefill",
    "sparse: selection step of 128k tokens, us a layer": (
        "time to select blocks in a context of 128k, µs per layer"
    ),
}
"""Of figures with a target. "a / b" is a ratio of two measurements."""
GPU_RECORDS = Path(__file__).resolve().parent.parent / "bench" / "gpu" / "records.json"
TABLE_HEAD = "| figure | measured | target |\n|---|---|---|"
GPU_HEAD = """
## On a GPU

No other process used the GPU. `bench/gpu/records.json` has all figures, and
[cuda.md](cuda.md#measured-on-a-gpu) explains them. Rows marked *stale* have not been measured since
the change that they name.
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
            row(name, shown(one.value), f"{one.bound}, {'met' if one.is_hit else missed}")
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
            parts.append(f"| *stale: {since}* | | |")
        for figure in figures:
            bound = f"{'<=' if figure.at_most else '>='} {figure.target:g}"
            hit = "met" if figure.met else "missed"
            parts.append(row(figure.name, shown(figure.measured), f"{bound}, {hit}"))
    return parts


def head_row(command: str, date: str) -> str:
    return f"| **`{command}`** {date} | | |"


def row(name: str, measured: str, target: str) -> str:
    return f"| {meaning(name)} | {measured} | {target} |"


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
