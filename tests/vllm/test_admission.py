"""A request's way through the scheduler side, from arrival to end: what is asked, loaded, stored
and given back at each hook. The real parts over a double of the server, without an engine."""

from types import SimpleNamespace
from typing import Any

import pytest

from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_sparse.config import SparseConfig
from hotkv_vllm.compat import NULL_BLOCK
from hotkv_vllm.identity.adapters import Standing
from hotkv_vllm.scheduler.request import ASK_AGAIN, NO_HIT, Phase
from hotkv_vllm.scheduler.sharing import LINKS_PATIENCE_S, Joining
from hotkv_vllm.sparse import rows
from hotkv_vllm.sparse.rows import SparseRows
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


def test_hints_of_a_request_are_read(desk: Any) -> None:
    asks = request("a", LONG)
    asks.kv_transfer_params = {"hotkv.priority": 2}
    assert desk().arrive(asks).retention == Retention(priority=2)


def test_without_a_cache_no_request_is_known(desk: Any) -> None:
    one = desk()
    asks = request("a", LONG)
    one.sharing.cache = None
    assert one.arrive(asks) is None
    assert one.desk.match(asks, 0) == NO_HIT
    one.desk.allocated(asks, blocks([1]), 0)
    one.desk.finished(asks, [[1]])
    assert not one.desk.loads.abandoned and not one.tails()


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


@pytest.mark.parametrize("why", ["producer", "absent worker", "request"])
def test_who_may_not_read_is_answered_no_hit(desk: Any, why: str) -> None:
    one = desk(loads=why != "producer")
    one.parts.put("a", range(4))
    asks = request("a", LONG)
    if why == "absent worker":
        one.sharing.links.told({0: "gone"}, one.now_s)
    asks.skip_reading_prefix_cache = why == "request"
    state = one.arrive(asks)
    assert state.hit.hint is None and one.hit(asks) == 0
    assert not one.parts.server.count("acquire")


# -------------------------------------------------------------------------------------------- match


def test_a_hit_is_offered_and_reported(desk: Any) -> None:
    one = desk()
    one.parts.put("a", range(4))
    asks = request("a", LONG)
    state = one.arrive(asks)
    assert one.hit(asks, TOKENS) == 3 * TOKENS
    assert state.use.device_hit_tokens == TOKENS
    assert one.desk.written._matched_tokens == {"a": TOKENS}


def test_a_request_that_is_not_known_is_no_hit(desk: Any) -> None:
    one = desk()
    one.parts.put("a", range(4))
    assert one.desk.match(request("a", LONG), 0) == NO_HIT


def test_while_ranks_have_not_said_what_they_store_requests_wait(desk: Any) -> None:
    one = desk()
    one.sharing.joining = Joining(1)
    asks = request("a", LONG)
    one.arrive(asks)
    assert one.desk.match(asks, 0) == ASK_AGAIN
    assert one.sharing.joining.take_requests() == [asks]
    one.now_s += 100
    assert one.desk.match(asks, 0) == NO_HIT
    one.sharing.joining.arrived(asks)
    one.desk.finished(asks, [[]])
    assert not one.sharing.joining.take_requests()


def test_a_request_waits_a_moment_for_workers_that_may_be_back(desk: Any) -> None:
    one = desk()
    one.sharing.links.told({0: "gone"}, one.now_s, is_connected=False)
    asks = request("a", LONG)
    one.arrive(asks)
    assert one.desk.match(asks, 0) == ASK_AGAIN
    one.now_s += LINKS_PATIENCE_S
    assert one.desk.match(asks, 0) == NO_HIT


def test_a_request_whose_load_failed_steps_aside_once(desk: Any) -> None:
    one = desk(max_load_retries=5)
    asks = request("a", LONG)
    one.arrive(asks)
    one.parts.finder.load_failed(one.desk.states["a"])
    assert one.desk.match(asks, 0) == ASK_AGAIN and one.desk.match(asks, 0) == NO_HIT


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


def test_null_blocks_are_not_loaded(desk: Any) -> None:
    one = desk()
    one.parts.put("a", range(4))
    asks = request("a", LONG)
    one.arrive(asks)
    one.hit(asks)
    one.desk.allocated(asks, blocks([NULL_BLOCK, 2, 3, 4]), 4 * TOKENS)
    assert one.desk.loads.jobs["a"].runs[0].block_ids.tolist() == [2, 3, 4]


def test_a_hit_that_vllm_does_not_take_is_given_back(desk: Any) -> None:
    one = desk()
    one.parts.put("a", range(4))
    asks = request("a", LONG)
    state = one.arrive(asks)
    one.hit(asks)
    one.desk.allocated(asks, blocks([1]), 0)
    assert state.hit.phase is Phase.IDLE and len(one.parts.server.released) == 1
    assert not one.desk.loads.jobs and not one.parts.count("loads")
    assert not one.desk.loads.abandoned


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


def test_a_load_is_cancelled_when_its_request_ends(desk: Any) -> None:
    one = desk()
    asks = one.load()
    lease_id = one.desk.states["a"].hit.lease_id
    asks.num_computed_tokens = 4 * TOKENS
    assert ended(one, asks) == []
    assert one.desk.loads.cancelled == ["a"] and one.parts.server.released == [lease_id]


def test_a_request_that_does_not_load_cancels_nothing_at_its_end(desk: Any) -> None:
    one = desk()
    asks = request("a", LONG, computed=LONG)
    one.arrive(asks)
    assert ended(one, asks) == [[1, 2, 3, 4]] and not one.desk.loads.cancelled


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


def test_an_end_without_a_cache_forgets_the_request(desk: Any) -> None:
    one = desk()
    asks = request("a", LONG)
    one.arrive(asks)
    one.sharing.cache = None
    one.desk.finished(asks, [[1]])
    assert not one.desk.states


def test_an_end_that_breaks_forgets_the_request_elsewhere(
    desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = desk()
    asks = WithAdapter("a")
    one.arrive(asks)
    monkeypatch.setattr(one.desk, "_finish", lambda *_: 1 // 0)
    one.parts.exactness._exact_tokens["a"] = 5
    with pytest.raises(ZeroDivisionError):
        one.desk.finished(asks, [[1]])
    assert not one.parts.exactness._exact_tokens and not one.adapters._live


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


def test_an_engine_that_decodes_sparsely_tells_its_other_connectors(desk: Any) -> None:
    step = SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens={},
        kv_connector_block_state=None,
    )
    assert rows.sparse_rows("engine", step) is None
    one = desk(sparse=SparseConfig())
    assert one.desk.rows is not None and rows.sparse_rows("engine", step) == SparseRows()


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


def test_loads_under_way_are_cancelled_and_no_others(desk: Any) -> None:
    one = desk()
    one.load()
    one.arrive(request("b", LONG))
    one.desk.cancel_loads()
    assert one.desk.loads.cancelled == ["a"]


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


def test_a_broken_hook_of_an_adapters_request_ends_its_use(desk: Any) -> None:
    one = desk()
    one.arrive(WithAdapter("a"))
    one.desk.request_broke("a")
    assert not one.adapters._live


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
