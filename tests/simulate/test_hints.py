"""Hints of a trace agree with a plain reading of their definition, and replays use them."""

import math

import numpy as np
from hypothesis import given, settings

from hotkv_server.cache.room.policies import LRU
from hotkv_server.simulate.replay import LONG_PAUSE_S, derive_hints, replay
from hotkv_server.simulate.trace import make_trace
from tests.simulate.naive import chained_requests
from tests.simulate.traces import Requests


@settings(max_examples=60)
@given(requests=chained_requests(max_blocks=5))
def test_pauses_end_with_the_next_request_that_has_all_blocks(requests: Requests) -> None:
    trace = make_trace("t", requests)
    hints, listed = derive_hints(trace), np.split(trace.blocks, trace.starts[1:-1])
    for request, blocks in enumerate(listed):
        wanted = blocks[: max(1, len(blocks) - 1)].tolist()
        later = (
            at
            for at in range(request + 1, len(listed))
            if listed[at][: len(wanted)].tolist() == wanted
        )
        # If another request is now the session's last one, the session's pause is unknown (inf).
        pauses_s = {trace.times_s[at] - trace.times_s[request] for at in [*later][:1]}
        assert hints.pauses_s[request] in pauses_s | {math.inf}
        assert 0 <= hints.own_from[request] <= len(blocks)


def test_what_others_used_is_not_told() -> None:
    """Two sessions share two blocks; the second turn of the first is its last."""
    first, second = [1, 2, 3, 4], [1, 2, 5, 8]
    begin = [(0.0, first), (1.0, second)]
    turns = [(10.0, [*first, 6]), (1.0 + LONG_PAUSE_S, [*second, 7])]
    hints = derive_hints(make_trace("t", begin + turns))
    assert hints.pauses_s.tolist() == [10.0, LONG_PAUSE_S, math.inf, math.inf]
    assert hints.own_from.tolist() == [0, 2, 2, 2]
    assert [hints.cold_from(request) for request in range(4)] == [None, 2, 2, 2]


def test_a_replay_gives_up_what_has_ended() -> None:
    """With hints, evicts an ended session before an older session that continues."""
    going_on, ended, other = ([*range(first, first + 10)] for first in (0, 100, 200))
    trace = make_trace("t", [*enumerate([going_on, ended, other, [*going_on, 10]])])
    assert replay(trace, 20, LRU).prefix.tolist() == [0, 0, 0, 0]
    told = replay(trace, 20, LRU, hints=derive_hints(trace))
    assert told.prefix.tolist() == [0, 0, 0, 10]
