"""Mutation testing: makes one small change at a time in the sources, and runs the tests that belong
to the changed file. Measures how many of the changes the tests detect.

    python -m tools.mutate --minutes 30            # a random sample; --seed repeats it
    python -m tools.mutate --only proto/hotkv_proto/order.py --number 999
    python -m tools.mutate --only proto/hotkv_proto/order.py --every    # which tests are needed

A mutant exists only in a worker's copy of the tree, never in the checkout. It is killed if a
test fails that passes without it, or its tests do not end; else it survives, unless
`mutate_equivalents.txt` says why no test could detect it. Score: killed / (mutants that ran -
equivalent ones).
"""

import argparse
import ast
import collections
import functools
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from demo.processes import ends_cleanly
from tools.mutate_tests import TESTS
from tools.mutate_worker import Worker, share_out
from tools.mutations import Mutant, mutants_of

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENTS = Path(__file__).with_name("mutate_equivalents.txt")
MIN_SCORE = 0.95
MOST_IMPORTERS = 7
"""If more test files import a source, most are not about it."""

LEFT_OUT = (
    "client/hotkv_client/command/cli.py",
    "client/hotkv_client/command/tables.py",
    "client/hotkv_client/__init__.py",
)
"""Beginnings of paths: output for people, and what is no product."""


@dataclass(slots=True)
class Tally:
    """Workers share it, under `lock`."""

    killed: list[Mutant] = field(default_factory=list)
    survivors: list[Mutant] = field(default_factory=list)
    equivalent: list[Mutant] = field(default_factory=list)
    kills: collections.Counter[str] = field(default_factory=collections.Counter)
    """Killed mutants by test."""
    only_kills: collections.Counter[str] = field(default_factory=collections.Counter)
    """Mutants that only this test killed."""
    only_file: collections.Counter[str] = field(default_factory=collections.Counter)
    """Mutants that only tests of this file killed."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def score(self) -> float:
        """Known equivalents do not count; 1 if none ran."""
        counted = len(self.killed) + len(self.survivors)
        return len(self.killed) / counted if counted else 1.0

    def add(self, mutant: Mutant, failed: Sequence[str]) -> None:
        """Killed if tests failed."""
        with self.lock:
            (self.killed if failed else self.survivors).append(mutant)
            tests = {line.partition("[")[0].rpartition(" ")[2] for line in failed}
            files = {test.partition("::")[0] for test in tests}
            self.kills.update(tests)
            self.only_kills.update(tests if len(tests) == 1 else ())
            self.only_file.update(files if len(files) == 1 else ())

    def print_tests(self) -> None:
        print("killed, killed by this test only, test")
        for file in sorted({test.partition("::")[0] for test in self.kills}):
            print(f"{file}: {self.only_file[file]} by this file only")
            for test, number in sorted(self.kills.items()):
                if test.partition("::")[0] == file:
                    print(f"  {number:5} {self.only_kills[test]:5}  {test.partition('::')[2]}")


def tests_of(path: str) -> list[str]:
    """Those of TESTS, then its importers, unless these are more than MOST_IMPORTERS."""
    entry = max((prefix for prefix in TESTS if path.startswith(prefix)), key=len)
    module = ".".join(Path(path).with_suffix("").parts[1:])
    importers = [test for test, modules in _imports().items() if module in modules]
    own = importers if len(importers) <= MOST_IMPORTERS else []
    return list(dict.fromkeys([*TESTS[entry].split(), *own]))


@functools.cache
def _imports() -> dict[str, set[str]]:
    """Per test file, full names of modules and members; without tests for GPUs."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "gpu" in path.parts:
            continue
        names = found[str(path.relative_to(ROOT))] = set[str]()
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def sources(only: Sequence[str]) -> list[str]:
    """`only`: prefixes of wanted paths."""
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
    lines = EQUIVALENTS.read_text().splitlines()
    return {line.strip() for line in lines if line.strip() and not line.startswith("#")}


def stale_entries() -> list[str]:
    """Of `mutate_equivalents.txt` or TESTS, that name what no longer exists."""
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
    """Returns 1 if the score is too low."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=30, help="begins no mutant after that")
    parser.add_argument("--number", type=int, default=100_000, help="at most so many mutants")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1, help="chooses the mutants, and their order")
    parser.add_argument(
        "--only", nargs="*", default=[], help="files or folders, as the table TESTS names them"
    )
    parser.add_argument("--match", default="", help="only mutants whose name has this text")
    parser.add_argument("--tests", nargs="*", default=[], help="run these for each mutant")
    parser.add_argument(
        "--every", action="store_true", help="count by test: run all tests after a failure too"
    )
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
            most = 1_000 if flags.every else 1
            seen_by = worker.seen_by(job, flags.tests or tests_of(job.path), sound, most)
            tally.add(job, seen_by)
            print(
                f"{'killed' if seen_by else 'LIVES '} {job.path}:{job.line} {job.function}: "
                f"{job.change}  {', '.join(seen_by[:3])}",
                flush=True,
            )

        share_out(workers, mutants, run, began_s + 60 * flags.minutes)
    if flags.every:
        tally.print_tests()
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
