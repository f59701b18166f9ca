"""Keeps where each block in host memory came from.

Always true: memory is bounded: eight bytes for each entry, and the names of MAX_ENGINES engines.
"""

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from hotkv_server.cache.values import Entries

MAX_ENGINES = 4096
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
