"""Runs the tests of a single mutant at a time, in a copy of the tree.

Invariant: a mutant lives in a worker's copy, never in the checkout, and is removed again. All
processes that a worker began have ended when its call returns.
"""

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tools.mutations import Mutant

ROOT = Path(__file__).resolve().parent.parent
PATHS = ("proto", "sparse", "client", "server", "connector_vllm", ".")
SLOWEST_TEST_S = 120
LONGEST_S = 450
"""Longest time of a mutant's tests in seconds; a mutant that takes longer counts as killed."""


class Worker:
    """A copy of the tree, and the tests run in it, on a single thread."""

    def __init__(self, folder: Path) -> None:
        self.tree, self.caches, self._num_changed = folder / "tree", folder / "numba", 0
        self._process: subprocess.Popen[bytes] | None = None
        files = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in files.stdout.splitlines():
            if (ROOT / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.tree / name)

    def __repr__(self) -> str:
        return f"Worker({self.tree}, {self._num_changed} mutants)"

    def failed(self, tests: Sequence[str], limit_s: float, caches: Path) -> str:
        """Returns the first of the tests that fails, or a message at the time limit; empty if all
        pass. Ends all processes of the tests."""
        environment = {
            # As many examples as `make test-long` has; the environment may name another profile.
            "HYPOTHESIS_PROFILE": "ci",
            **os.environ,
            "NUMBA_CACHE_DIR": str(caches),
            "PYTHONPATH": os.pathsep.join(str(self.tree / part) for part in PATHS),
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--timeout={SLOWEST_TEST_S}",
            *tests,
        ]
        with (self.tree.parent / "output").open("w+") as output:
            process = subprocess.Popen(
                command,
                cwd=self.tree,
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            self._process = process
            try:
                if process.wait(limit_s) == 0:
                    return ""
            except subprocess.TimeoutExpired:
                return f"longer than {limit_s:.0f} s"
            finally:
                self.stop()
            output.seek(0)
            named = [line for line in output if line.startswith(("FAILED tests/", "ERROR tests/"))]
            return (
                named[0].split(" - ")[0].strip() if named else f"exit status {process.returncode}"
            )

    def stop(self) -> None:
        """Ends the running tests. May be called from any thread."""
        process = self._process
        if process is None:
            return
        # Interrupts first, because interrupted tests clean up behind themselves.
        for number in (signal.SIGINT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(10)

    @contextlib.contextmanager
    def changed(self, mutant: Mutant) -> Iterator[Path]:
        """Puts the mutant into the tree; yields a folder for compiled kernels."""
        path = self.tree / mutant.path
        source, stat = path.read_bytes(), path.stat()
        self._num_changed += 1
        path.write_bytes(mutant.apply(source))
        # Python compiles a file again only if its time differs by whole seconds.
        os.utime(path, (stat.st_atime, stat.st_mtime + 10 * self._num_changed))
        # Numba notices changes of a kernel's own file, not of the files of kernels that it calls.
        is_kernel = path.name.endswith("kernels.py")
        caches = Path(tempfile.mkdtemp(dir=self.tree.parent)) if is_kernel else self.caches
        try:
            yield caches
        finally:
            path.write_bytes(source)
            os.utime(path, (stat.st_atime, stat.st_mtime))
            if is_kernel:
                shutil.rmtree(caches, ignore_errors=True)

    def seen_by(self, mutant: Mutant, tests: Sequence[str], sound: set[str]) -> str:
        """Returns the first of `tests` that sees the mutant; empty without such a test. `sound`:
        tests known to pass without a mutant, to which it adds.

        Exits if a test also fails without the mutant, because it would kill every mutant.
        """
        tests = [test for test in tests if (self.tree / test).exists()]
        with self.changed(mutant) as caches:
            failed = self.failed(tests, LONGEST_S, caches)
        test = failed.partition(" ")[2] if failed.startswith(("FAILED ", "ERROR ")) else ""
        if test and test not in sound:
            if self.failed([test], LONGEST_S, self.caches):
                raise SystemExit(f"mutate: without any mutant, too: {failed}")
            sound.add(test)
        return failed


def share_out(
    workers: Sequence[Worker],
    mutants: Sequence[Mutant],
    work: Callable[[Worker, Mutant], None],
    until_s: float,
) -> None:
    """Calls `work` for each mutant, on a thread for each worker, until the time is up. Raises the
    first exception."""
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
