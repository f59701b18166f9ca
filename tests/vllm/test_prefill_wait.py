"""`PrefillWait`: a decode engine waits for a prompt computed elsewhere."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hotkv_vllm.costs.prefill_speed import PrefillSpeed
from hotkv_vllm.scheduler.find import hits
from hotkv_vllm.scheduler.find.prefill_wait import ASK_S, PrefillWait
from tests.vllm.harness import prompt
from tests.vllm.oracle import answer_of, reports_to
from tests.vllm.parts import TOKENS, Parts, request

BLOCKS = 6
PROMPT_TOKENS = (BLOCKS + 1) * TOKENS
"""A hit covers BLOCKS of it."""
STEP_S = 0.002


def times_s(longest_s: float) -> Any:
    return st.floats(0, longest_s).map(lambda value: round(value, 3))


@example([0.03] * BLOCKS, 0.1, 9.0, True, True, True, None, False)
@example([0.03] * BLOCKS, 0.1, 9.0, True, False, True, None, False)
@example([0.03] * BLOCKS, 0.1, 9.0, False, False, True, None, False)
@example([0.1] * BLOCKS, 0.05, 9.0, True, False, True, None, False)
@example([0.1] * BLOCKS, 0.1, 0.02, True, False, True, None, False)
@example([0.0] * BLOCKS, 0.1, 9.0, True, False, True, None, False)
@given(
    come_s=st.lists(times_s(0.1), min_size=BLOCKS, max_size=BLOCKS),
    prefill_s=times_s(0.1),
    leaves_s=times_s(0.3),
    has_table=st.booleans(),
    has_tiers=st.booleans(),
    decodes_only=st.booleans(),
    remote=st.sampled_from([None, True, False, "yes"]),
    fetches=st.sampled_from([False, False, False, True]),
)
def test_waiting_never_exceeds_computing(
    come_s: list[float],
    prefill_s: float,
    leaves_s: float,
    has_table: bool,
    has_tiers: bool,
    decodes_only: bool,
    remote: Any,
    fetches: bool,
) -> None:
    """come_s: when each block is ready.
    prefill_s: what computing would take.
    leaves_s: when the connection breaks.
    decodes_only: `kv_consumer`.
    remote: `do_remote_prefill`.
    fetches: another connector fetches, so no wait.
    """
    parts = Parts(lookup_timeout_s=9.0)
    parts.server.table, parts.server.has_tiers = has_table, has_tiers
    speed: Any = SimpleNamespace(seconds=lambda start, stop: prefill_s)
    wait = PrefillWait(speed, parts.stats, decodes_only=decodes_only)
    one = request("a", PROMPT_TOKENS)
    params = {} if remote is None else {"do_remote_prefill": remote}
    one.kv_transfer_params = params | ({"remote_engine_id": "e"} if fetches else {}) or None
    state, began_s, there = parts.state(one), parts.clock, 0
    come_s = [max(come_s[: at + 1]) for at in range(BLOCKS)]
    parts.finder.arrive(state, parts.clock)
    for _ in range(1000):
        waited_s = parts.clock - began_s
        while there < BLOCKS and come_s[there] <= waited_s:
            parts.put("a", [there])
            there += 1
        if waited_s >= leaves_s:
            parts.server.up = False
        if not wait.goes_on(parts.finder, state, 0, parts.clock):
            break
        parts.clock += STEP_S
    is_meant = not fetches and (remote is True or (decodes_only and remote is not False))
    if not is_meant:
        assert waited_s == 0
    if waited_s < leaves_s and has_table and not has_tiers:
        assert not parts.server.count("lookup")
    elif 2 * ASK_S + STEP_S < waited_s < leaves_s:
        assert parts.server.count("lookup") > 1
    assert waited_s < prefill_s + 1.1 * STEP_S
    assert waited_s < leaves_s + 1.1 * STEP_S
    if waited_s == 0 or waited_s >= leaves_s:
        assert waited_s or not parts.stats.data
        return
    # A block is seen a step later by the table, else with an answer.
    late_s = STEP_S if has_table else 2 * ASK_S + 3 * STEP_S
    assert waited_s < come_s[-1] + late_s + 1e-6
    assert parts.hit(state) == there * TOKENS
    names = {"awaited_requests": there == BLOCKS, "awaited_in_vain": there < BLOCKS}
    if has_table:
        assert {name: parts.count(name) for name in names} == names


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
def test_decoding_engine_hits_blocks_coming_meanwhile(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """A `kv_both` engine waits only if the router says so."""
    tokens = prompt(1, 200)
    first = engine()
    second = engine(within=lambda ours: ours | {"kv_role": role})
    rests: list[float] = []

    def wait_for(answer: Any, seconds: float) -> bool:
        rests.append(seconds)
        return True

    second.connector._scheduler.cache.finder.patience = hits.Patience(wait_for=wait_for)
    monkeypatch.setattr(hits, "time", SimpleNamespace(sleep=rests.append))
    monkeypatch.setattr(PrefillSpeed, "seconds", lambda *_: 60.0)
    for name, transfer in (("said", {"do_remote_prefill": True}), ("not", None)):
        for other in (name, f"{name} too"):
            second.add(other, tokens, 4, transfer=transfer)
        second.step()
        second.step()
        is_waiting = transfer is not None or role == "kv_consumer"
        assert (not second.outputs[name]) == is_waiting
        # If all wait, one sleep per step.
        assert len(rests) == (2 if is_waiting else 0) and rests[:1] in ([], [ASK_S])
        if is_waiting:
            first.generate(name, tokens, 1)
        second.run()
        assert second.outputs[name] == answer_of(tokens, 4)
        assert second.external[name] == (192 if is_waiting else 0)
        assert (reports_to(server)[-1].wait_s > 0) == is_waiting
        tokens = prompt(2, 200)
        rests.clear()
    # No sleep while another is computed.
    second.add("busy", prompt(3, 40), 9, transfer={"do_remote_prefill": False})
    second.step()
    second.add("waits", prompt(4, 200), 1, transfer={"do_remote_prefill": True})
    second.step()
    assert second.outputs["busy"] and not second.outputs["waits"] and not rests
    assert second.counters["awaited_requests"] == (4 if role == "kv_consumer" else 2)
    assert "callback_errors" not in second.counters
