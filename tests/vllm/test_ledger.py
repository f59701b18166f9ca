"""Reports for `hotkv savings`."""

import time
from typing import Any

import pytest

from hotkv_client.types import LoadEnd, RequestReport
from hotkv_proto.reports import Miss
from hotkv_vllm.costs.prefill_speed import PrefillSpeed
from hotkv_vllm.scheduler.find.load_choice import LoadChoice
from hotkv_vllm.scheduler.reports import UseReports
from hotkv_vllm.scheduler.request import ASK_AGAIN, NO_HIT, HitChoice, Verdict
from hotkv_vllm.stats import HotKVStats
from tests.vllm.harness import prompt
from tests.vllm.oracle import reports_to
from tests.vllm.parts import TOKENS, Parts, request

PROMPT = prompt(1, 200)


def test_reports_say_misses_and_load_ends(engine: Any, server: Any) -> None:
    one = engine()
    one.generate("cold", PROMPT, 2)
    one.add("unasked", PROMPT, 2).skip_reading_prefix_cache = True
    one.run()
    assert [r.miss for r in reports_to(server)] == [Miss.ABSENT, Miss.NOT_ASKED]
    assert not server.load_ends
    for fails in (False, True):
        server.fail_loads = fails
        engine().generate("hit", PROMPT, 2)
        hit, end = reports_to(server)[-1], server.load_ends[-1]
        assert hit.hit_tokens > hit.device_hit_tokens == 0 and hit.report_id == end.report_id > 0
        assert end.wait_s > 0 and end.failed == fails
    assert len(server.load_ends) == 2
    # An aborted load counts as failed.
    server.hold, one = {"load"}, engine()
    one.add("aborted", PROMPT, 2)
    while not server.held:
        one.step()
    one.abort("aborted")
    one.step()
    assert server.load_ends[2:] == [LoadEnd(reports_to(server)[-1].report_id, 0.0, failed=True)]


@pytest.mark.parametrize("load", ["auto", "always"])
def test_hits_save_what_the_engine_would_take(engine: Any, server: Any, load: str) -> None:
    """Prefill speed is reported only with `load = "auto"`."""
    engine().generate("cold", PROMPT, 2)
    one = engine(max_tokens_per_step=1024, extra={"load": load})
    one.generate("slow", prompt(2, 500), 2)
    speed = one.connector._scheduler.steps.prefill
    one.generate("hit", PROMPT, 2)
    hit = reports_to(server)[-1]
    assert hit.hit_tokens == 192 and hit.saved_s == speed.seconds(0, 192) > 0
    assert (server.prefill_tokens_per_s > 0) == (load == "auto")
    assert one.counters.get("judged_choices", 0) == (load == "auto")
    one.generate("elsewhere", prompt(3, 40), 2)
    assert reports_to(server)[-1].saved_s == 0


class Reported:
    def __init__(self, prefill: PrefillSpeed | None = None, one: Any = None) -> None:
        self.parts = parts = Parts()
        self.state = parts.state(one or request("a", 64))
        self.made = UseReports(parts.session, TOKENS, parts.stats, parts.groups.keys, prefill)

    def sent(self, hit_tokens: int = 0, at_s: float = 1.0) -> list[RequestReport]:
        self.made.admitted(self.state, hit_tokens)
        self.made.load_ended(self.state, False)
        self.made.send(at_s)
        return reports_to(self.parts.server)


def test_blockless_reports_have_ids_and_no_age() -> None:
    short, other = Reported(one=request("a", 5)), Reported()
    short.state.arrived_s = 200.0
    (report,) = short.sent(at_s=110.0)
    assert (report.prompt_tokens, len(report.hashes), report.age_s) == (5, 0, 0.0)
    assert other.sent()[0].report_id != report.report_id


@pytest.mark.parametrize(
    ("is_late", "is_cancelled", "said"),
    [
        (True, False, Miss.COMPUTED_SOONER),
        (False, True, Miss.NOT_ASKED),
        (False, False, Miss.FAILED_LOAD),
    ],
)
def test_load_cancelled_by_the_engine_says_why(
    is_late: bool, is_cancelled: bool, said: Miss
) -> None:
    one = Reported()
    one.sent(32)
    one.state.hit.is_cancelled = is_cancelled
    one.made.load_ended(one.state, True, is_late=is_late)
    one.made.send(2.0)
    assert one.parts.server.load_ends[-1].miss is one.state.hit.miss is said


def test_waits_for_answers_are_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    one = Reported()
    for at_s, waits in ((0, True), (1, True), (3, False), (4, False), (5, True), (7, False)):
        now_s[0] = 100.0 + at_s
        one.made.answered(one.state, waits, None)
    assert [r.wait_s for r in one.sent(at_s=now_s[0])] == [5.0]


def test_savings_begin_behind_the_device_hit() -> None:
    prefill = PrefillSpeed(HotKVStats())
    prefill.end_step(prefill.begin_step([(1000, 0)], 10.0), 11.0)
    one = Reported(prefill)
    one.made.matched(one.state, 16)
    (hit,) = one.sent(32)
    assert (hit.device_hit_tokens, hit.hit_tokens) == (16, 48)
    assert hit.saved_s == prefill.seconds(16, 48) > 0


@pytest.mark.parametrize("asks", [False, True])
def test_a_hit_that_is_left_is_computed_sooner(monkeypatch: pytest.MonkeyPatch, asks: bool) -> None:
    """asks: decided after the lease is granted."""
    parts = Parts()
    parts.put("a", range(3))
    state, choice = parts.state(request("a", 64)), LoadChoice(None, parts.stats)
    leave = HitChoice(Verdict.LEAVE, 0.0)
    if asks:
        monkeypatch.setattr(LoadChoice, "_weigh", lambda *_: setattr(state, "choice", leave))
    else:
        state.choice = leave
    answer = ASK_AGAIN
    while answer == ASK_AGAIN:
        answer = choice.match(parts.finder, state, 0, parts.clock)
    assert answer == NO_HIT and state.hit.miss is Miss.COMPUTED_SOONER
    assert bool(parts.server.released) == asks
