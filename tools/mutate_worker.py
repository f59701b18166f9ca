"""Runs the tests of one mutant at a time, in a copy of the tree.

Each worker has a process with libraries imported (vLLM takes eight seconds), but nothing of
hotkv; for each mutant it forks a child that imports the changed tree. A mutant exists only in
the copy and is removed afterwards; all processes of its tests have ended when the call returns.
"""

import contextlib
import gc
import importlib
import json
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.mutations import Mutant

ROOT = Path(__file__).resolve().parent.parent
PATHS = ("proto", "sparse", "client", "server", "connector_vllm", ".")
SLOWEST_TEST_S = 120
LIBRARIES = (
    "tests.conftest",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.worker.cpu_worker",
    "grpc_channelz.v1.channelz",
    "hypothesis.stateful",
    "obstore",
    "pydantic_settings",
)
"""The slowest imports. The first sets variables that vLLM reads."""
LONGEST_S = 450
"""Tests that take longer count as killed."""


class Worker:
    """A copy of the tree; one mutant at a time, on a single thread."""

    def __init__(self, folder: Path) -> None:
        self.tree, self._num_changed = folder / "tree", 0
        files = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        # On a busy machine, a test that must first compile kernels fails.
        compiled = [path for part in PATHS[:-1] for path in (ROOT / part).rglob("*.nb[ci]")]
        names = [str(path.relative_to(ROOT)) for path in compiled]
        for name in [*files.stdout.splitlines(), *names]:
            if (ROOT / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.tree / name)
        environment = {
            # As `make test-long`, unless the environment names another profile.
            "HYPOTHESIS_PROFILE": "ci",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(self.tree / part) for part in PATHS),
        }
        self._forker: Any = subprocess.Popen(
            [sys.executable, "-m", "tools.mutate_worker"],
            bufsize=0,
            cwd=self.tree,
            env=environment,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._pid = self._forker.pid

    def __repr__(self) -> str:
        return f"Worker({self.tree}, {self._num_changed} mutants)"

    def failed(
        self, tests: Sequence[str], limit_s: float, caches: str = "", most: int = 1
    ) -> list[str]:
        """At most `most` failing tests, or a message at the time limit or if pytest ends with an
        error. Ends all their processes. caches: for compiled kernels; empty: the tree's own."""
        output = self.tree.parent / "output"
        order = json.dumps([str(output), caches, str(most), *tests])
        self._forker.stdin.write(order.encode() + b"\n")
        self._pid = int(self._forker.stdout.readline())
        has_ended = self._has_ended(limit_s)
        self.stop()
        status = int(self._forker.stdout.readline())
        if not has_ended:
            return [f"longer than {limit_s:.0f} s"]
        lines = output.read_text().splitlines() if status else []
        named = [line for line in lines if line.startswith(("FAILED tests/", "ERROR tests/"))]
        if status and not named:
            return [f"exit status {status}"]
        return [line.split(" - ")[0] for line in named]

    def _has_ended(self, limit_s: float) -> bool:
        return bool(select.select([self._forker.stdout], [], [], limit_s)[0])

    def stop(self) -> None:
        """Any thread may call this."""
        # Interrupted tests remove their files.
        for number in (signal.SIGINT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, number)
                self._has_ended(10)

    @contextlib.contextmanager
    def changed(self, mutant: Mutant) -> Iterator[str]:
        """The tree has the mutant in the `with` block. Yields the folder for compiled kernels;
        empty: the tree's own.
        """
        path = self.tree / mutant.path
        source, stat = path.read_bytes(), path.stat()
        self._num_changed += 1
        path.write_bytes(mutant.apply(source))
        # Python compiles again only if this time has changed by whole seconds.
        os.utime(path, (stat.st_atime, stat.st_mtime + 10 * self._num_changed))
        # Numba does not compile a kernel again if only one that it calls has changed, so a
        # kernel's mutant gets a new folder.
        is_kernel = path.name.endswith("kernels.py")
        caches = tempfile.mkdtemp(dir=self.tree.parent) if is_kernel else ""
        try:
            yield caches
        finally:
            path.write_bytes(source)
            os.utime(path, (stat.st_atime, stat.st_mtime))
            if is_kernel:
                shutil.rmtree(caches, ignore_errors=True)

    def seen_by(
        self, mutant: Mutant, tests: Sequence[str], sound: set[str], most: int = 1
    ) -> list[str]:
        """At most `most` tests that fail with the mutant. Exits if one fails without it too: it
        would kill every mutant. sound: known to pass; grows."""
        tests = [test for test in tests if (self.tree / test).exists()]
        with self.changed(mutant) as caches:
            failed = self.failed(tests, LONGEST_S, caches, most)
        named = {
            line.partition(" ")[2] for line in failed if line.startswith(("FAILED ", "ERROR "))
        }
        if new := sorted(named - sound):
            if unsound := self.failed(new, LONGEST_S, most=most):
                raise SystemExit(f"mutate: without any mutant, too: {', '.join(unsound)}")
            sound.update(new)
        return failed


def share_out(
    workers: Sequence[Worker],
    mutants: Sequence[Mutant],
    work: Callable[[Worker, Mutant], None],
    until_s: float,
) -> None:
    """A thread per worker, until all are done or the time is over. Raises the first exception."""
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    failures: list[BaseException] = []
    for mutant in mutants:
        waiting.put(mutant)

    def run(worker: Worker) -> None:
        while time.monotonic() < until_s and not failures:
            try:
                mutant = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                work(worker, mutant)
            except BaseException as error:  # noqa: BLE001 A thread's failure is raised by the caller, who waits for it.
                failures.append(error)

    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:  # noqa: BLE001 It is raised below, when the tests have ended.
        failures.append(error)
        for worker, thread in zip(workers, threads, strict=True):
            worker.stop()
            thread.join()
    if failures:
        raise failures[0]


def main() -> None:
    """Forks a child for each order on standard input: a JSON list of a file for output, a folder
    for compiled kernels, the failures at which to stop, and test files. Prints the child's
    process id and, at its end, status."""
    from tests.support.waiting import end_with_the_parent

    end_with_the_parent()
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        if not (pid := os.fork()):
            end_with_the_parent()
            os._exit(_run(*order))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    os._exit(0)


def _run(output: str, caches: str, most: str, *tests: str) -> int:
    """This process becomes the leader of a new session. Returns pytest's status.

    output: file for pytest's output.
    caches: for compiled kernels; empty: the tree's own.
    most: failures at which pytest stops.
    """
    import pytest

    os.setsid()
    with open(os.devnull) as nothing, open(output, "w") as sink:
        for number, file in enumerate((nothing, sink, sink)):
            os.dup2(file.fileno(), number)
    if caches:
        os.environ["NUMBA_CACHE_DIR"] = caches
    flags = (f"--maxfail={most}", "-q", "-p", "no:cacheprovider", f"--timeout={SLOWEST_TEST_S}")
    try:
        return int(pytest.main([*flags, *tests]))
    finally:
        sys.stdout.flush()


if __name__ == "__main__":
    main()
