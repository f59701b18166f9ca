"""Figures of reads cover only the last reads."""

import pytest

from hotkv_server.tiers.drive.reads import READ_BOUNDS_S, RECENT, TierReads


def test_quantiles_and_the_rate_are_of_the_last_reads_and_sums_of_all() -> None:
    reads = TierReads()
    assert (reads.quantile_s(0.5), reads.bytes_per_s()) == (0.0, 0.0)
    # A read that found no block does not count for the rate.
    reads.add(5.0, 0)
    assert (reads.quantile_s(1.0), reads.bytes_per_s()) == (5.0, 0.0)
    reads.add(0.5, 500)
    assert reads.bytes_per_s() == 1000.0
    reads = TierReads()
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
