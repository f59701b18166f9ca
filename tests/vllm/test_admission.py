"""`Admission`, callback by callback, over a fake server."""

from types import SimpleNamespace
from typing import Any

import pytest

from hotkv_client.types import BlockResult
from hotkv_proto.reports import Miss
from hotkv_vllm.scheduler.request import ASK_AGAIN, NO_HIT, HitChoice, Phase, Verdict
from hotkv_vllm.scheduler.sharing import JOINING_PATIENCE_S, LINKS_PATIENCE_S, Joining
from tests.vllm.desks import LONG, blocks, desk, ended
from tests.vllm.oracle import reports_to
from tests.vllm.parts import TOKENS, report, request, stored

__all__ = ["desk"]


@pytest.mark.parametrize("patience_s", [LINKS_PATIENCE_S, JOINING_PATIENCE_S])
def test_request_waits_a_moment_for_workers(desk: Any, patience_s: float) -> None:
    """A worker has lost its session, or has sent no handshake yet."""
    one = desk()
    if patience_s == LINKS_PATIENCE_S:
        one.sharing.links.update({0: "gone"}, one.now_s, stream=0)
    else:
        one.sharing.joining = Joining()
    asks = request("a", LONG)
    one.arrive(asks)
    for waited_s in (0.0, patience_s - 0.125):
        one.now_s += waited_s
        assert one.desk.match(asks, 0) == ASK_AGAIN
    one.now_s += 0.125
    assert one.desk.match(asks, 0) == NO_HIT
    one.desk.allocated(asks, blocks([1, 2, 3, 4, 5]), 0)
    one.cache.reports.send(one.now_s)
    (told,) = reports_to(one.parts.server)
    assert (told.miss is Miss.NO_SERVER) == (patience_s == LINKS_PATIENCE_S)


def test_request_ended_before_handshakes_isnt_resumed(
    desk: Any,
) -> None:
    one = desk()
    one.sharing.joining = Joining()
    one.arrive(request("a", LONG))
    one.desk.end_broke("a")
    assert not one.sharing.joining.requests


@pytest.mark.parametrize("has", ["media", "embeddings", "nothing"])
def test_request_with_unnamed_media_shares_nothing(desk: Any, has: str) -> None:
    """vLLM may hash images by a counter, and not tell embeddings from token 0."""
    one, shares = desk(counts_media=True), has == "nothing"
    one.parts.put("a", range(4))
    asks = request("a", LONG)
    asks.mm_features = [object()] * (has == "media")
    if has == "embeddings":
        asks.prompt_token_ids = list(range(LONG))
        asks.prompt_is_token_ids = [True] * (LONG - 1) + [False]
    one.arrive(asks)
    assert bool(one.parts.server.count("probe")) == shares, "the lookup begins at once"
    assert one.hit(asks) == (4 * TOKENS if shares else 0)
    assert one.parts.server.count("acquire") == shares
    one.desk.allocated(asks, blocks([1, 2, 3, 4, 5]), 0)
    one.cache.reports.send(one.now_s)
    (told,) = reports_to(one.parts.server)
    assert bool(told.hashes) == shares and told.prompt_tokens == LONG
    one.parts.drop("a", range(4))
    asks.num_computed_tokens = LONG
    one.desk.others.step(["a"], False)
    assert ended(one, asks) == ([[1, 2, 3, 4]] if shares else [])


@pytest.mark.parametrize("why", ["unknown", "no cache", "no lease", "no room", "weights"])
def test_impossible_load_is_reported_as_failed(desk: Any, why: str) -> None:
    one = desk()
    asks = request("a", LONG)
    if why in ("no room", "weights"):
        one.parts.put("a", range(4))
    if why != "unknown":
        one.arrive(asks)
    if why == "no cache":
        one.sharing.cache = None
    if why in ("no room", "weights"):
        one.hit(asks)
    if why == "weights":
        one.sharing.weights.suspect()
    one.desk.allocated(asks, blocks([1] if why == "no room" else [1, 2, 3, 4, 5]), 4 * TOKENS)
    assert one.desk.loads.abandoned == ["a"] and one.desk.loads.awaited == {"a"}
    assert not one.desk.loads.jobs and not one.parts.count("loads")
    if why in ("no lease", "no room", "weights"):
        hit = one.desk.states["a"].hit
        assert hit.has_failed and hit.phase is Phase.IDLE
    assert len(one.parts.server.released) == (why in ("no room", "weights"))


@pytest.mark.parametrize(
    "prompt, decoded, computed, tail, only_reads",
    [
        (32, 0, 32, [[1, 2]], 0),
        # The last sampled token has no KV yet.
        (16, 16, 32, [[1]], 0),
        (16, 17, 33, [[1, 2]], 0),
        (16, 15, 31, [[1]], 0),
        # The last block lacks a token.
        (32, 0, 31, [[1]], 0),
        (16, 33, 32, [[1, 2]], 0),
        # A diffusion model has no KV of its answer, although vLLM counts it.
        (16, 17, 33, [[1]], 1),
    ],
)
def test_full_blocks_at_the_end_are_stored(
    desk: Any, prompt: int, decoded: int, computed: int, tail: list[list[int]], only_reads: int
) -> None:
    one = desk()
    asks = request("a", prompt, decoded=decoded, computed=computed)
    asks.sampling_params = SimpleNamespace(extra_args={"diffusion_read_only": only_reads})
    one.arrive(asks)
    assert ended(one, asks) == tail


@pytest.mark.parametrize("why", ["absent worker", "failed load"])
def test_ended_request_stores_nothing_after_failure(desk: Any, why: str) -> None:
    one = desk()
    asks = request("a", LONG, computed=LONG)
    one.arrive(asks)
    if why == "absent worker":
        one.sharing.links.update({0: "gone"}, one.now_s, stream=1)
    else:
        one.parts.finder.failed_loads.add("a")
    assert ended(one, asks) == []
    assert "a" not in one.parts.finder.failed_loads


def test_preempted_request_stores_what_server_lacks(desk: Any) -> None:
    """The store is reported as aborted, as if vLLM had reallocated the blocks."""
    one = desk()
    one.arrive(asks := request("a", LONG))
    for _ in range(2):
        assert not one.hit(asks)
        due = one.parts.planner.due(one.desk.states, {"a": LONG}, (), {})
        (job,), _ = one.parts.planner.plan(due, lambda _: ([1, 2, 3, 4, 5],), {}, lambda: ())
        assert stored([job]) == [(0, [1, 2, 3, 4])]
        one.parts.planner.reported(report((job.store_id, [BlockResult.ABORTED] * 4)))
    one.desk.states["a"].store.may_store = False
    assert not one.hit(asks) and not one.parts.planner.due(one.desk.states, {"a": LONG}, (), {})


@pytest.mark.parametrize("how", ["ended", "computed", "abandoned", "loading"])
def test_trial_without_loading_costs_no_later_one(desk: Any, how: str) -> None:
    assert desk(load="always").desk.choice._prefill is None
    one = desk()
    assert one.desk.choice._prefill is not None
    asks = one.load() if how == "loading" else request("a", LONG)
    if how != "loading":
        one.arrive(asks)
    one.desk.states["a"].choice = HitChoice(Verdict.TRY, 1.0)
    if how == "computed":
        one.desk.allocated(asks, blocks([1, 2, 3, 4, 5]), 0)
        assert one.desk.states["a"].choice is None
    if how == "abandoned":
        one.desk.allocated(asks, blocks([1, 2, 3, 4, 5]), TOKENS)
        one.desk.choice.end(one.desk.states["a"], has_failed=True)
    one.desk.finished(asks, [[1, 2, 3, 4, 5]])
    assert one.desk.choice._allowance_s == (how != "loading")


def test_load_of_broken_callback_fails_never_begins(desk: Any) -> None:
    one = desk()
    one.load("a")
    one.desk.alloc_broke("a", 4 * TOKENS)
    assert one.desk.loads.take() == ((), (), ("a",))
    one.load("b")
    one.desk.request_broke("b")
    assert not one.parts.server.leases


@pytest.mark.parametrize("why", ["callback broke", "no cache", "no state"])
def test_failed_load_is_forgotten_with_its_request(desk: Any, why: str) -> None:
    """A record that remained would cost all other requests their hits."""
    one = desk()
    asks = request("a", LONG)
    one.arrive(asks)
    one.desk.failed_loads.add("a")
    match why:
        case "callback broke":
            one.desk.request_broke("a")
        case "no cache":
            one.sharing.cache = None
        case "no state":
            one.desk.states.clear()
    # A failed load's device blocks block vLLM's queue. "Ask again", exactly once, moves the
    # request to a queue where it holds none.
    assert one.desk.match(asks, 0) == ASK_AGAIN and "a" in one.desk.failed_loads
    assert one.desk.match(asks, 0) == NO_HIT
    one.desk.finished(asks, [[1]])
    assert not one.desk.failed_loads
