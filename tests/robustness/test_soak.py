"""Runs the soak (`tests.robustness.soak`) briefly."""

import pytest

from demo.processes import runtime_folder
from tests.robustness.soak import Counts, busy_loops, soak

WANTED = {"loaded_blocks": 500, "cancelled_stores": 2, "pages": 10, "sessions": 3}


def has_done(counts: Counts) -> bool:
    return all(counts[name] >= least for name, least in WANTED.items())


@pytest.mark.long
def test_no_server_dies_of_mixed_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONMALLOC", "debug")
    with runtime_folder(256 << 20) as folder, busy_loops(1):
        deaths, counts = soak(folder, has_done, clients=3, seed=5)
    assert deaths == 0 and counts["wrong"] == 0, counts
