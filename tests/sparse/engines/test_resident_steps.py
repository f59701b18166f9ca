"""Residency in vLLM's real scheduler: what a step reads in host memory is right, and pinned
until it ends."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.doubles.fake import FakeServer
from tests.sparse.engines.resident_harness import STEP_S, Residents
from tests.vllm.harness import prompt
from tests.vllm.oracle import answer_of

BOUND_S = 150.0


@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
@pytest.mark.parametrize("pipelined", [False, True], ids=["sync", "async"])
def test_blocks_stay_pinned_until_last_step_ends(
    make: Callable[..., Any], server: FakeServer, pipelined: bool, role: str
) -> None:
    one = make(Residents, pipelined=pipelined, within=lambda ours: ours | {"kv_role": role})
    one.add("a", prompt(1, 900), 60)
    one.add("b", prompt(2, 700), 60)
    while one.num_read < 100:
        one.step()
    assert bool(one.pending) == pipelined
    one.abort("a")
    one.run()
    assert one.outputs["b"] == answer_of(prompt(2, 700), 60)
    assert not server.residencies.open and one.check_server()


@pytest.mark.parametrize("pipelined", [False, True], ids=["sync", "async"])
def test_requests_behind_a_room_waiter_still_run(
    make: Callable[..., Any], server: FakeServer, pipelined: bool
) -> None:
    """The waiter reads no prefix cache."""
    server.residencies.most_blocks = 40
    one = make(Residents, pipelined=pipelined)
    one.add("a", prompt(1, 900), 60)
    while not one.outputs["a"]:
        one.step()
    request = one.add("b", prompt(2, 900), 20)
    request.sampling_params.skip_reading_prefix_cache = request.skip_reading_prefix_cache = True
    one.add("c", prompt(3, 40), 4)
    while len(one.outputs["a"]) < 40:
        one.step()
    assert one.outputs["c"] == answer_of(prompt(3, 40), 4) and not one.outputs["b"]
    one.run()
    assert one.outputs["b"] == answer_of(prompt(2, 900), 20)


@pytest.mark.parametrize("how", ["absent", "killed", "frozen"])
@pytest.mark.parametrize(
    ("pipelined", "residency"),
    [(False, "auto"), (True, "host")],
    ids=["sync auto", "async host"],
)
def test_parked_requests_fitting_the_device_need_no_server(
    make: Callable[..., Any], server: FakeServer, pipelined: bool, residency: str, how: str
) -> None:
    """Up to 700 tokens each, in a pool of 1,500."""
    if how == "absent":
        server.die(empty=True)
    one = make(Residents, pipelined=pipelined, residency=residency, blocks=96)
    asked = {name: prompt(at, 400 + 60 * at) for at, name in enumerate("abcde")}
    for name, tokens in asked.items():
        one.add(name, tokens, 40)
    one.steps(4)
    if how == "killed":
        while not one.num_read and residency == "host":
            one.step()
        server.die(empty=True)
    if how == "frozen":
        server.hold = {"open_residency", "extend_residency", "acquire", "lookup", "store", "load"}
        for session in server.sessions:
            session.close_residency = lambda _: None
    one.run(int(BOUND_S / STEP_S))
    for name, tokens in asked.items():
        assert one.outputs[name] == answer_of(tokens, 40), name
    server.resume()
    if how != "frozen":
        server.come_back()
    assert "failed_residencies" not in one.counters
    assert one.generate("after", prompt(9, 900), 30)[0] == answer_of(prompt(9, 900), 30)
