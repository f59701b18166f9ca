"""`NoSide` stands in for the side that a process lacks."""

import inspect
import re
import typing
from typing import Any

import pytest

from hotkv_vllm import callbacks, connector
from hotkv_vllm.callbacks import CallbackEdge, callback
from hotkv_vllm.connector import ANSWERS, PARTS, NoSide
from hotkv_vllm.scheduler.admission import Admission
from hotkv_vllm.scheduler.sharing import Sharing
from hotkv_vllm.scheduler.side import HotKVScheduler
from hotkv_vllm.scheduler.step_planner import StepPlanner
from hotkv_vllm.stats import CallbackClock
from hotkv_vllm.worker.side import HotKVWorker

OWNERS = {
    "_scheduler": HotKVScheduler,
    "_scheduler.requests": Admission,
    "_scheduler.sharing": Sharing,
    "_scheduler.steps": StepPlanner,
    "_worker": HotKVWorker,
}
CALLED = sorted(
    set(re.findall(r"self\.(_(?:scheduler|worker)[\w.]*)\.(\w+)\(", inspect.getsource(connector)))
)


@pytest.mark.parametrize(("path", "method"), CALLED)
def test_each_answer_is_one_the_method_gives(path: str, method: str) -> None:
    wanted = typing.get_type_hints(getattr(OWNERS[path], method))["return"]
    side: Any = NoSide()
    for part in path.split(".")[1:]:
        side = getattr(side, part)
    assert fits(getattr(side, method)(1, 2), wanted), f"{path}.{method} is to return {wanted}"


def test_no_answer_and_no_part_is_of_nothing() -> None:
    assert len(CALLED) > 25 and ANSWERS.keys() <= {method for _, method in CALLED}
    assert {path.partition(".")[2] for path, _ in CALLED} - {""} == PARTS


def test_broken_fallback_gives_vllm_its_last_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(callbacks, "CALLBACKS", {})
    counted: list[str] = []

    class Side:
        edge = CallbackEdge(CallbackClock("test"), counted.append)

        @callback(lambda _: 1 // 0, last="last")
        def reset_cache(self) -> str:
            raise OSError("no")

    assert Side().reset_cache() == "last" and counted == ["callback_errors"] * 2
    assert Side.edge.broken == {"reset_cache", "reset_cache (its fallback)"}


def fits(answer: Any, wanted: Any) -> bool:
    """As a type checker would say."""
    origin, parts = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is tuple:
        return isinstance(answer, tuple) and all(
            fits(one, part) for one, part in zip(answer, parts, strict=True)
        )
    if parts and origin is not set:
        return any(fits(answer, part) for part in parts)
    return isinstance(answer, origin or wanted)
