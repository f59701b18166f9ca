"""Forks the workers of xdist from a process that has imported vLLM: each would import it for ten
seconds.

`fork_workers()` starts this process, and makes xdist run this file in place of Python. So run, it
passes its standard streams to this process, which forks a worker, and waits for the worker's end.
"""

import gc
import importlib
import importlib.util
import os
import shlex
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Sequence
from typing import Any

from tests.support.waiting import end_with_the_parent

IMPORTS = (
    "hotkv_server.daemon",
    "hotkv_vllm.connector",
    "transformers.masking_utils",
    "transformers.models.auto.auto_factory",
    "vllm.model_executor.layers.quantization.fp8",
    "vllm.model_executor.models.registry",
    "vllm.v1.core.kv_cache_coordinator",
    "vllm.v1.core.sched.async_scheduler",
)
"""Modules that take long and that every worker imports, none of them a test."""


def fork_workers(specs: Sequence[Any]) -> None:
    """Sets the Python of xdist's workers, unless vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        return
    name = f"hotkv-workers-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        number = listener.fileno()
        subprocess.Popen([sys.executable, __file__, "fork", str(number)], pass_fds=[number])
    for spec in specs:
        spec.python = shlex.join([sys.executable, __file__, name])


def _stand_in(name: str) -> None:
    """Has a worker forked with these standard streams, and waits until it closes the link."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.connect(f"\0{name}")
        socket.send_fds(link, [b"."], [0, 1, 2])
        os.close(0)
        os.close(1)
        link.recv(1)


def _fork_all(listener: socket.socket) -> None:
    """Forks workers until the tests end; returns in workers that have ended."""
    end_with_the_parent()
    for module in IMPORTS:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        link, _ = listener.accept()
        _, fds, _, _ = socket.recv_fds(link, 1, 3)
        if os.fork() == 0:
            listener.close()
            end_with_the_parent()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _become(fds)
            return
        for fd in (*fds, link.detach()):
            os.close(fd)


def _become(fds: Sequence[int]) -> None:
    """Runs the worker as `python -c` with xdist's program."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    sys.argv, sys.path[0] = ["-c"], ""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(eval(sys.stdin.readline()), vars(main))


if __name__ == "__main__":
    # Ctrl-C is for the tests, which clean up by themselves.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.argv[1] == "fork":
        _fork_all(socket.socket(fileno=int(sys.argv[2])))
    else:
        _stand_in(sys.argv[1])
