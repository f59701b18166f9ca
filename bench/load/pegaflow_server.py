"""PegaFlow's server in a child process, and the settings of an engine that uses it, as in its
README: https://github.com/novitalabs/pegaflow."""

import contextlib
import importlib.util
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from bench.load.lmcache_server import HOST, free_ports
from demo.processes import Child

READY_S = 60.0


def is_installed() -> bool:
    return importlib.util.find_spec("pegaflow") is not None


class PegaFlowServer:
    """PegaFlow 0.25, on the first GPU, in a `with` block."""

    def __init__(self, folder: Path, pool_bytes: int) -> None:
        self._port, self._http_port = free_ports(2)
        flags = {
            "addr": f"{HOST}:{self._port}",
            "http-addr": f"{HOST}:{self._http_port}",
            "pool-size": f"{pool_bytes >> 20}mb",
            "devices": "0",
        }
        command = [sys.executable, "-m", "pegaflow._server"]
        for name, value in flags.items():
            command += [f"--{name}", value]
        self._child = Child("pegaflow", command, folder / "pegaflow.log", {})

    def __repr__(self) -> str:
        return f"PegaFlowServer({self._child!r})"

    def __enter__(self) -> "PegaFlowServer":
        return self

    def __exit__(self, *raised: object) -> None:
        self._child.stop(hurry=True)

    def wait_ready(self) -> None:
        """Raises ChildError."""
        until_s = time.monotonic() + READY_S
        while not self._answers():
            if self._child.process.poll() is not None:
                raise self._child.error("ended")
            if time.monotonic() > until_s:
                raise self._child.error(f"did not answer within {READY_S:.0f} s")
            time.sleep(0.2)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            url = f"http://{HOST}:{self._http_port}/health"
            with urllib.request.urlopen(url, timeout=5.0):
                return True
        return False

    def transfer_config(self) -> dict[str, Any]:
        return {
            "kv_connector": "PegaKVConnector",
            "kv_connector_module_path": "pegaflow.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"pegaflow.port": self._port},
        }
