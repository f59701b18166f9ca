"""A process that has a client forks as if it had none."""

import os
import subprocess
import sys
from pathlib import Path

FORKS = """
import os, socket, sys, threading
from hotkv_client.admin import AdminClient

target = sys.argv[1]
listener = socket.socket(socket.AF_UNIX)
listener.bind(target)
listener.listen()
threading.Thread(target=lambda: AdminClient("unix:" + target).info(), daemon=True).start()
listener.accept()
for _ in range(20):
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
sys.stderr.flush()
os._exit(0)
"""


def test_grpc_does_not_hold_up_a_fork(tmp_path: Path) -> None:
    """Its handlers say so when a call under way keeps them from stopping its threads. Where they
    can stop them, they may wait for them for ever."""
    environment = {
        name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"
    }
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(tmp_path / "socket")],
        env=environment,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0 and b"fork" not in done.stderr, done.stderr
