"""Runs the fuzzer briefly; `make torture` runs it for long."""

import pytest

from tests.robustness.fuzz import fuzz
from tests.robustness.odd_calls import SERVER_STREAMS, UNARY

KINDS = {"ids again", "descriptors"}


@pytest.mark.slow
def test_no_input_breaks_server_or_file_readers() -> None:
    """`fuzz` raises at the first violation."""
    tally = fuzz(6000, 3)
    assert tally.inputs >= 6000
    assert {*UNARY, *SERVER_STREAMS} < set(tally.sent), "a call was never made"
    assert {name.partition(":")[0] for name in tally.sent} >= KINDS, (
        "odd clients of a kind have never come"
    )
    assert all(
        len(tally.answers[name]) > 1
        for name in tally.sent
        if name.startswith(
            ("CacheService", "SparseService", "HintService/Send", "Connect", "WarmStartService")
        )
    )
