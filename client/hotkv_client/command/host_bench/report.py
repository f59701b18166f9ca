"""What the figures of `hotkv bench` mean for somebody with an 8B model: pure."""

import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import hotkv_proto
from hotkv_client.command.host_bench.measures import BLOCK_BYTES, LOOKED_UP, Times
from hotkv_client.command.tables import human_bytes, table

BLOCK_TOKENS = 16
TOKEN_BYTES = BLOCK_BYTES // BLOCK_TOKENS
PROMPT_TOKENS = 10_000


@dataclass(frozen=True, slots=True)
class Row:
    """`value` in `unit`, and a sentence on what it means."""

    what: str
    value: float
    unit: str
    means: str

    @property
    def shown(self) -> str:
        return f"{self.value:.3g} {self.unit}"


def _gb_per_s(times: Times) -> float:
    return times.bytes_per_s / 1e9


def _tokens_per_s(bytes_per_s: float) -> str:
    return f"{bytes_per_s / TOKEN_BYTES:,.0f} tokens/s"


def rows_of(found: dict[str, Times], num_threads: int) -> list[Row]:
    """A row for each measure, by the names of `command.measure`."""
    one, all_, store, load = (found[name] for name in ("memcpy_1", "memcpy", "store", "load"))
    lookup, call, small = (found[name] for name in ("lookup", "call", "small_hit"))
    prompt_s = PROMPT_TOKENS * TOKEN_BYTES / load.bytes_per_s
    return [
        Row("memcpy, 1 thread", _gb_per_s(one), "GB/s", "the host's memory, for comparison"),
        Row(
            f"memcpy, {num_threads} threads",
            _gb_per_s(all_),
            "GB/s",
            "about what stores and loads can reach between CPUs",
        ),
        Row(
            f"lookup of {LOOKED_UP:,} blocks",
            lookup.median_s * 1e6,
            "us",
            f"a prompt of {LOOKED_UP * BLOCK_TOKENS:,} tokens is looked up in this time, by the "
            "engine itself",
        ),
        Row("call", call.median_s * 1e6, "us", "a hit costs two: lease and load"),
        Row("call, p99", call.p99_s * 1e6, "us", "far above the median: the host is busy"),
        Row(
            "store",
            _gb_per_s(store),
            "GB/s",
            f"keeps up with a prefill of {_tokens_per_s(store.bytes_per_s)}",
        ),
        Row(
            "load",
            _gb_per_s(load),
            "GB/s",
            f"a hit of {PROMPT_TOKENS:,} tokens takes {prompt_s:.2f} s, so hits win on an engine "
            f"that computes less than {_tokens_per_s(load.bytes_per_s)}",
        ),
        Row(
            "hit of one block",
            small.median_s * 1e3,
            "ms",
            f"what any hit takes at least: {BLOCK_TOKENS} tokens win below "
            f"{BLOCK_TOKENS / small.median_s:,.0f} tokens/s",
        ),
    ]


def tier_rows(timings: list[dict[str, Any]]) -> list[Row]:
    """Two rows for each tier and size of blocks that was tried."""
    rows = []
    for one in timings:
        size, name = one["block_bytes"], one["tier"]
        read = size / max(one["read_ms"], 1e-6) * 1e3
        blocks = f"{name}, blocks of {human_bytes(size)}"
        rows += [
            Row(f"{blocks}: write", one["write_ms"], "ms", "one at a time; several go together"),
            Row(
                f"{blocks}: read",
                one["read_ms"],
                "ms",
                f"one at a time {_tokens_per_s(read)}: a hit there wins below",
            ),
        ]
    return rows


def host() -> dict[str, Any]:
    """What the figures are of."""
    info = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (info.read_text() if info.exists() else "").splitlines()
        if line.startswith("model name")
    ]
    return {
        "hotkv": hotkv_proto.__version__,
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def answer_of(rows: list[Row], devices: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """All of it, to paste into an issue."""
    return {
        "host": host(),
        "devices": devices,
        "rows": [asdict(row) for row in rows],
        "problems": problems,
    }


def show(answer: dict[str, Any]) -> str:
    """The table, for people."""
    on = answer["host"]
    rows = [Row(**row) for row in answer["rows"]]
    return "\n".join(
        [
            f"hotkv {on['hotkv']}  {on['cpu']}, {on['cores']} cores, "
            f"{human_bytes(on['memory_bytes'])}, Linux {on['kernel']}",
            "",
            table(
                ("measured", "figure", "what it means for you"),
                [(row.what, row.shown, row.means) for row in rows],
            ),
            "",
            f"Tokens are those of an 8B model with {human_bytes(TOKEN_BYTES)} of KV each, in "
            f"blocks of {BLOCK_TOKENS}.",
            *(f"! {problem}" for problem in answer["problems"]),
            "`hotkv bench --json` prints all of it, to paste into an issue.",
        ]
    )
