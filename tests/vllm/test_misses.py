"""A miss counts only if a cache could have had a full block beyond the device's hit."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotkv_proto.reports import Miss
from tests.vllm.harness import prompt
from tests.vllm.oracle import reports_to
from tests.vllm.parts import FULL, TOKENS, WINDOW, Parts, request
from tests.vllm.tiny import BLOCK_TOKENS


@pytest.mark.parametrize(
    ("num_tokens", "on_device", "in_server", "counted"),
    [
        # The last token is computed, so its block can't.
        (1, 0, 0, {}),
        (BLOCK_TOKENS, 0, 0, {}),
        (BLOCK_TOKENS + 1, 0, 0, {"miss": 1}),
        (3 * BLOCK_TOKENS, 0, 0, {"miss": 1}),
        # vLLM's own cache serves all, or all but the last block.
        (3 * BLOCK_TOKENS, 3, 0, {}),
        (3 * BLOCK_TOKENS, 2, 0, {}),
        (3 * BLOCK_TOKENS + 1, 3, 0, {}),
        (3 * BLOCK_TOKENS + 1, 2, 0, {"miss": 1}),
        # A short hit is no miss.
        (3 * BLOCK_TOKENS + 1, 0, 1, {"hit": 1}),
        (3 * BLOCK_TOKENS + 1, 1, 2, {"hit": 1}),
        (3 * BLOCK_TOKENS + 1, 2, 2, {"miss": 1}),
    ],
)
def test_unanswerable_misses_do_not_count(
    engine: Any,
    server: Any,
    num_tokens: int,
    on_device: int,
    in_server: int,
    counted: dict[str, int],
) -> None:
    """on_device, in_server: number of first blocks."""
    one, tokens = engine(), prompt(1, num_tokens)
    if in_server:
        one.fill(tokens[: in_server * BLOCK_TOKENS + 1])
        one.drop_local()
    kept = dict(server.blocks)
    if on_device:
        one.fill(tokens[: on_device * BLOCK_TOKENS])
    server.blocks = kept
    one.counters.clear()
    one.generate("asks", tokens, 2)
    one.generate("reports", prompt(2, 5), 2)
    names = {"miss": "miss_requests", "hit": "hit_requests"}
    assert {
        name: one.counters[key] for name, key in names.items() if key in one.counters
    } == counted


def test_request_that_may_not_read_isnt_missing(engine: Any, server: Any) -> None:
    one = engine()
    request = one.add("a", prompt(1, 100), 2)
    request.skip_reading_prefix_cache = True
    one.run()
    assert "miss_requests" not in one.counters
    assert reports_to(server)[-1].miss is Miss.NOT_ASKED


@given(
    st.integers(1, 6 * TOKENS),
    st.integers(0, 6),
    st.sets(st.integers(0, 6)),
    st.sampled_from([(FULL,), (FULL, WINDOW)]),
    st.booleans(),
    st.booleans(),
)
def test_a_miss_counts_like_a_naive_count(
    num_tokens: int,
    on_device: int,
    in_server: set[int],
    specs: Any,
    has_drafter: bool,
    has_table: bool,
) -> None:
    parts = Parts(specs, drafts=[0] if has_drafter else [])
    parts.server.table = has_table
    for group in range(len(specs)):
        parts.put("a", sorted(in_server), group)
    on_device = min(on_device, (num_tokens - 1) // TOKENS)
    # A hit may end after full blocks without the last token; with a drafter the next must be
    # full too.
    ends = [
        end
        for end in range(1, num_tokens // TOKENS + 1)
        if end * TOKENS < num_tokens and (not has_drafter or (end + 1) * TOKENS <= num_tokens)
    ]
    state = parts.state(request("a", num_tokens))
    parts.finder.arrive(state, parts.clock)
    hit_tokens = parts.hit(state, on_device * TOKENS)
    could_hit = any(end > on_device for end in ends)
    assert parts.count("miss_requests") == (could_hit and not hit_tokens)
    assert could_hit or (not hit_tokens and state.hit.miss is Miss.PARTIAL_BLOCK)
