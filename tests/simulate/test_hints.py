"""Hints of a trace beside a plain reading of their definition, and what replays make of them."""

import math

import numpy as np
from hypothesis import given, settings

from hotkv_server.cache.room.policies import LRU
from hotkv_server.simulate.replay import LONG_PAUSE_S, derive_hints, replay
from hotkv_server.simulate.trace import Trace, make_trace
from tests.simulate.naive import chained_requests, distinct
from tests.simulate.traces import Requests


def blocks_of(trace: Trace, request: int) -> list[int]:
    return trace.blocks[trace.starts[request] : trace.starts[request + 1]].tolist()


@settings(max_examples=60)
@given(requests=chained_requests(max_blocks=5))
def test_pauses_end_with_the_next_request_that_has_all_blocks(requests: Requests) -> None:
    trace = make_trace("t", requests)
    hints = derive_hints(trace)
    for request in range(trace.num_requests):
        wanted = blocks_of(trace, request)
        wanted = wanted[: max(1, len(wanted) - 1)]
        later = [
            number
            for number in range(request + 1, trace.num_requests)
            if blocks_of(trace, number)[: len(wanted)] == wanted
        ]
        if later:
            pause_s = trace.times_s[later[0]] - trace.times_s[request]
            # Another request may have taken this one's place as what the session waits with.
            assert hints.pauses_s[request] in (pause_s, math.inf)
        else:
            assert hints.pauses_s[request] == math.inf
        assert 0 <= hints.own_from[request] <= len(blocks_of(trace, request))


def test_what_others_used_is_not_told() -> None:
    """Two sessions share two blocks; the first one's second turn is its last."""
    trace = make_trace(
        "t",
        [
            (0.0, [1, 2, 3, 4]),
            (1.0, [1, 2, 5, 8]),
            (10.0, [1, 2, 3, 4, 6]),
            (1.0 + LONG_PAUSE_S, [1, 2, 5, 8, 7]),
        ],
    )
    hints = derive_hints(trace)
    assert hints.pauses_s.tolist() == [10.0, LONG_PAUSE_S, math.inf, math.inf]
    assert hints.own_from.tolist() == [0, 2, 2, 2]
    assert [hints.cold_from(request) for request in range(4)] == [None, 2, 2, 2]


def test_a_replay_gives_up_what_has_ended() -> None:
    """A session that has ended makes room for one that goes on, though it was used later."""
    going_on, ended = list(range(10)), list(range(100, 110))
    requests: Requests = [
        (0.0, going_on),
        (1.0, ended),
        (2.0, list(range(200, 210))),
        (3.0, [*going_on, 10]),
    ]
    trace = make_trace("t", [(time_s, distinct(ids)) for time_s, ids in requests])
    plain = replay(trace, 20, LRU)
    told = replay(trace, 20, LRU, hints=derive_hints(trace))
    assert plain.prefix.tolist() == [0, 0, 0, 0]
    assert told.prefix.tolist() == [0, 0, 0, 10]
    assert np.array_equal(replay(trace, 20, LRU).prefix, plain.prefix)
