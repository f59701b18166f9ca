"""A process that has imported vLLM and forks a child for each engine, within a second.

One serves all xdist workers and ends with the last. Imports are frozen: vLLM collects garbage
several times at a start, and would walk 700,000 objects.
"""

import contextlib
import fcntl
import functools
import gc
import importlib
import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from hotkv_proto import native
from tests.support.waiting import end_with_the_parent

HERE = Path(__file__).parent
MAX_ORDER_BYTES = 1 << 16
IMPORTS = (
    "vllm.entrypoints.llm",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
)
"""What every engine imports before its model."""
KERNELS = ("hotkv_proto.table_reading", "hotkv_sparse.all_kernels")
"""Half of an engine's start, even from numba's cache; those of sparse decode if it is there."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "INFO",
}


class Nursery:
    """vllm: folder of another vLLM."""

    def __init__(self, vllm: Path | None = None) -> None:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
        self._vllm = vllm
        address = f"\0hotkv-nursery-{run}{vllm or ''}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with (Path(tempfile.gettempdir()) / f"hotkv-nursery-{os.getuid()}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                self._socket.connect(address)
            except ConnectionRefusedError:
                self._start(address)
                self._socket.connect(address)

    def _start(self, address: str) -> None:
        """Connections wait in the listener's queue."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen()
            command = [sys.executable, str(Path(__file__)), str(listener.fileno())]
            environment = os.environ | ENVIRONMENT
            if self._vllm is not None:
                paths = [str(self._vllm), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
                environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
                environment["VLLM_TARGET_DEVICE"] = "cpu"
            self._process = subprocess.Popen(command, pass_fds=[listener.fileno()], env=environment)

    def fork(self, driver: str, log: IO[bytes]) -> Any:
        """Runs the script's `main`, with pipes for stdin and stdout."""
        from tests.support.daemons import ForkedServer

        to_child, stdin = os.pipe()
        stdout, from_child = os.pipe()
        order = json.dumps({"driver": driver}).encode()
        socket.send_fds(self._socket, [order], [to_child, from_child, log.fileno()])
        os.close(to_child)
        os.close(from_child)
        answer = self._socket.recv(MAX_ORDER_BYTES)
        assert answer, "the process that forks engines has ended"
        child: Any = ForkedServer(self, json.loads(answer)["pid"])  # type: ignore[arg-type]
        child.stdin, child.stdout = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")
        return child

    def status_of(self, pid: int) -> int:
        """Always 0: exit statuses are ignored."""
        return 0

    def fork_module(
        self,
        module: str,
        arguments: Sequence[str],
        log: IO[bytes],
        environment: dict[str, str] | None = None,
    ) -> Any:
        """As `python -m`; then writes the exit status as JSON."""
        child = self.fork("module_driver.py", log)
        order = {"module": module, "arguments": list(arguments), "environment": environment or {}}
        child.stdin.write(json.dumps(order).encode() + b"\n")
        child.stdin.flush()
        return child


@functools.cache
def nursery(vllm: Path | None = None) -> Nursery:
    return Nursery(vllm)


def _become(driver: str, fds: list[int], links: Sequence[socket.socket]) -> None:
    """links: of the parent, to be closed."""
    end_with_the_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for link in links:
        link.close()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin = os.fdopen(0)
    module: Any = importlib.import_module(driver.removesuffix(".py"))
    module.engine_driver.main() if hasattr(module, "engine_driver") else module.main()


def fork_engines() -> None:
    """vLLM's CPU engines would spawn, importing vLLM for twenty seconds each, and compile a part
    of the sampler."""
    import torch
    from vllm.v1.engine import coordinator, utils
    from vllm.v1.executor import multiproc_executor

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    torch.compiler.set_stance("force_eager")
    for module in (coordinator, utils, multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")


def inspect_models_here() -> None:
    """By default vLLM inspects in a new Python, which imports vLLM again."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()


def _register_kernels() -> None:
    """Each engine would search every module for each kernel."""
    from vllm.platforms import current_platform

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda _: None)


def _configure_logging() -> None:
    """Each engine would reset hundreds of loggers, half of its start."""
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    configure_logging_if_needed(LoggingConfig())


def _keep_compiled_drafts() -> None:
    """Each engine would compile it for five seconds."""
    from vllm.v1.spec_decode import ngram_proposer

    ngram_proposer.batch_propose_numba.enable_caching()
    ngram_proposer._find_longest_matched_ngram_and_propose_tokens.enable_caching()


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    sys.path[:0] = map(str, (HERE, HERE.parent / "sparse" / "engines"))
    importlib.import_module("hotkv_vllm.connector")
    assert not {"numba", "llvmlite"} & sys.modules.keys(), "the connector's import loads numba"
    for module in IMPORTS:
        importlib.import_module(module)
    for kernels in KERNELS:
        if find_spec(kernels.partition(".")[0]) is not None:
            native.load(kernels)
    inspect_models_here()
    _register_kernels()
    _keep_compiled_drafts()
    _configure_logging()
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None
    # The kernel discards exit statuses.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(fileno=int(sys.argv[1]))
    workers: list[socket.socket] = []
    while True:
        ready, _, _ = select.select([listener, *workers], [], [])
        if listener in ready:
            workers.append(listener.accept()[0])
        for worker in [one for one in ready if one is not listener]:
            order, fds, _, _ = socket.recv_fds(worker, MAX_ORDER_BYTES, 3)
            if order:
                _fork(worker, json.loads(order)["driver"], fds, [listener, *workers])
            else:
                workers.remove(worker)
                worker.close()
        if not workers:
            # Python's cleanup takes seconds and makes triton report leaks.
            os._exit(0)


def _fork(worker: socket.socket, driver: str, fds: list[int], links: list[socket.socket]) -> None:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _become(driver, fds, links)
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            with contextlib.suppress(Exception):
                sys.stderr.flush()
            os._exit(status)
    for fd in fds:
        os.close(fd)
    worker.send(json.dumps({"pid": pid}).encode())


if __name__ == "__main__":
    main()
