"""What the connector tells the server for its ledger: why tokens missed, what hits save, how long
requests wait. Against a server that is a double, because lateness is injected."""

import time
from typing import Any

import pytest

from hotkv_client.types import RequestReport
from hotkv_proto.reports import Miss
from hotkv_vllm.costs.load_choice import LoadChoice
from hotkv_vllm.costs.prefill_speed import PrefillSpeed
from hotkv_vllm.scheduler.reports import UseReports
from hotkv_vllm.scheduler.request import ASK_AGAIN, NO_HIT, HitChoice, Verdict
from hotkv_vllm.stats import HotKVStats
from tests.vllm.harness import prompt
from tests.vllm.parts import TOKENS, Parts, request

PROMPT = prompt(1, 200)


def reports(server: Any) -> list[RequestReport]:
    return [report for kind, batch in server.calls if kind == "report_requests" for report in batch]


def timed() -> PrefillSpeed:
    """It has measured something."""
    made = PrefillSpeed(HotKVStats())
    made.end_step(made.begin_step([(1000, 0)], 10.0), 11.0)
    return made


def made_reports(parts: Parts, prefill: PrefillSpeed | None = None) -> UseReports:
    hashes = parts.groups.keys
    return UseReports(parts.session, TOKENS, parts.stats, hashes, prefill)


# ------------------------------------------------------------------------------------- in an engine


def test_reports_say_why_tokens_missed(engine: Any, server: Any) -> None:
    one = engine()
    one.generate("cold", PROMPT, 2)
    one.add("unasked", PROMPT, 2).skip_reading_prefix_cache = True
    one.run()
    assert [r.miss for r in reports(server)] == [Miss.ABSENT, Miss.NOT_ASKED]


def test_the_end_of_a_load_names_its_report(engine: Any, server: Any) -> None:
    engine().generate("cold", PROMPT, 2)
    assert not server.load_ends
    other = engine()
    other.generate("hit", PROMPT, 2)
    (end,) = server.load_ends
    hit = reports(server)[-1]
    assert hit.hit_tokens > hit.device_hit_tokens == 0 and hit.report_id == end.report_id > 0
    assert end.wait_s > 0 and not end.failed


def test_the_end_of_a_load_says_that_it_failed(engine: Any, server: Any) -> None:
    engine().generate("cold", PROMPT, 2)
    server.fail_loads = True
    engine().generate("hit", PROMPT, 2)
    assert [end.failed for end in server.load_ends] == [True]
    assert reports(server)[-1].report_id == server.load_ends[0].report_id


def test_hits_save_what_the_engine_would_take(engine: Any, server: Any) -> None:
    """By its own speed, which it tells the server only if that is to choose what is loaded."""
    engine().generate("cold", PROMPT, 2)
    for seed, load in ((2, "auto"), (4, "always")):
        one = engine(max_tokens_per_step=1024, extra={"load": load})
        one.generate("slow", prompt(seed, 500), 2)
        server.calls.clear()
        speed = one.connector._scheduler.steps.prefill
        one.generate("hit", PROMPT, 2)
        hit = reports(server)[-1]
        assert hit.hit_tokens == 192 and hit.saved_s == speed.seconds(0, 192) > 0
        one.generate("elsewhere", prompt(seed + 1, 40), 2)
        assert reports(server)[-1].saved_s == 0


# ------------------------------------------------------------------------------------ in its parts


@pytest.mark.parametrize("kind", ["lookup", "acquire"])
def test_an_answer_that_does_not_come_in_time_is_late(kind: str) -> None:
    parts = Parts()
    parts.put("a", range(3))
    parts.server.table, parts.server.hold = kind == "acquire", {kind}
    state = parts.state(request("a", 64))
    parts.match(state)
    parts.clock += 2 * parts.config.lookup_timeout_s
    parts.match(state)
    assert state.hit.miss is Miss.LATE


def test_a_lease_that_is_shorter_than_what_was_found_is_refused() -> None:
    parts = Parts()
    parts.put("a", range(3))
    parts.server.grant_limit = 0
    state = parts.state(request("a", 64))
    assert parts.hit(state) == 0 and state.hit.miss is Miss.REFUSED
    # Asked again, with another end.
    parts.server.grant_limit, parts.clock = 1 << 30, parts.clock + 10
    assert parts.hit(state) > 0 and state.hit.miss is Miss.ABSENT


@pytest.mark.parametrize(
    ("may_read", "is_up", "said"),
    [
        (True, True, Miss.ABSENT),
        (False, True, Miss.NOT_ASKED),
        (False, False, Miss.NOT_ASKED),
        (True, False, Miss.NO_SERVER),
    ],
)
def test_a_request_that_asked_nobody_says_so(may_read: bool, is_up: bool, said: Miss) -> None:
    parts = Parts()
    made, state = made_reports(parts), parts.state(request("a", 64))
    if not is_up:
        parts.server.die()
    made.answered(state, False, may_read)
    parts.server.up = True
    parts.server.come_back()
    made.admitted(state, 0)
    made.send(1.0)
    assert [r.miss for r in reports(parts.server)] == [said]


def test_waits_for_answers_are_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    parts = Parts()
    made, state = made_reports(parts), parts.state(request("a", 64))
    for at_s, waits in ((0, True), (1, True), (3, False), (4, False), (5, True), (7, False)):
        now_s[0] = 100.0 + at_s
        made.answered(state, waits, True)
    made.admitted(state, 0)
    made.send(now_s[0])
    assert [r.wait_s for r in reports(parts.server)] == [5.0]


def test_loads_of_requests_that_were_not_reported_have_no_end() -> None:
    """Their blocks can't be named."""
    parts = Parts()
    state = parts.state(request("a", 64))
    made = UseReports(parts.session, TOKENS, parts.stats, lambda one: ())
    made.admitted(state, 16)
    made.load_ended(state, False)
    made.send(1.0)
    assert not reports(parts.server) and not parts.server.load_ends


def test_what_a_hit_saves_begins_behind_the_device_hit() -> None:
    parts = Parts()
    prefill = timed()
    made, state = made_reports(parts, prefill), parts.state(request("a", 64))
    made.matched(state, 16)
    made.admitted(state, 32)
    made.send(1.0)
    ((hit),) = reports(parts.server)
    assert (hit.device_hit_tokens, hit.hit_tokens) == (16, 48)
    assert hit.saved_s == prefill.seconds(16, 48) > 0


LEAVE = Verdict.LEAVE


@pytest.mark.parametrize("asks", [False, True])
def test_a_hit_that_is_left_is_computed_sooner(monkeypatch: pytest.MonkeyPatch, asks: bool) -> None:
    """Without a question, or once the lease says how long it is."""
    parts = Parts()
    parts.put("a", range(3))
    state, choice = parts.state(request("a", 64)), LoadChoice(None, parts.stats)
    if asks:
        monkeypatch.setattr(
            LoadChoice, "_weigh", lambda *_: setattr(state.choice, "verdict", LEAVE)
        )
    else:
        state.choice = HitChoice(Verdict.LEAVE, 0.0)
    answer = ASK_AGAIN
    while answer == ASK_AGAIN:
        answer = choice.match(parts.finder, state, 0, parts.clock)
    assert answer == NO_HIT and state.hit.miss is Miss.COMPUTED_SOONER
    assert bool(parts.server.released) == asks
