"""Keeps what the latest requests loaded.

Always true: at most MAX_REQUESTS are kept, with at most MAX_BLOCKS together; the oldest go first.
The newest four are always kept: of a longer one the last blocks are left out.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

from hotkv_server.proof.book.sources import Blocks

MAX_REQUESTS = 1024
MAX_BLOCKS = 1 << 18
LOADED, LOADING, FAILED, CANCELLED, COMPUTED = (
    "loaded",
    "loading",
    "failed",
    "cancelled",
    "computed",
)
"""How a request's load ended. COMPUTED: it had none."""


@dataclass(frozen=True, slots=True)
class LoadedRequest:
    """What a request was to load.

    num_omitted: blocks that had no room here.
    reported_s: of the monotonic clock.
    """

    request_id: str
    engine_name: str
    model_name: str
    key_space_id: int
    prompt_tokens: int
    device_hit_tokens: int
    hit_tokens: int
    outcome: str
    reported_s: float
    blocks: Blocks
    num_omitted: int = 0


class Requests:
    """The latest requests, by a key that the caller chooses."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, LoadedRequest] = OrderedDict()
        self._num_blocks = 0

    def __repr__(self) -> str:
        return f"Requests({len(self._kept)} requests, {self._num_blocks} blocks)"

    def __len__(self) -> int:
        return len(self._kept)

    def begin(self, key: Hashable, request: LoadedRequest) -> None:
        """A request with the key of another takes its place."""
        if (before := self._kept.pop(key, None)) is not None:
            self._num_blocks -= len(before.blocks)
        request = _bounded(request)
        self._kept[key] = request
        self._num_blocks += len(request.blocks)
        while len(self._kept) > MAX_REQUESTS or self._num_blocks > MAX_BLOCKS:
            _, oldest = self._kept.popitem(last=False)
            self._num_blocks -= len(oldest.blocks)

    def end(self, key: Hashable, outcome: str) -> None:
        """Of a load. Does nothing if the request is forgotten, or had nothing to load."""
        request = self._kept.get(key)
        if request is not None and request.outcome != COMPUTED:
            self._kept[key] = replace(request, outcome=outcome)

    def latest(self) -> Iterator[LoadedRequest]:
        """The newest first."""
        return reversed(self._kept.values())

    def named(self, text: str) -> list[LoadedRequest]:
        """Requests whose id is, or else begins with, `text`; the newest first. vLLM puts
        `chatcmpl-` or `cmpl-` before an id that its client chose, and a number behind."""
        if whole := [one for one in self.latest() if one.request_id == text]:
            return whole[:1]
        return [
            one
            for one in self.latest()
            if one.request_id.startswith(text) or one.request_id.partition("-")[2].startswith(text)
        ]

    def check_invariants(self) -> None:
        assert len(self._kept) <= MAX_REQUESTS, "requests are bounded"
        assert self._num_blocks <= MAX_BLOCKS, "blocks are bounded"
        counted = sum(len(one.blocks) for one in self._kept.values())
        assert self._num_blocks == counted, "blocks are miscounted"


def _bounded(request: LoadedRequest) -> LoadedRequest:
    most = MAX_BLOCKS // 4
    if len(request.blocks) <= most:
        return request
    omitted = len(request.blocks) - most
    return replace(request, blocks=request.blocks[:most].copy(), num_omitted=omitted)
