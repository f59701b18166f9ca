"""Another process reads the shared table under a live writer: millions of probes, no torn value."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hotkv_proto import native
from hotkv_server.cache.table.index import BlockIndex
from tests.wire import table_reader
from tests.wire.table_reader import Writer, table_path

__all__ = ["table_path"]


def start_reader(path: Path, num_batches: int, seed: int, how: str) -> subprocess.Popen[str]:
    python_path = os.pathsep.join(entry or os.curdir for entry in sys.path)
    command = [sys.executable, table_reader.__file__, str(path), str(num_batches), str(seed), how]
    environment = os.environ | {"PYTHONPATH": python_path}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize(
    ("how", "num_batches"),
    [
        pytest.param(
            "kernel", 3000, marks=pytest.mark.skipif(not native.available(), reason="needs numba")
        ),
        ("reference", 60),
    ],
)
def test_a_reader_in_another_process_never_sees_a_torn_value(
    table_path: tuple[Path, BlockIndex], how: str, num_batches: int
) -> None:
    path, index = table_path
    writer = Writer(index)
    reader = start_reader(path, num_batches, 11, how)
    try:
        while reader.poll() is None:
            for _ in range(50):
                writer.step()
        output = reader.communicate()[0]
    finally:
        reader.kill()
        reader.wait()
    assert reader.returncode == 0
    counts = json.loads(output)
    print(how, counts, f"changes={writer.changes}")
    index.check_invariants()
    assert counts["torn"] == 0 and counts["wrong"] == 0
    assert counts["probes"] == counts["finds"] == num_batches * table_reader.BATCH
    assert min(counts["ready"], counts["reserved"], counts["misses"]) > 0, (
        "the reader has not seen all there is to see"
    )
    assert writer.changes > 1000 and counts["generations"] > 1, "the writer stood still"
    # A miss of a present block is allowed if the writer was interrupted inside its bucket, and
    # rare.
    assert counts["stable_misses"] <= counts["stable_finds"] // 20
