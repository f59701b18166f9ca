"""`hotkv bench`: measures hotkv on this machine in a minute.

Starts a server of its own (`own_server`), times its operations one after the other (`measure`)
and explains the figures (`rows_of`).
"""

import argparse
import contextlib
import ctypes
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hotkv_proto
from hotkv_client.admin import AdminClient
from hotkv_client.command import failures
from hotkv_client.command.tables import human_bytes, table
from hotkv_client.paged_engine import PagedEngine
from hotkv_client.types import BlockRun, GroupHashes, LoadRun
from hotkv_proto import extras
from hotkv_proto.blocks import TransferStatus
from hotkv_proto.command_line import digits
from hotkv_proto.errors import HotKVError

# --------------------------------------------------------------------------- the bench's own server

# A process of the installed `hotkv-server`, whose arena and sockets are removed at its end.


SHARED_MEMORY = Path("/dev/shm")
START_S, STOP_S = 120.0, 20.0
TIERS_CHECK_S = 120.0
COMMAND = (sys.executable, "-m", "hotkv_server")
PREFIX = "hotkv-bench-"
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class BenchError(Exception):
    """Gives the reason and the remedy."""


@contextlib.contextmanager
def own_server(arena_bytes: int, shared_memory: Path = SHARED_MEMORY) -> Iterator[str]:
    """Yields the target of a new server. Raises BenchError if shared memory has too little room,
    or if it does not start."""
    free = shutil.disk_usage(shared_memory).free
    if free < arena_bytes + arena_bytes // 4:
        raise BenchError(
            f"{shared_memory} has {free >> 20} MiB free; the benchmark takes "
            f"{arena_bytes * 5 // 4 >> 20} MiB: make room, or give a smaller --arena-mib"
        )
    with contextlib.ExitStack() as stack:
        folder, memory = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX, dir=at)))
            for at in (None, shared_memory)
        )
        command = [*COMMAND, "run", "--runtime-dir", str(folder), "--arena.dir", f"{memory}/arena"]
        command += ["--arena.bytes", str(arena_bytes), "--arena.keep", "false", "--http.port", "-1"]
        log = folder / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(),
                preexec_fn=_die_with_parent,
            )
        stack.callback(_stop, process)
        target = f"unix:{folder}/grpc.sock"
        _wait_ready(process, target, log)
        yield target


def _environment() -> dict[str, str]:
    """Leaves out HOTKV_*, which may be meant for another server."""
    return {name: value for name, value in os.environ.items() if not name.startswith("HOTKV_")}


def _die_with_parent() -> None:
    """The kernel sends SIGTERM when the parent has ended, whatever the reason."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_ready(process: "subprocess.Popen[bytes]", target: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with contextlib.suppress(HotKVError), AdminClient(target, 1.0) as admin:
            info = admin.info() if admin.ping() else {"state": "silent"}
            if info["state"] == "ready" and not info["progress"]:
                return
        time.sleep(0.1)
    lines = log.read_text(errors="replace").strip().splitlines()
    why = lines[-1] if lines else "it said nothing"
    if "No module named" in why:
        why = f"it is not installed: {extras.advice('server')}"
    raise BenchError(f"hotkv-server did not start: {why}")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def check_tiers(flags: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Timings and problems from `hotkv-server tiers check`. Raises ValueError if the settings are
    wrong or have no tier.

    With `--config` the variables HOTKV_* are passed on: they belong to these settings, and may
    hold the keys of an S3 store.
    """
    command = [*COMMAND, "tiers", "check", "--json", *flags]
    environment = None if "--config" in flags else _environment()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIERS_CHECK_S, env=environment
        )
    except subprocess.TimeoutExpired:
        return [], [f"tiers: no answer within {TIERS_CHECK_S:g} s"]
    said = [line.removeprefix("hotkv-server: ") for line in done.stderr.strip().splitlines()]
    if done.returncode == failures.USAGE:
        raise ValueError("; ".join(said))
    if not done.stdout.strip():
        return [], [f"tiers: {said[-1] if said else 'no answer'}"]
    answer = json.loads(done.stdout)
    return answer["timings"], [f"{name}: {why}" for name, why in answer["problems"].items()]


# ----------------------------------------------------------------------------------------- measures


LAYERS, PAGE_BYTES = 32, 64 << 10
BLOCK_BYTES = LAYERS * PAGE_BYTES
"""2 MiB: 16 tokens at 128 KiB each, as in an 8B model with 8 KV heads of 128 channels in
bfloat16."""
OPERATION_BLOCKS = 32
LOOKED_UP = 1000
MEMCPY_BYTES = 256 << 20
LEAST_ROUNDS = 5
HASH_BYTES = 32
CALL_S = 30.0


@dataclass(frozen=True, slots=True)
class Times:
    """Measured times of an operation.

    seconds: per repetition.
    num_bytes: copied per repetition; 0 if it copies no blocks.
    """

    seconds: tuple[float, ...]
    num_bytes: int = 0

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p99_s(self) -> float:
        return float(np.percentile(self.seconds, 99))

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.median_s


def timed(work: Callable[[], float | None], seconds: float, num_bytes: int = 0) -> Times:
    """Repeats `work` for about `seconds`, at least LEAST_ROUNDS times, after a first call that is
    not counted.

    work: may return seconds that count in place of the call's duration.
    num_bytes: copied per call; 0 if it copies no blocks.
    """
    work()
    found: list[float] = []
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s or len(found) < LEAST_ROUNDS:
        began_s = time.perf_counter()
        own_s = work()
        found.append(time.perf_counter() - began_s if own_s is None else own_s)
    return Times(tuple(found), num_bytes)


def memcpy(num_threads: int, seconds: float) -> Times:
    """Copies of MEMCPY_BYTES within memory, divided among threads."""
    source, target = (np.ones(MEMCPY_BYTES, np.uint8) for _ in range(2))
    bounds = np.linspace(0, MEMCPY_BYTES, num_threads + 1).astype(int).tolist()

    def part(at: int) -> None:
        # numpy releases the GIL while it copies.
        np.copyto(target[bounds[at] : bounds[at + 1]], source[bounds[at] : bounds[at + 1]])

    def copy() -> None:
        threads = [threading.Thread(target=part, args=(at,)) for at in range(1, num_threads)]
        for thread in threads:
            thread.start()
        part(0)
        for thread in threads:
            thread.join()

    return timed(copy, seconds, MEMCPY_BYTES)


def hashes(count: int) -> list[bytes]:
    """Random hashes that no stored block has."""
    data = os.urandom(count * HASH_BYTES)
    return [data[i : i + HASH_BYTES] for i in range(0, len(data), HASH_BYTES)]


class BenchEngine:
    """An engine's worker that stores and loads blocks of BLOCK_BYTES. Must be closed."""

    def __init__(self, target: str) -> None:
        """Raises BenchError if the server can't be reached."""
        self._engine = PagedEngine(
            target,
            layers=LAYERS,
            num_blocks=2 * OPERATION_BLOCKS,
            page_bytes=PAGE_BYTES,
            model="hotkv-bench",
        )
        try:
            self._engine.connect()
        except TimeoutError as error:
            self._engine.close()
            raise BenchError(str(error)) from error
        self._engine.kv[:] = 7
        self._session = self._engine.session
        order = np.random.default_rng(1).permutation(2 * OPERATION_BLOCKS).astype(np.int32)
        self._sources = order[:OPERATION_BLOCKS]
        self._targets = order[OPERATION_BLOCKS:]
        self._number = 0

    def close(self) -> None:
        self._engine.close()

    def _name(self) -> str:
        self._number += 1
        return f"bench-{self._number}"

    def _stored(self, names: list[bytes]) -> float:
        """Seconds of a store. Raises BenchError if it fails."""
        name, began_s = self._name(), time.perf_counter()
        run = BlockRun(0, names, self._sources[: len(names)])
        result = self._session.store(name, name, [run], CALL_S).result(CALL_S)
        if result.status is not TransferStatus.DONE:
            raise BenchError(f"a store ended as {result.status.name.lower()}")
        return time.perf_counter() - began_s

    def _loaded(self, names: list[bytes], *, with_lease: bool) -> float:
        """Seconds of a load. Raises BenchError if it fails, or if a block was evicted.

        with_lease: counts the acquisition of the lease.
        """
        name, began_s = self._name(), time.perf_counter()
        grant = self._session.acquire(name, [GroupHashes(0, names)]).result(CALL_S)
        if not grant.pinned[0].all():
            raise BenchError("stored blocks are not there any more: give a larger --arena-mib")
        leased_s = time.perf_counter()
        positions: NDArray[np.int32] = np.arange(len(names), dtype=np.int32)
        run = LoadRun(0, positions, self._targets[: len(names)])
        result = self._session.load(name, name, [run], CALL_S).result(CALL_S)
        ended_s = time.perf_counter()
        self._session.release(name)
        if result.status is not TransferStatus.DONE:
            raise BenchError(f"a load ended as {result.status.name.lower()}")
        return ended_s - (began_s if with_lease else leased_s)

    def lookups(self, seconds: float) -> Times:
        """Looks up LOOKED_UP blocks, OPERATION_BLOCKS of which are present, in the block table."""
        known = hashes(OPERATION_BLOCKS)
        self._stored(known)
        asked = [*known, *hashes(LOOKED_UP - len(known))]

        def look_up() -> None:
            if self._session.probe(0, asked) is None:
                raise BenchError("the server shares no block table with this user")

        return timed(look_up, seconds)

    def calls(self, seconds: float) -> Times:
        return timed(lambda: self._session.ping(CALL_S), seconds)

    def stores(self, seconds: float) -> Times:
        num_bytes = OPERATION_BLOCKS * BLOCK_BYTES
        return timed(lambda: self._stored(hashes(OPERATION_BLOCKS)), seconds, num_bytes)

    def loads(self, seconds: float) -> Times:
        """Leaves out the acquisition of the lease."""
        known = hashes(OPERATION_BLOCKS)
        self._stored(known)
        num_bytes = OPERATION_BLOCKS * BLOCK_BYTES
        return timed(lambda: self._loaded(known, with_lease=False), seconds, num_bytes)

    def small_hits(self, seconds: float) -> Times:
        """Lease and load of one block: the shortest possible hit."""
        known = hashes(1)
        self._stored(known)
        return timed(lambda: self._loaded(known, with_lease=True), seconds, BLOCK_BYTES)


# --------------------------------------------------------------------------- the meaning of figures


BLOCK_TOKENS = 16
TOKEN_BYTES = BLOCK_BYTES // BLOCK_TOKENS
PROMPT_TOKENS = 10_000


@dataclass(frozen=True, slots=True)
class BenchRow:
    """A measured figure and its meaning.

    means: what the value says, for example in tokens per second.
    """

    what: str
    value: float
    unit: str
    means: str

    @property
    def shown(self) -> str:
        return f"{digits(self.value)} {self.unit}"


def _gb_per_s(times: Times) -> float:
    return times.bytes_per_s / 1e9


def _tokens_per_s(bytes_per_s: float) -> str:
    return f"{bytes_per_s / TOKEN_BYTES:,.0f} tokens/s"


def rows_of(found: dict[str, Times], num_threads: int) -> list[BenchRow]:
    """Makes a row for each operation.

    found: of `measure`.
    num_threads: of `memcpy`.
    """
    one, all_, store, load = (found[name] for name in ("memcpy_1", "memcpy", "store", "load"))
    lookup, call, small = (found[name] for name in ("lookup", "call", "small_hit"))
    prompt_s = PROMPT_TOKENS * TOKEN_BYTES / load.bytes_per_s
    return [
        BenchRow("memcpy, 1 thread", _gb_per_s(one), "GB/s", "the host's memory, for comparison"),
        BenchRow(
            f"memcpy, {num_threads} threads",
            _gb_per_s(all_),
            "GB/s",
            "about what stores and loads can reach between CPUs",
        ),
        BenchRow(
            f"lookup of {LOOKED_UP:,} blocks",
            lookup.median_s * 1e6,
            "us",
            f"a prompt of {LOOKED_UP * BLOCK_TOKENS:,} tokens is looked up in this time, by the "
            "engine itself",
        ),
        BenchRow("call", call.median_s * 1e6, "us", "a hit costs two: lease and load"),
        BenchRow("call, p99", call.p99_s * 1e6, "us", "far above the median: the host is busy"),
        BenchRow(
            "store",
            _gb_per_s(store),
            "GB/s",
            f"keeps up with a prefill of {_tokens_per_s(store.bytes_per_s)}",
        ),
        BenchRow(
            "load",
            _gb_per_s(load),
            "GB/s",
            f"a hit of {PROMPT_TOKENS:,} tokens takes {prompt_s:.2f} s, so hits win on an engine "
            f"that computes less than {_tokens_per_s(load.bytes_per_s)}",
        ),
        BenchRow(
            "hit of one block",
            small.median_s * 1e3,
            "ms",
            f"what any hit takes at least: {BLOCK_TOKENS} tokens win below "
            f"{BLOCK_TOKENS / small.median_s:,.0f} tokens/s",
        ),
    ]


def tier_rows(timings: list[dict[str, Any]]) -> list[BenchRow]:
    """Write and read of each tier and block size."""
    rows = []
    for one in timings:
        size, name = one["block_bytes"], one["tier"]
        read = size / max(one["read_ms"], 1e-6) * 1e3
        blocks = f"{name}, blocks of {human_bytes(size)}"
        rows += [
            BenchRow(
                f"{blocks}: write", one["write_ms"], "ms", "one at a time; several go together"
            ),
            BenchRow(
                f"{blocks}: read",
                one["read_ms"],
                "ms",
                f"one at a time {_tokens_per_s(read)}: a hit there wins below",
            ),
        ]
    return rows


def host() -> dict[str, Any]:
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


def answer_of(rows: list[BenchRow], devices: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    return {
        "host": host(),
        "devices": devices,
        "rows": [asdict(row) for row in rows],
        "problems": problems,
    }


def show(answer: dict[str, Any]) -> str:
    on = answer["host"]
    rows = [BenchRow(**row) for row in answer["rows"]]
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


# -------------------------------------------------------------------------------------- the command


LEAST_ARENA_MIB = 256


def measure(target: str, seconds: float, say: Callable[[str], None]) -> dict[str, Times]:
    """Times by name of the operation. Raises BenchError if one fails.

    seconds: for all operations together.
    say: gets the name of each operation as it begins.
    """
    num_threads = len(os.sched_getaffinity(0))
    engine = BenchEngine(target)
    measures: dict[str, Callable[[float], Times]] = {
        "memcpy_1": lambda s: memcpy(1, s),
        "memcpy": lambda s: memcpy(num_threads, s),
        "lookup": engine.lookups,
        "call": engine.calls,
        "store": engine.stores,
        "load": engine.loads,
        "small_hit": engine.small_hits,
    }
    found = {}
    try:
        for name, run in measures.items():
            say(name.replace("_", " "))
            found[name] = run(seconds / len(measures))
    finally:
        engine.close()
    return found


def run(
    seconds: float,
    arena_mib: int,
    disk: Path | None,
    config: Path | None,
    say: Callable[[str], None] = lambda what: print(f"hotkv bench: {what} …", file=sys.stderr),
) -> dict[str, Any]:
    """Raises BenchError if the benchmark can't run, ValueError for invalid options or settings.

    seconds: without start, stop and the test of tiers.
    disk: folder in which a disk tier is tested.
    config: settings of a server whose tiers are tested.
    say: gets the name of each step as it begins.
    """
    if not 1 <= seconds <= 3600:
        raise ValueError(f"--seconds {seconds:g}: give 1 to 3600")
    if arena_mib < LEAST_ARENA_MIB:
        raise ValueError(f"--arena-mib {arena_mib}: give {LEAST_ARENA_MIB} at least")
    timings: list[dict[str, Any]] = []
    problems: list[str] = []
    # First, because wrong settings end the benchmark.
    if flags := tier_flags(disk, config):
        say("tiers")
        timings, problems = check_tiers(flags)
    say("starting a server of its own")
    with own_server(arena_mib << 20) as target:
        found = measure(target, seconds, say)
        with AdminClient(target) as admin:
            devices = admin.info()["devices"]
    rows = [*rows_of(found, len(os.sched_getaffinity(0))), *tier_rows(timings)]
    return answer_of(rows, devices, problems)


def tier_flags(disk: Path | None, config: Path | None) -> Sequence[str]:
    """Empty without tiers."""
    return [
        *(["--config", str(config)] if config is not None else []),
        *(["--tiers.disk.path", str(disk), "--tiers.disk.bytes", "64MiB"] if disk else []),
    ]


def main(options: argparse.Namespace) -> int:
    """Returns the command's exit status."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    # An exception, so that the benchmark's server and memory are removed.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, end)
    try:
        answer = run(options.seconds, options.arena_mib, options.disk, options.config)
    except (BenchError, HotKVError) as error:
        return failures.failed(str(error), as_json=options.json)
    except (ValueError, OSError) as error:
        return failures.wrong(error, as_json=options.json)
    print(json.dumps(answer, indent=2) if options.json else show(answer), flush=True)
    return 1 if answer["problems"] else 0
