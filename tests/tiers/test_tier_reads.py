"""Figures of reads, and how a client shows them."""

from typing import Any

import pytest

from hotkv_client.command.tables import tier_rows
from hotkv_server.tiers.drive.reads import READ_BOUNDS_S, RECENT, TierReads


def test_quantiles_and_the_rate_are_of_the_last_reads_and_sums_of_all() -> None:
    reads = TierReads()
    assert (reads.quantile_s(0.5), reads.bytes_per_s()) == (0.0, 0.0)
    for _ in range(RECENT):
        reads.add(20.0, 1)
    for at in range(RECENT):
        reads.add(0.001 * (1 + at % 100), 1000)
    assert 0.045 < reads.quantile_s(0.5) < 0.055
    assert 0.09 < reads.quantile_s(0.99) <= 0.1
    assert reads.bytes_per_s() == pytest.approx(1000 / 0.05, rel=0.05)
    assert reads.num_reads == reads.times_s.count == 2 * RECENT
    assert reads.times_s.counts[READ_BOUNDS_S.index(30.0)] == RECENT
    assert reads.times_s.sum > 20 * RECENT
    reads.add(31.0, 0)
    assert reads.times_s.counts[-1] == 1


def test_a_read_that_found_nothing_says_nothing_about_the_rate() -> None:
    reads = TierReads()
    reads.add(5.0, 0)
    assert reads.bytes_per_s() == 0.0 and reads.quantile_s(1.0) == 5.0
    reads.add(0.5, 500)
    assert reads.bytes_per_s() == 1000.0


def row(**changes: Any) -> dict[str, Any]:
    does = {
        "is_shared": True,
        "is_up": False,
        "problem": "connection refused",
        "asked_block_count": 200,
        "hit_block_count": 50,
        "written_byte_count": 2048,
        "read_byte_count": 1024,
        "read_count": 3,
        "read_p50_s": 0.0012,
        "read_p99_s": 0.25,
        "read_bytes_per_s": 1e6,
        "queued_byte_count": 0,
        "waiting_block_count": 7,
        "lost_block_count": 1,
        "failed_block_count": 2,
        "budget_byte_count": 0,
        "budget_left_byte_count": 0,
    }
    return {
        "name": "valkey",
        "used_byte_count": 0,
        "capacity_byte_count": 0,
        "activity": {**does, **changes},
    }


def test_a_row_says_unknown_rather_than_zero() -> None:
    empty, head, line, problem = "\n".join(tier_rows([{"name": "host"}, row()])).splitlines()
    assert (empty, problem) == ("", "valkey: connection refused")
    assert head.split()[:3] == ["tier", "state", "used"]
    assert " ".join(line.split()) == (
        "valkey DOWN - - 25.0% 2.0 KiB 1.0 KiB 1.2 250.0 0 B 7 1 2 no limit"
    )
    fresh = row(is_up=True, problem="", asked_block_count=0, read_count=0)
    assert " ".join(tier_rows([fresh])[1].splitlines()[1].split()).startswith(
        "valkey up - - - 2.0 KiB 1.0 KiB - -"
    )
    spent = row(budget_byte_count=10, problem="", asked_block_count=0)
    assert tier_rows([spent])[1].endswith("0 B")
    assert tier_rows([{"name": "host"}]) == []
