"""The benchmark of compression on the disk reads what it has written, and counts places as a disk
does."""

import asyncio
from pathlib import Path

import pytest

from bench import disk_hits
from tests.tiers.test_compression import keys_and_values

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def test_both_tiers_give_back_what_they_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_hits, "NUM_BYTES", 8 * MIB)
    monkeypatch.setattr(disk_hits, "BUFFER_BYTES", 2 * MIB)
    monkeypatch.setattr(disk_hits, "ROUND_S", 0.01)
    content = keys_and_values(5 * 64 * KIB, 1)
    figures = asyncio.run(disk_hits.ratios(tmp_path, 2, content, 64 * KIB))
    assert set(figures) == {
        "disk_hit_tokens_ratio",
        "disk_hit_tokens_per_s_auto",
        "disk_hit_tokens_per_s_off",
        "disk_write_tokens_ratio",
    }
    assert all(value > 0 for value in figures.values())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "slot_kib, ratio", [(64, 1.23), (128, 1.28), (360, 1.30), (1024, 1.30), (2048, 1.30)]
)
def test_a_disk_holds_as_many_blocks_more_as_the_documentation_says(
    slot_kib: int, ratio: float
) -> None:
    assert disk_hits.blocks_ratio(slot_kib * KIB, 100 * GIB) == pytest.approx(ratio, abs=0.005)
