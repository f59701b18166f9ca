"""Residency while the weights' files are still being read."""

from typing import Any

import pytest

from tests.sparse.engines.resident_harness import Residents
from tests.vllm.harness import prompt
from tests.vllm.oracle import answer_of
from tests.vllm.test_unread_weights import FILES, reading

__all__ = ["reading"]
"""A fixture."""


@pytest.mark.parametrize("residency", ["host", "auto"])
@pytest.mark.parametrize("pipelined", [False, True], ids=["sync", "async"])
def test_contexts_outgrow_the_device_once_files_are_read(
    make: Any, server: Any, reading: Any, residency: str, pipelined: bool
) -> None:
    """Until then, contexts that fit on the device run, and a longer one waits."""
    settings = {"residency": residency, "pipelined": pipelined, "blocks": 64}
    one = make(Residents, **settings)
    asked = {"fits": (prompt(1, 400), 40), "grows": (prompt(2, 700), 400)}
    for name, (tokens, max_tokens) in asked.items():
        one.add(name, tokens, max_tokens)
    while not one.outputs["grows"]:
        one.step()
    one.steps(100)
    one.add("long", prompt(3, 1500), 40)
    one.steps(100)
    assert not server.blocks and not server.residencies.open and not one.num_read
    reading.set_result(FILES)
    one.run()
    asked["long"] = prompt(3, 1500), 40
    for name, (tokens, max_tokens) in asked.items():
        assert one.outputs[name] == answer_of(tokens, max_tokens), name
    assert one.num_read and one.check_server() and not server.residencies.open
    assert one.counters.get("hook_errors", 0) == one.counters.get("failed_residencies", 0) == 0
    other = make(Residents, **settings, extra={"weights_identity": FILES})
    assert other.hit(prompt(2, 700)) > 0
