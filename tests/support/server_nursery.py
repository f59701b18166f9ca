"""Forks servers for tests, with hotkv-server imported and kernels loaded.

`daemons` runs `python -m tests.support.server_nursery FD`; over this SOCK_SEQPACKET socket come
requests in JSON. To fork: `arguments` (of `python -m`), `cwd`, `leads_group`, `environment` (to
add), and the standard streams as descriptors; answered with `pid`. With `wait_for` (a pid):
answered with `status` at that process's end.

A forked server has imported what `hotkv-server` imports, and this module; it ends with Python's
normal exit, and gets SIGTERM when this process ends.
"""

import gc
import importlib
import json
import os
import signal
import socket
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.waiting import end_with_the_parent

MAX_ORDER_BYTES = 1 << 17


def _preload() -> None:
    from hotkv_proto import native
    from hotkv_server.cli import kernels

    for module in ("uvloop", "hotkv_server.daemon", "hotkv_server.settings"):
        importlib.import_module(module)
    for name in kernels():
        native.load(name)


def _become(order: Mapping[str, Any], fds: Sequence[int], link: socket.socket) -> int:
    """Runs in the forked child. Returns the exit status."""
    end_with_the_parent(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    link.close()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    if order["leads_group"]:
        os.setsid()
    os.chdir(order["cwd"])
    os.environ.update(order["environment"])
    sys.argv = order["arguments"]
    module: Any = importlib.import_module(
        {"hotkv_server": "hotkv_server.cli"}.get(sys.argv[0], sys.argv[0])
    )
    status: int = module.main()
    return status


def main() -> int:
    """Returns, in a forked child, the server's exit status."""
    # pytest gets Ctrl-C too, and ends its servers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _preload()
    gc.collect()
    gc.freeze()
    link = socket.socket(fileno=int(sys.argv[1]))
    link.send(b"{}")
    while True:
        data, fds, _, _ = socket.recv_fds(link, MAX_ORDER_BYTES, 3)
        if not data:
            return 0
        order = json.loads(data)
        if "wait_for" in order:
            _, status = os.waitpid(order["wait_for"], 0)
            answer = {"status": os.waitstatus_to_exitcode(status)}
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                pid = os.fork()
            if pid == 0:
                return _become(order, fds, link)
            answer = {"pid": pid}
        for fd in fds:
            os.close(fd)
        link.send(json.dumps(answer).encode())


if __name__ == "__main__":
    sys.exit(main())
