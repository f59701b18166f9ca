"""docs/wire.md is enough to write a client: one that was written from it alone, without hotkv,
opens a session, stores, finds its blocks in the table, loads and compares."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from demo.processes import Server, runtime_folder
from hotkv_proto.blocks import BlockResult
from hotkv_proto.errors import Reason
from hotkv_proto.versions import NEWEST_VERSION

CLIENT = Path(__file__).with_name("foreign_client.py")
STUBS = Path(__file__).resolve().parents[2] / "proto" / "hotkv_proto" / "v1"
MAX_LINES = 300


@pytest.fixture(scope="module")
def saw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What the foreign client saw of a real server. `hotkv_proto` is an empty package to it, but
    for the stubs."""
    path = tmp_path_factory.mktemp("stubs")
    (path / "hotkv_proto").mkdir()
    (path / "hotkv_proto" / "__init__.py").touch()
    (path / "hotkv_proto" / "v1").symlink_to(STUBS)
    with runtime_folder(64 << 20) as folder, Server(folder, "16MiB") as server:
        server.wait_ready()
        done = subprocess.run(
            [sys.executable, str(CLIENT), str(server.runtime_folder)],
            env={**os.environ, "PYTHONPATH": str(path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_it_speaks_the_newest_version(saw: dict[str, object]) -> None:
    assert saw["version"] == NEWEST_VERSION


def test_what_it_stores_it_finds_in_the_table_and_loads(saw: dict[str, object]) -> None:
    assert (saw["ready before"], saw["ready after"]) == (0, 8)
    assert saw["stored"] == [BlockResult.STORED] * 8
    assert saw["record"] == [True] * 3
    assert (saw["pinned"], saw["loaded"], saw["equal"]) == ([1] * 8, "TRANSFER_STATUS_DONE", True)


def test_a_store_that_it_revokes_commits_nothing(saw: dict[str, object]) -> None:
    assert saw["revoked"] == [BlockResult.ABORTED, False]


def test_refusals_say_what_is_wrong_and_whether_a_retry_helps(saw: dict[str, object]) -> None:
    assert saw["refused"] == [Reason.UNKNOWN_LEASE, "lease_id", False]
    assert saw["failed call"] == {
        "code": "NOT_FOUND",
        "reason": "UNKNOWN_SESSION",
        "domain": "hotkv",
        "field": "session_id",
        "retryable": "false",
    }


def test_the_end_of_the_session_ends_the_link(saw: dict[str, object]) -> None:
    assert saw["link ended"] is True


def test_it_knows_nothing_of_hotkv_but_the_stubs(saw: dict[str, object]) -> None:
    modules = saw["modules"]
    assert isinstance(modules, list) and "hotkv_proto.v1.session_pb2" in modules
    assert all(
        name in ("hotkv_proto", "hotkv_proto.v1") or name.endswith(("_pb2", "_pb2_grpc"))
        for name in modules
    )
    tree = ast.parse(CLIENT.read_text())
    roots = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    others = {root.split(".")[0] for root in roots} - set(sys.stdlib_module_names)
    assert others == {"grpc", "google", "hotkv_proto"} and "hotkv_proto.v1" in roots
    assert len(CLIENT.read_text().splitlines()) <= MAX_LINES
