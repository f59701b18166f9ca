"""docs/deployments.md names a test in each row, and each of these exists."""

import itertools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "deployments.md"
NAMED = re.compile(r"`((?:tests/)?[\w/]*test_\w+\.py)(?:::(\w+))?`")


def test_each_row_names_tests_that_exist() -> None:
    rows, names_tests = [], False
    for before, line in itertools.pairwise(PAGE.read_text().splitlines()):
        if not line.startswith("|"):
            continue
        if set(line) <= set("|- "):
            names_tests = before.rstrip(" |").endswith("test")
        elif before.startswith("|") and names_tests:
            rows.append(line)
    assert len(rows) > 40
    for row in rows:
        assert re.search(r"\| (none|all) \|$", row) or NAMED.search(row), f"no test is named: {row}"
        for file, test in NAMED.findall(row):
            path = ROOT / file if file.startswith("tests/") else ROOT / "tests" / "vllm" / file
            found = path if path.exists() else next((ROOT / "tests").rglob(Path(file).name), path)
            assert found.exists(), f"{file} is not there"
            assert not test or f"def {test}(" in found.read_text(), f"{file} has no {test}"
