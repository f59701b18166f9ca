"""How long the server takes to answer a call: until the answer arrives, not until the engine
reads it between two steps. Any thread."""

import time
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hotkv_client.types import LeaseGrant
from hotkv_proto.errors import HotKVError

if TYPE_CHECKING:
    from hotkv_proto.traces import Span


class AnswerTime:
    """Seconds from its construction until `answer` is resolved; then ends the call's `span`."""

    __slots__ = ("_asked_s", "_came_s")

    def __init__(self, answer: "Future[Any]", span: "Span | None" = None) -> None:
        self._asked_s = time.monotonic()
        self._came_s: float | None = None
        answer.add_done_callback(self._came)
        if span is not None:
            answer.add_done_callback(partial(end_call, span))

    def __repr__(self) -> str:
        return f"AnswerTime({self.seconds:.6f} s{'' if self._came_s else ' so far'})"

    def _came(self, _: "Future[Any]") -> None:
        self._came_s = time.monotonic()

    @property
    def seconds(self) -> float:
        """Until now if the answer has not arrived."""
        return (self._came_s or time.monotonic()) - self._asked_s


def end_call(span: "Span", answer: "Future[Any]") -> None:
    """Ends the span of a lookup or lease with its result. Any thread."""
    if (error := answer.exception()) is not None:
        span.end(error.reason.name if isinstance(error, HotKVError) else type(error).__name__)
        return
    found = answer.result()
    masks = found.pinned if isinstance(found, LeaseGrant) else found
    span.attributes["hotkv.found_blocks"] = sum(int(np.count_nonzero(mask)) for mask in masks)
    span.end()
