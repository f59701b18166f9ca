"""The benchmark of the ledger's claims: its arithmetic."""

import pytest

from bench.savings import Round, figures_of


def test_a_ledger_that_is_right_has_no_error() -> None:
    # 2 s of prefill are not computed, and the request waits .25 s for them.
    rounds = [Round(100, 75, 1.25, 3.0, 2.0, 0.25), Round(100, 75, 0.5, 1.0, 0.5, 0.0)]
    figures = figures_of(rounds)
    assert figures["measured_s"] == 2.5 and figures["measured_net_s"] == 2.25
    assert figures["saved_error_ratio"] == pytest.approx(0.0)
    assert figures["net_error_ratio"] == pytest.approx(0.0)


def test_a_ledger_that_claims_too_much_has_a_positive_error() -> None:
    figures = figures_of([Round(100, 75, 1.0, 2.0, 1.5, 0.0)])
    assert figures["saved_error_ratio"] == pytest.approx(0.5)
