"""A request's way through the scheduler side, from arrival to end: what is asked, loaded, stored
and given back at each hook. The real parts over a double of the server, without an engine."""

from types import SimpleNamespace
from typing import Any

import pytest

from hotkv_proto.blocks import NO_RETENTION
from hotkv_vllm.identity.adapters import Standing
from hotkv_vllm.scheduler.request import ASK_AGAIN, NO_HIT, Phase
from hotkv_vllm.scheduler.sharing import LINKS_PATIENCE_S
from tests.vllm.desks import (
    LONG,
    Memory,
    blocks,
    desk,
    ended,
)
from tests.vllm.parts import TOKENS, request

__all__ = ["desk"]

# ------------------------------------------------------------------------------------------ arrival


def test_a_request_that_arrives_is_known_and_its_hit_looked_up(desk: Any) -> None:
    one = desk()
    one.parts.put("a", range(4))
    state = one.arrive(request("a", LONG))
    assert state.arrived_s == one.now_s and state.hit.hint is not None
    assert state.retention == NO_RETENTION and not one.parts.count("unserved_requests")


@pytest.mark.parametrize("counts_media", [True, False])
def test_media_are_shared_where_vllm_hashes_their_content(desk: Any, counts_media: bool) -> None:
    """Others than those with media are shared in any case."""
    one = desk(counts_media=counts_media)
    for first, name, media in ((1, "text", []), (6, "image", ["image"])):
        table = list(range(first, first + 5))
        one.parts.put(name, range(4))
        asks = request(name, LONG, computed=LONG)
        asks.mm_features = media
        one.arrive(asks)
        is_shared = not (media and counts_media)
        assert one.hit(asks) == (4 * TOKENS if is_shared else 0)
        one.desk.allocated(asks, blocks(table), 0)
        one.desk.others.step({name}, False)
        one.parts.drop(name, range(4))
        one.desk.finished(asks, [table])
        assert bool(one.tails()) == is_shared
    assert not one.desk.loads.abandoned


@pytest.mark.parametrize(
    "absent, up, counted", [(True, True, 1), (True, False, 0), (False, True, 0)]
)
def test_requests_that_a_lacking_worker_can_not_serve_are_counted(
    desk: Any, absent: bool, up: bool, counted: int
) -> None:
    one = desk()
    one.sharing.links.told({0: "gone" if absent else ""}, one.now_s)
    one.parts.server.up = up
    one.arrive(request("a", LONG))
    assert one.parts.count("unserved_requests") == counted


# -------------------------------------------------------------------------------------------- match


def test_a_request_waits_a_moment_for_workers_that_may_be_back(desk: Any) -> None:
    one = desk()
    one.sharing.links.told({0: "gone"}, one.now_s, is_connected=False)
    asks = request("a", LONG)
    one.arrive(asks)
    assert one.desk.match(asks, 0) == ASK_AGAIN
    one.now_s += LINKS_PATIENCE_S
    assert one.desk.match(asks, 0) == NO_HIT


class WithAdapter:
    """A request of an adapter; vLLM compares requests by identity."""

    def __init__(self, name: str) -> None:
        vars(self).update(vars(request(name, LONG)))
        self.lora_request = SimpleNamespace(
            lora_name="one", lora_path="/one", lora_int_id=1, load_inplace=False
        )


@pytest.mark.parametrize(
    "standing, up, answer",
    [
        (Standing.WAIT, True, ASK_AGAIN),
        (Standing.WAIT, False, NO_HIT),
        (Standing.NOT_YET, True, NO_HIT),
        (Standing.NEVER, True, NO_HIT),
        (Standing.KNOWN, True, (4 * TOKENS, True)),
    ],
)
def test_a_request_of_an_adapter_reads_once_its_bytes_are_known(
    desk: Any, monkeypatch: pytest.MonkeyPatch, standing: Standing, up: bool, answer: Any
) -> None:
    memory = Memory()
    one = desk(memory=memory)
    one.parts.put("a", range(4))
    asks = WithAdapter("a")
    state = one.arrive(asks)
    # What has no name yet is neither looked up nor followed.
    assert not one.parts.server.count("probe") and not memory.told
    monkeypatch.setattr(one.adapters, "standing", lambda *_: standing)
    monkeypatch.setattr(one.adapters, "keys", lambda asked: asked.block_hashes)
    one.parts.server.up = up
    state.hit.lease_id = "" if standing is Standing.KNOWN else "held"
    assert one.desk.match(asks, 0) == answer
    is_known = standing is Standing.KNOWN
    assert one.parts.server.released == ([] if is_known else ["held"])
    assert memory.told == ([("arrived", "a")] if is_known else [])
    assert one.parts.server.count("acquire") == is_known


# ---------------------------------------------------------------------------------------- allocated


def test_a_load_is_begun_in_the_blocks_that_vllm_gives(desk: Any) -> None:
    one = desk()
    one.load()
    (job,) = one.desk.loads.jobs.values()
    assert job.runs[0].block_ids.tolist() == [1, 2, 3, 4]
    assert one.desk.loads.awaited == {"a"} and one.parts.count("loads") == 1
    assert one.desk.written.take() == {1, 2, 3, 4, 5}
    # Whatever else may be filling them, nothing of it is stored yet.
    assert not one.desk.others.may_store("a")
    one.cache.reports.send(one.now_s)
    (report,) = dict(one.parts.server.calls)["report_requests"]
    assert (report.hit_tokens, report.device_hit_tokens) == (4 * TOKENS, 0)


def test_more_blocks_for_a_request_that_loads_leave_its_load_alone(desk: Any) -> None:
    one = desk()
    asks = one.load()
    one.desk.allocated(asks, blocks([1, 2, 3, 4, 5]), 0)
    assert one.desk.states["a"].is_loading and not one.parts.server.released


@pytest.mark.parametrize("why", ["unknown", "no cache", "no lease"])
def test_a_load_that_can_not_be_is_reported_as_failed(desk: Any, why: str) -> None:
    one = desk()
    asks = request("a", LONG)
    if why != "unknown":
        one.arrive(asks)
    if why == "no cache":
        one.sharing.cache = None
    one.desk.allocated(asks, blocks([1, 2]), TOKENS)
    assert one.desk.loads.abandoned == ["a"] and one.desk.loads.awaited == {"a"}
    assert not one.desk.loads.jobs and not one.parts.count("loads")
    if why == "no lease":
        assert one.desk.states["a"].hit.failed_loads == 1


def test_a_load_that_can_not_be_gives_its_lease_back(desk: Any) -> None:
    one = desk()
    one.parts.put("a", range(4))
    asks = request("a", LONG)
    state = one.arrive(asks)
    one.hit(asks)
    one.desk.allocated(asks, blocks([1]), 4 * TOKENS)
    assert one.desk.loads.abandoned == ["a"] and state.hit.phase is Phase.IDLE
    assert len(one.parts.server.released) == 1 and state.hit.failed_loads == 1


# ---------------------------------------------------------------------------------------------- end


@pytest.mark.parametrize(
    "prompt, decoded, computed, tail",
    [
        # A prompt is stored whole.
        (32, 0, 32, [[1, 2]]),
        # The last token that was sampled may have another's KV.
        (16, 16, 32, [[1]]),
        (16, 17, 33, [[1, 2]]),
        (16, 15, 31, [[1]]),
        # Only what is computed.
        (32, 0, 31, [[1]]),
        (16, 33, 32, [[1, 2]]),
    ],
)
def test_blocks_that_are_full_at_the_end_are_stored(
    desk: Any, prompt: int, decoded: int, computed: int, tail: list[list[int]]
) -> None:
    one = desk()
    asks = request("a", prompt, decoded=decoded, computed=computed)
    one.arrive(asks)
    assert ended(one, asks) == tail


@pytest.mark.parametrize(
    "why", ["consumer", "reset", "absent worker", "granted", "failed load", "others' load"]
)
def test_what_may_not_be_stored_is_not_stored_at_the_end(desk: Any, why: str) -> None:
    one = desk(stores=why != "consumer")
    asks = request("a", LONG, computed=LONG)
    state = one.arrive(asks)
    match why:
        case "reset":
            state.store.may_store = False
        case "absent worker":
            one.sharing.links.told({0: "gone"}, one.now_s)
        case "granted":
            state.hit.phase = Phase.GRANTED
        case "failed load":
            one.parts.finder.failed_loads.add("a")
        case "others' load":
            one.desk.others.admitted("a")
    assert ended(one, asks) == []
    assert one.desk.others.may_store("a") and "a" not in one.parts.finder.failed_loads


def test_what_was_known_of_a_request_is_forgotten_at_its_end(desk: Any) -> None:
    memory = Memory()
    one = desk(memory=memory)
    asks = WithAdapter("a")
    one.arrive(asks)
    one.desk.match(asks, TOKENS)
    assert one.adapters._live and one.desk.written._matched_tokens
    one.parts.exactness.is_watching = True
    one.parts.exactness._exact_tokens["a"] = 5
    one.desk.finished(asks, [[1]])
    assert not one.desk.written._matched_tokens and not one.parts.exactness._exact_tokens
    assert not one.adapters._live and memory.told == [("ended", "a")]
    assert not one.edge.broken


# ------------------------------------------------------------------------------------ sparse decode


@pytest.mark.parametrize("adapter", [False, True])
def test_the_memory_follows_requests_that_have_a_name(desk: Any, adapter: bool) -> None:
    memory = Memory()
    one = desk(memory=memory)
    one.desk.arrived(WithAdapter("a") if adapter else request("a", LONG))
    assert memory.told == ([] if adapter else [("arrived", "a")])
    one.sharing.cache = None
    one.desk.arrived(request("b", LONG))
    assert len(memory.told) == (0 if adapter else 1) and not one.edge.broken


class Rows(Memory):
    """Stands for the names of rows, which end without a time."""

    def ended(self, request_id: str, now_s: float = 0.0) -> None:
        super().ended(request_id, now_s)


def test_rows_follow_every_request(desk: Any) -> None:
    one = desk()
    one.desk.rows = told = Rows()
    one.sharing.cache = None
    asks = request("a", LONG)
    one.desk.arrived(asks)
    one.desk.finished(asks, [[]])
    assert told.told == [("arrived", "a"), ("ended", "a")] and not one.edge.broken


# ------------------------------------------------------------------------------------- broken hooks


@pytest.mark.parametrize("how", ["request_broke", "end_broke"])
def test_a_request_whose_hook_broke_is_no_longer_known(desk: Any, how: str) -> None:
    one = desk()
    asks = one.load()
    lease_id = one.desk.states["a"].hit.lease_id
    one.desk.written.matched(asks.request_id, 0)
    one.parts.exactness._exact_tokens["a"] = 5
    one.parts.finder.failed_loads.add("a")
    getattr(one.desk, how)("a")
    assert not one.desk.states and one.desk.loads.cancelled == ["a"]
    assert one.parts.server.released == [lease_id]
    assert not one.desk.written._matched_tokens and not one.parts.exactness._exact_tokens
    is_over = how == "end_broke"
    assert one.desk.others.may_store("a") == is_over
    assert ("a" not in one.parts.finder.failed_loads) == is_over
    # Again, of nothing; and of one that holds nothing.
    getattr(one.desk, how)("a")
    one.arrive(request("b", LONG))
    getattr(one.desk, how)("b")
    assert one.desk.loads.cancelled == ["a"] and one.parts.server.released == [lease_id]


@pytest.mark.parametrize("how", ["request_broke", "end_broke"])
def test_a_hook_that_broke_without_a_cache_gives_nothing_back(desk: Any, how: str) -> None:
    one = desk()
    one.load()
    one.sharing.cache = None
    getattr(one.desk, how)("a")
    assert not one.desk.states and not one.parts.server.released


@pytest.mark.parametrize("external", [0, TOKENS])
def test_a_broken_allocation_loads_nothing_and_nothing_is_safe(desk: Any, external: int) -> None:
    one = desk()
    one.arrive(request("a", LONG))
    assert not one.desk.lost_track
    one.desk.alloc_broke("a", external)
    assert one.desk.lost_track and not one.desk.others.may_store("a")
    assert one.desk.loads.abandoned == (["a"] if external else [])


@pytest.mark.parametrize("why", ["hook broke", "no cache", "no state"])
def test_a_failed_load_is_forgotten_with_its_request_whatever_hotkv_knows_of_it(
    desk: Any, why: str
) -> None:
    """It would make all others give their hits up for ever."""
    one = desk()
    asks = request("a", LONG)
    one.arrive(asks)
    one.desk.failed_loads.add("a")
    match why:
        case "hook broke":
            one.desk.request_broke("a")
        case "no cache":
            one.sharing.cache = None
        case "no state":
            one.desk.states.clear()
    # vLLM keeps its blocks reserved, and it stands in others' way, until it has moved once.
    assert one.desk.match(asks, 0) == ASK_AGAIN and "a" in one.desk.failed_loads
    assert one.desk.match(asks, 0) == NO_HIT
    one.desk.finished(asks, [[1]])
    assert one.desk.failed_loads.is_empty
