"""Tests that sparse/README.md's example runs as printed, without grpcio, protobuf and torch."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCKED = (
    "import sys; sys.modules.update(dict.fromkeys(('grpc', 'google.protobuf', 'torch'), None))\n"
)


def test_example_selects_the_block_sought() -> None:
    (example,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "sparse/README.md").read_text(), re.DOTALL
    )
    assert sum(bool(line.strip()) for line in example.splitlines()) <= 20
    done = subprocess.run([sys.executable, "-c", BLOCKED + example], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"2[56] of 256 blocks, \d+% of the attention mass\n", done.stdout), (
        done.stdout
    )
