"""Tests that docs/wire.md suffices to write a client."""

import json
import os
import subprocess
import sys
from pathlib import Path

from demo.processes import Server, runtime_folder
from hotkv_proto.blocks import BlockResult
from hotkv_proto.errors import Reason
from hotkv_proto.versions import NEWEST_VERSION

CLIENT = Path(__file__).with_name("foreign_client.py")
STUBS = Path(__file__).resolve().parents[2] / "proto" / "hotkv_proto" / "v1"


def test_it_stores_finds_loads_revokes_and_is_refused(tmp_path: Path) -> None:
    """The client can import only the stubs of `hotkv_proto`."""
    (tmp_path / "hotkv_proto").mkdir()
    (tmp_path / "hotkv_proto" / "__init__.py").touch()
    (tmp_path / "hotkv_proto" / "v1").symlink_to(STUBS)
    with runtime_folder(64 << 20) as folder, Server(folder, "16MiB") as server:
        server.wait_ready()
        done = subprocess.run(
            [sys.executable, str(CLIENT), str(server.runtime_folder)],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    saw = json.loads(done.stdout)
    modules = saw.pop("modules")
    assert "hotkv_proto.v1.session_pb2" in modules
    for name in set(modules) - {"hotkv_proto", "hotkv_proto.v1"}:
        assert name.endswith(("_pb2", "_pb2_grpc")), "it knows nothing of hotkv but the stubs"
    assert saw == {
        "version": NEWEST_VERSION,
        "ready before": 0,
        "stored": [BlockResult.STORED] * 8,
        "ready after": 8,
        "record": [True] * 3,
        "pinned": [1] * 8,
        "loaded": "TRANSFER_STATUS_DONE",
        "equal": True,
        "revoked": [BlockResult.ABORTED, False],
        "refused": [Reason.UNKNOWN_LEASE, "lease_id", False],
        "failed call": {
            "code": "NOT_FOUND",
            "reason": "UNKNOWN_SESSION",
            "domain": "hotkv",
            "field": "session_id",
            "retryable": "false",
        },
        "link ended": True,
    }
