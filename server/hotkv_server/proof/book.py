"""Keeps where each block in host memory came from, and what the latest requests loaded.

Always true: memory is bounded. `Sources` takes SOURCE_BYTES for each entry, and has the names of
MAX_ENGINES engines. `Requests` keeps at most MAX_REQUESTS, with at most MAX_BLOCKS together; the
oldest go first. The newest four are always kept: of a longer one the last blocks are left out.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hotkv_server.cache.values import Entries

MAX_REQUESTS = 1024
MAX_BLOCKS = 1 << 18
MAX_ENGINES = 4096
SOURCE_BYTES = 8
UNKNOWN, RESTORED, STORED = -2, -1, 0
"""Origins of blocks. UNKNOWN: had left the server before its request was reported. RESTORED: an
earlier server's. Positive: promoted from the tier of this number (`Space.origins`)."""
BLOCK = np.dtype(
    [
        ("hash", np.uint64),
        ("check", np.uint64),
        ("position", np.uint32),
        ("unix_s", np.uint32),
        ("engine", np.uint32),
        ("group", np.uint16),
        ("origin", np.int16),
    ]
)
"""A loaded block. hash: its first eight bytes. check: its checksum, 0 if missing. position: among
the group's blocks of the prompt. unix_s: when it was stored here or promoted, 0 if not known.
engine: number of `Sources.engine`, 0 if not known."""
Blocks = NDArray[np.void]
_TIERS = np.uint32(1 << 31)


# ------------------------------------------------------------------------------------------ sources


class Sources:
    """By entry number. A ready entry that was neither stored nor promoted since the start is from
    before it."""

    def __init__(self, capacity: int) -> None:
        self._unix_s = np.zeros(capacity + 1, np.uint32)
        # An engine's number, or _TIERS plus the number of the tier that it was promoted from.
        self._who = np.zeros(capacity + 1, np.uint32)
        self._names: OrderedDict[int, str] = OrderedDict()
        self._numbers: dict[str, int] = {}
        self._latest = 0

    def __repr__(self) -> str:
        return f"Sources({len(self._names)} engines)"

    def stored(self, entries: Entries, engine: str, unix_s: int) -> None:
        self._unix_s[entries], self._who[entries] = unix_s, self._number(engine)

    def promoted(self, entries: Entries, tiers: NDArray[np.uint8], unix_s: int) -> None:
        """tiers: of each, from 1."""
        self._unix_s[entries], self._who[entries] = unix_s, _TIERS + tiers

    def tell(self, entries: Entries, blocks: Blocks) -> None:
        """Writes `unix_s`, `engine` and `origin` of `blocks`, which are ready."""
        unix_s, who = self._unix_s[entries], self._who[entries]
        is_promoted = who > _TIERS
        blocks["unix_s"] = unix_s
        blocks["engine"] = np.where(is_promoted, np.uint32(0), who)
        blocks["origin"] = np.where(is_promoted, who - _TIERS, STORED)
        blocks["origin"][unix_s == 0] = RESTORED

    def engine(self, number: int) -> str:
        """Empty if it is not known, or no longer."""
        return self._names.get(number, "")

    def _number(self, engine: str) -> int:
        number = self._numbers.get(engine)
        if number is None:
            number = self._latest = self._latest + 1
            self._numbers[engine], self._names[number] = number, engine
            if len(self._names) > MAX_ENGINES:
                _, oldest = self._names.popitem(last=False)
                del self._numbers[oldest]
        return number

    def check_invariants(self) -> None:
        assert len(self._names) <= MAX_ENGINES, "names are bounded"
        assert {number: name for name, number in self._numbers.items()} == dict(self._names)


# ----------------------------------------------------------------------------------------- requests


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
