"""LMCache's server in a child process, and the settings of an engine that uses it."""

import http.client
import socket
import time
from pathlib import Path
from typing import Any

from demo.processes import Child

READY_S = 180.0
"""On a slow machine importing LMCache takes most of it."""
HOST = "127.0.0.1"
START = "import sys; from lmcache.cli.main import main; sys.exit(main())"
"""The command `lmcache`, which may not be installed beside the interpreter."""


class LMCacheServer:
    """LMCache 0.5.6, in a `with` block. python: has LMCache installed."""

    def __init__(self, python: str, folder: Path, size_gib: int) -> None:
        self._port, self._http_port = free_ports(2)
        flags = {
            "host": HOST,
            "port": self._port,
            "http-port": self._http_port,
            "l1-size-gb": size_gib,
            "eviction-policy": "LRU",
            # LMCache's server could copy only with CUDA.
            "supported-transfer-mode": "engine_driven",
        }
        command = [python, "-c", START, "server", "--disable-observability"]
        for name, value in flags.items():
            command += [f"--{name}", str(value)]
        self._child = Child("lmcache", command, folder / "lmcache.log", {})

    def __repr__(self) -> str:
        return f"LMCacheServer({self._child!r})"

    def __enter__(self) -> "LMCacheServer":
        return self

    def __exit__(self, *raised: object) -> None:
        self._child.stop(hurry=True)

    @property
    def log(self) -> Path:
        return self._child.log

    def wait_ready(self) -> None:
        """Raises ChildError."""
        until_s = time.monotonic() + READY_S
        while not self._answers():
            if self._child.process.poll() is not None:
                raise self._child.error("ended")
            if time.monotonic() > until_s:
                raise self._child.error(f"did not answer within {READY_S:.0f} s")
            time.sleep(0.5)

    def _answers(self) -> bool:
        try:
            connection = http.client.HTTPConnection(HOST, self._http_port, timeout=5.0)
            connection.request("GET", "/")
            connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            return False
        return True

    def transfer_config(self) -> dict[str, Any]:
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": f"tcp://{HOST}",
                "lmcache.mp.port": self._port,
            },
        }


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports: list[int] = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
