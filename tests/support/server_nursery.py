"""The process that forks servers for tests. It imports hotkv-server and loads its kernels once.

`daemons` runs it as `python -m tests.support.server_nursery FD`; FD is a SOCK_SEQPACKET socket,
over which it receives requests in JSON. A request to fork has `arguments` (of `python -m`), `cwd`,
`leads_group`, `environment` (variables to add), and the standard streams as descriptors. The answer
has the `pid`. A request with `wait_for` (a pid) is answered with the `status` of that process when
it has ended.

Always true: a forked server has imported only the modules that `hotkv-server` imports, and this
module. It ends with Python's normal exit. It gets SIGTERM when this process ends.
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
    """Runs the requested server in a forked child and returns its exit status, with which the child
    then exits."""
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
    """Forks servers on request until the tests end. Returns the exit status of this process, or in
    a forked child the exit status of its server."""
    # Ignores Ctrl-C: pytest receives it too, and ends its servers itself.
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
