"""Sums up usage by account (tenant, key space, engine) and over time, in columns: the numbers of
`Usage`, tokens hit per tier, tokens missed per reason.

Always true: memory is fixed. Every count is in exactly one account and in `total`; each prompt
token counts once, as a hit on the device, a hit in a tier, or a miss. Above `max_accounts` the
least recently used is folded: an engine into its key space's OTHERS, that into one account for
the node.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.reports import Miss
from hotkv_server.cache.values import HOST_TIER

NUM_MINUTES = 120
NUM_HOURS = 192
"""Eight days; NUM_MINUTES are two hours."""
NUM_CELLS = 1 + NUM_MINUTES + NUM_HOURS
"""Rows of `Buckets.cells`: all time, minutes, hours."""
FIRST_HOUR = 1 + NUM_MINUTES
MAX_BACK_MINUTES = 60
"""If the clock goes back further, all minutes and hours are cleared."""
Values = NDArray[np.float64]
# In the order of the fields of `Usage`.
FIXED = (
    "requests",
    "prompt_tokens",
    "device_hit_tokens",
    "saved_s",
    "waited_s",
    "failed_loads",
    "loaded_bytes",
    "stored_bytes",
)
HIT, MISSED = "hit_tokens/", "missed_tokens/"
REASONS = tuple(reason for reason in Miss if reason is not Miss.ABSENT)
"""`outcome` replaces ABSENT by a more exact reason before counting."""
MAX_TIERS = 16
MAX_ACCOUNTS = 64
"""75 KB each, with 30 columns."""
OTHERS = "others"
"""Engine, tenant or model of an account into which others were folded."""


# ----------------------------------------------------------------------------------- sums over time


def window_s(seconds: float) -> int:
    """`seconds` rounded up to minutes, or to hours above two; at most eight days. 0: all time."""
    if (minutes := math.ceil(seconds / 60)) <= NUM_MINUTES:
        return 60 * minutes
    return 3600 * min(math.ceil(seconds / 3600), NUM_HOURS)


class Buckets:
    """Sums columns by minute, by hour, and over all time.

    Time is wall-clock minutes since 1970, so that buckets outlive the server. If the clock goes
    back an hour at most, counts go to the newest minute; further back, minutes and hours are
    cleared, as new counts could not be told from old ones.

    cells: float64 [NUM_CELLS, columns]: all time, ring of minutes, ring of hours.
    minute: the newest.
    """

    __slots__ = ("cells", "minute")

    def __init__(self, num_columns: int, minute: int) -> None:
        self.cells: Values = np.zeros((NUM_CELLS, num_columns))
        self.minute = minute

    def __repr__(self) -> str:
        return f"Buckets({self.cells.shape[1]} columns, minute {self.minute})"

    @property
    def total(self) -> Values:
        """[columns], a view."""
        total: Values = self.cells[0]
        return total

    def add(self, values: Values, minute: int, age_minutes: int = 0) -> None:
        """Adds `values` [columns] to the minute `age_minutes` before `minute`, to its hour and
        to all time."""
        self.advance(minute)
        cells, at = self.cells, self.minute - age_minutes
        cells[0] += values
        if age_minutes < NUM_MINUTES:
            cells[1 + at % NUM_MINUTES] += values
        if self.minute // 60 - at // 60 < NUM_HOURS:
            cells[FIRST_HOUR + at // 60 % NUM_HOURS] += values

    def advance(self, minute: int) -> None:
        """Clears what `minute` makes too old."""
        passed = minute - self.minute
        if passed < -MAX_BACK_MINUTES:
            self.cells[1:] = 0.0
            self.minute = minute
        if passed <= 0:
            return
        for newer in range(self.minute + 1, minute + 1)[-NUM_MINUTES:]:
            self.cells[1 + newer % NUM_MINUTES] = 0.0
        for newer in range(self.minute // 60 + 1, minute // 60 + 1)[-NUM_HOURS:]:
            self.cells[FIRST_HOUR + newer % NUM_HOURS] = 0.0
        self.minute = minute

    def since(self, seconds: float, minute: int) -> Values:
        """[columns] of the last `window_s(seconds)`, including `minute`."""
        self.advance(minute)
        if not (window := window_s(seconds)):
            return self.total.copy()
        if (count := window // 60) <= NUM_MINUTES:
            at = 1 + np.arange(self.minute - count + 1, self.minute + 1) % NUM_MINUTES
        else:
            count, hour = window // 3600, self.minute // 60
            at = FIRST_HOUR + np.arange(hour - count + 1, hour + 1) % NUM_HOURS
        sums: Values = self.cells[at].sum(axis=0)
        return sums

    def minutes(self, minute: int) -> Values:
        """[NUM_MINUTES, columns], oldest first; the last row is `minute`."""
        self.advance(minute)
        at = 1 + np.arange(self.minute - NUM_MINUTES + 1, self.minute + 1) % NUM_MINUTES
        newest: Values = self.cells[at]
        return newest

    def merge(self, other: "Buckets") -> None:
        """Adds all counts, minute by minute."""
        latest = max(self.minute, other.minute)
        self.advance(latest)
        other.advance(latest)
        self.cells += other.cells


# ------------------------------------------------------------------------------------------ columns


@dataclass(frozen=True, slots=True)
class Usage:
    """What one event adds to an account: a scheduled request, the end of a load, or moved bytes. A
    failed load cancels its hit with negative `saved_s` and `hit_tokens`, in the minute of the hit.

    device_hit_tokens: hits in the engine's own memory.
    waited_s: for the cache.
    hit_tokens: by name of the tier.
    missed_tokens: computed, by reason.
    """

    requests: int = 0
    prompt_tokens: int = 0
    device_hit_tokens: int = 0
    saved_s: float = 0.0
    waited_s: float = 0.0
    failed_loads: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    hit_tokens: Mapping[str, int] = field(default_factory=dict)
    missed_tokens: Mapping[Miss, int] = field(default_factory=dict)


class Columns:
    """Converts between `Usage` and rows of values.

    tiers: host memory first.
    """

    def __init__(self, tiers: Iterable[str]) -> None:
        self.tiers = tuple(dict.fromkeys((HOST_TIER, *tiers)))[:MAX_TIERS]
        self.names = (
            *FIXED,
            *(HIT + tier for tier in self.tiers),
            *(MISSED + reason.name.lower() for reason in REASONS),
        )
        self._at = {name: at for at, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"Columns({len(self)}, tiers={self.tiers})"

    def at(self, name: str) -> int:
        return self._at[name]

    def values(self, usage: Usage) -> Values:
        """Hits in an unknown tier count as host memory's."""
        values = np.zeros(len(self))
        values[: len(FIXED)] = (
            usage.requests,
            usage.prompt_tokens,
            usage.device_hit_tokens,
            usage.saved_s,
            usage.waited_s,
            usage.failed_loads,
            usage.loaded_bytes,
            usage.stored_bytes,
        )
        host = self._at[HIT + HOST_TIER]
        for tier, tokens in usage.hit_tokens.items():
            values[self._at.get(HIT + tier, host)] += tokens
        for reason, tokens in usage.missed_tokens.items():
            values[self._at[MISSED + reason.name.lower()]] += tokens
        return values

    def usage(self, values: Values) -> Usage:
        """Inverse of `values`; requests, tokens and bytes are truncated to whole numbers."""
        numbers = values.tolist()
        whole = [int(number) for number in numbers]
        first_reason = len(FIXED) + len(self.tiers)
        requests, prompt_tokens, device_hit_tokens, _, _, failed_loads, loaded, stored = whole[
            : len(FIXED)
        ]
        _, _, _, saved_s, waited_s, *_ = numbers
        return Usage(
            requests,
            prompt_tokens,
            device_hit_tokens,
            saved_s,
            waited_s,
            failed_loads,
            loaded,
            stored,
            dict(zip(self.tiers, whole[len(FIXED) : first_reason], strict=True)),
            dict(zip(REASONS, whole[first_reason:], strict=True)),
        )


# ----------------------------------------------------------------------------------------- accounts


@dataclass(frozen=True, slots=True)
class Account:
    """Names an account.

    tenant: empty if none are configured.
    key_space: first digits of the fingerprint.
    """

    tenant: str
    model: str
    key_space: str
    engine_id: str

    def folded(self) -> "Account":
        """Account to merge into; itself for the account of the whole node."""
        if self.engine_id != OTHERS:
            return replace(self, engine_id=OTHERS)
        return Account(OTHERS, OTHERS, OTHERS, OTHERS)


MAX_SPEEDS = 1024
"""Key spaces whose prefill speed is remembered."""
SLOWEST, FASTEST = 1.0, 1e9
"""Tokens/s; speeds outside are ignored, so that a report can't make sums infinite."""


class Accounts:
    """Times are minutes since 1970.

    speeds: last reported prefill speed in tokens/s, by key space. Outlives the engine: a new one
        has hits before it has measured its own speed.
    """

    def __init__(self, columns: Columns, minute: int, max_accounts: int = MAX_ACCOUNTS) -> None:
        self.columns = columns
        self.began_minute = minute
        self.num_folded = 0
        self.total = Buckets(len(columns), minute)
        self.speeds: dict[str, float] = {}
        self._max_accounts = max_accounts
        # Least recently used first.
        self._rows: OrderedDict[Account, Buckets] = OrderedDict()

    def __repr__(self) -> str:
        return f"Accounts({len(self._rows)} accounts, {self.num_folded} folded)"

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, account: Account, values: Values, minute: int, age_minutes: int = 0) -> None:
        """`values` [columns] count `age_minutes` before `minute`."""
        row = self._rows.get(account)
        if row is None:
            row = self._open(account, minute)
        self._rows.move_to_end(account)
        row.add(values, minute, age_minutes)
        self.total.add(values, minute, age_minutes)

    def saved_s(self, key_space: str, hit_tokens: int, said_s: float, speed: float) -> float:
        """Seconds of prefill that a hit saved; remembers the speed.

        said_s: the engine's own figure, returned unless 0. 0: computed from the remembered speed, 0
            without one.
        speed: tokens/s; 0: computed from `said_s`.
        """
        if not speed and said_s > 0:
            speed = hit_tokens / said_s
        if SLOWEST <= speed <= FASTEST:
            self.speeds.pop(key_space, None)
            self.speeds[key_space] = speed
            while len(self.speeds) > MAX_SPEEDS:
                del self.speeds[next(iter(self.speeds))]
        known = self.speeds.get(key_space, 0.0)
        return said_s or (max(0, hit_tokens) / known if known else 0.0)

    def since(self, seconds: float, minute: int) -> list[tuple[Account, Values]]:
        """By `Buckets.since`, most recently used account first, without accounts of only zeros."""
        sums = ((account, row.since(seconds, minute)) for account, row in self._rows.items())
        return [(account, values) for account, values in sums if values.any()][::-1]

    def _open(self, account: Account, minute: int) -> Buckets:
        while len(self._rows) >= self._max_accounts:
            self._fold()
        row = self._rows[account] = Buckets(len(self.columns), minute)
        return row

    def _fold(self) -> None:
        """Merges the least recently used account, or only renames it if its target does not
        exist: a later call then removes one.
        """
        oldest = next(one for one in self._rows if one.folded() != one)
        row, target = self._rows.pop(oldest), oldest.folded()
        self.num_folded += 1
        if target in self._rows:
            self._rows[target].merge(row)
            # Counts as a use, so that `target` is not folded next.
            self._rows.move_to_end(target)
        else:
            self._rows[target] = row

    # Saving and restoring

    def rows(self) -> list[tuple[Account, Buckets]]:
        """Least recently used first."""
        return list(self._rows.items())

    def put_back(self, account: Account, row: Buckets) -> None:
        """Call in order of use, least recent first. Folds if an earlier server allowed more
        accounts."""
        while len(self._rows) >= self._max_accounts:
            self._fold()
        self._rows[account] = row
        self.total.merge(row)

    def check_invariants(self) -> None:
        assert len(self._rows) <= self._max_accounts, "too many accounts"
        whole = sum((row.total for row in self._rows.values()), np.zeros(len(self.columns)))
        assert np.allclose(whole, self.total.total), "accounts do not add up to the total"
