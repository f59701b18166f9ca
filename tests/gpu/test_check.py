"""`bench/gpu/check.sh` sums up the output of its parts. Needs no GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.figures import SPARSE_TARGETS, Figure, read
from bench.gpu.shape import Shape
from demo.processes import ROOT


@pytest.mark.parametrize(
    ("figure", "met"),
    [
        (Figure("a", 0.9, 0.9), True),
        (Figure("a", 0.89, 0.9), False),
        (Figure("a", 300, 300, True), True),
        (Figure("a", 301, 300, True), False),
        (Figure("a", 5), None),
    ],
)
def test_targets(figure: Figure, met: bool | None) -> None:
    assert figure.met is met


def test_the_table_has_all_that_came_to_an_end(tmp_path: Path) -> None:
    (tmp_path / "transfer.json").write_text(
        json.dumps(
            {"figures": [{"name": "load", "measured": 0.5, "target": 0.7, "at_most": False}]}
        )
    )
    (tmp_path / "sparse.json").write_text(
        json.dumps(dict.fromkeys(SPARSE_TARGETS, 0.5) | {"copy_gb_s": 4000})
    )
    (tmp_path / "methods.json").write_text("{broken")
    (tmp_path / "latency.json").write_text("")
    assert [figure.met for figure in read(tmp_path / "sparse.json")] == [True, False, False]
    command = [sys.executable, "-m", "bench.gpu.figures", str(tmp_path)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert (
        "methods: no figures" in said
        and "latency: no figures" in said
        and ">= 0.7" in said
        and "NO" in said
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (
        summary["transfer"][0]["met"] is False
        and len(summary["sparse"]) == 3
        and summary["methods"] == []
    )


@pytest.mark.parametrize("layout", ["BLHNC", "LBHNC", "LKBNHC", "LHBNC"])
def test_shapes_use_every_byte_once(layout: str) -> None:
    shape = Shape(64, 3, 5, layout)
    seen = []
    for tensor in shape.tensors():
        for block in range(shape.num_blocks):
            for offset in tensor.run_offsets().tolist():
                at = tensor.base_offset_bytes + block * tensor.block_stride_bytes + offset
                seen += range(at, at + tensor.run_bytes)
    assert sorted(seen) == list(range(shape.num_bytes))


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("--help",), 0, "--wheels DIR"),
        (("--wheels",), 2, "--wheels needs a folder"),
        (("--what",), 2, "unknown argument --what"),
    ],
)
def test_the_command_line(arguments: tuple[str, ...], status: int, says: str) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "bench/gpu/check.sh"), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == status and says in done.stdout + done.stderr
