"""Sums up usage (tokens, seconds, bytes) by account and over time. An account is a tenant, a key
space (a model in a configuration) and an engine. Each account has the same counts (columns):
the numbers of `Usage`, the tokens that hit in each tier, and the tokens that missed for each
reason.

Always true: there are at most `max_accounts` accounts. Every count is in exactly one account and in
`total`. If there are too many accounts, the least recently used account is folded: it is merged
into another account. An account of a single engine is merged into the key space's account with the
engine OTHERS. An account with the engine OTHERS is merged into a single account for the whole node.
So memory is fixed, however many engine names there are. Each token of a prompt is counted once: as
a hit on the device, a hit in a tier, or a miss for a reason.
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
"""Number of hours for which there is a sum per hour: eight days. (NUM_MINUTES is the number of
minutes for which there is a sum per minute: two hours.)"""
NUM_CELLS = 1 + NUM_MINUTES + NUM_HOURS
"""Number of rows of `Buckets.cells`: a row with the sums of all time, then a row for each minute,
then a row for each hour."""
FIRST_HOUR = 1 + NUM_MINUTES
MAX_BACK_MINUTES = 60
"""If the clock goes back by more minutes than this, all minutes and hours are cleared."""
Values = NDArray[np.float64]
# The names of the first columns, in the order of the fields of `Usage`.
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
"""Reasons under which missed tokens are counted. ABSENT is not among them: the module `outcome`
replaces it by a more exact reason before counting."""
MAX_TIERS = 16
MAX_ACCOUNTS = 64
"""Default limit of the number of accounts (each a tenant, key space and engine). An account with 30
columns (counts) takes 75 KB."""
OTHERS = "others"
"""Name in place of engine, tenant and model, for an account into which other accounts were folded
(merged)."""


# ----------------------------------------------------------------------------------- sums over time


def window_s(seconds: float) -> int:
    """Returns the length of the window of time over which counts are summed, in seconds. It is
    `seconds`, rounded up to whole minutes, or to whole hours if it is above two hours, and is at
    most eight days. 0 means all time."""
    if (minutes := math.ceil(seconds / 60)) <= NUM_MINUTES:
        return 60 * minutes
    return 3600 * min(math.ceil(seconds / 3600), NUM_HOURS)


class Buckets:
    """Sums each column of the ledger (a count, such as prompt tokens) by minute, by hour, and over
    all time.

    A count is added to the bucket of its minute, to the bucket of its hour, and to the sum of all
    time. Time is wall-clock time in whole minutes since 1970, so that buckets outlive the server.
    If the clock goes back by an hour or less, counts are added to the newest minute. If the clock
    goes back further, all minutes and hours are cleared: until the clock has caught up, new counts
    could not be distinguished from older counts.

    cells: float64 [NUM_CELLS, columns]: the sum of all time, then a ring buffer of minutes, then a
        ring buffer of hours.
    minute: the newest minute, since 1970.
    """

    __slots__ = ("cells", "minute")

    def __init__(self, num_columns: int, minute: int) -> None:
        self.cells: Values = np.zeros((NUM_CELLS, num_columns))
        self.minute = minute

    def __repr__(self) -> str:
        return f"Buckets({self.cells.shape[1]} columns, minute {self.minute})"

    @property
    def total(self) -> Values:
        """Returns the sums of all time [columns], as a view."""
        total: Values = self.cells[0]
        return total

    def add(self, values: Values, minute: int, age_minutes: int = 0) -> None:
        """Adds `values` [columns] to three sums: of one minute, of its hour, and of all time. This
        minute is `age_minutes` before the present minute `minute`."""
        self.advance(minute)
        cells, at = self.cells, self.minute - age_minutes
        cells[0] += values
        if age_minutes < NUM_MINUTES:
            cells[1 + at % NUM_MINUTES] += values
        if self.minute // 60 - at // 60 < NUM_HOURS:
            cells[FIRST_HOUR + at // 60 % NUM_HOURS] += values

    def advance(self, minute: int) -> None:
        """Makes `minute` the newest minute if it is later, and clears the sums of minutes and hours
        that are too old. If the clock went back by more than MAX_BACK_MINUTES, clears the sums of
        all minutes and hours."""
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
        """Returns the sums [columns] of the last `window_s(seconds)` seconds, up to and including
        `minute`.

        seconds: 0: all time.
        """
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
        """Returns the sums of each of the last minutes [NUM_MINUTES, columns], the oldest minute
        first. The last row is `minute`."""
        self.advance(minute)
        at = 1 + np.arange(self.minute - NUM_MINUTES + 1, self.minute + 1) % NUM_MINUTES
        newest: Values = self.cells[at]
        return newest

    def merge(self, other: "Buckets") -> None:
        """Adds all counts of `other` to this object, each to the same minute and hour."""
        latest = max(self.minute, other.minute)
        self.advance(latest)
        other.advance(latest)
        self.cells += other.cells


# ------------------------------------------------------------------------------------------ columns


@dataclass(frozen=True, slots=True)
class Usage:
    """Amounts to add to an account after one of three events: an engine has scheduled a request, a
    load from the cache has ended, or transfers have moved bytes. After a failed load, `saved_s` and
    `hit_tokens` are negative: they cancel the hit that was counted before. The tokens of the hit
    are counted in `missed_tokens` instead, in the minute of the hit.

    device_hit_tokens: prompt tokens that hit in the engine's own device memory.
    saved_s: seconds of prefill that hits saved.
    waited_s: seconds that requests waited for the cache.
    hit_tokens: prompt tokens that hit in hotkv, by name of the tier.
    missed_tokens: prompt tokens that were computed, by reason.
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
    """The columns of the ledger: its counts, such as prompt tokens or hits in a tier. Converts
    between `Usage` and rows with a value for each column.

    tiers: names of the tiers, host memory first.
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
        """Returns the index of a column of the ledger (a count, such as prompt tokens)."""
        return self._at[name]

    def values(self, usage: Usage) -> Values:
        """Converts a usage to values [columns]. Hits in an unknown tier are added to host
        memory."""
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
        """Converts values [columns] to a usage: the inverse of `values`. Counts of requests, tokens
        and bytes are truncated to whole numbers."""
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
    """The identity of an account of the ledger: a tenant, a model, a key space (a model in a
    configuration) and an engine.

    tenant: name of the tenant; empty if no tenants are configured.
    key_space: first digits of the key space's fingerprint.
    """

    tenant: str
    model: str
    key_space: str
    engine_id: str

    def folded(self) -> "Account":
        """Returns the account into which this account (a tenant, key space and engine) is merged if
        there are too many accounts. For the account of the whole node, returns the same account."""
        if self.engine_id != OTHERS:
            return replace(self, engine_id=OTHERS)
        return Account(OTHERS, OTHERS, OTHERS, OTHERS)


MAX_SPEEDS = 1024
"""Most key spaces whose prefill speed is remembered."""
SLOWEST, FASTEST = 1.0, 1e9
"""Limits of a prefill speed, in tokens per second. A speed outside the limits is ignored, so that a
report can't make the sums infinite."""


class Accounts:
    """All accounts of the ledger, each with its sums of usage. Times are in whole minutes since
    1970.

    began_minute: when counting began.
    num_folded: number of accounts that were folded (merged into other accounts).
    total: sums of all accounts together.
    speeds: prefill speed in tokens per second, by key space, as an engine last reported it. It is
        kept after the engine has ended, because a new engine has hits before it has measured its
        own speed.
    """

    def __init__(self, columns: Columns, minute: int, max_accounts: int = MAX_ACCOUNTS) -> None:
        self.columns = columns
        self.began_minute = minute
        self.num_folded = 0
        self.total = Buckets(len(columns), minute)
        self.speeds: dict[str, float] = {}
        self._max_accounts = max_accounts
        # The least recently used account comes first.
        self._rows: OrderedDict[Account, Buckets] = OrderedDict()

    def __repr__(self) -> str:
        return f"Accounts({len(self._rows)} accounts, {self.num_folded} folded)"

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, account: Account, values: Values, minute: int, age_minutes: int = 0) -> None:
        """Adds `values` [columns] to an account (a tenant, key space and engine) and to the total,
        in the minute that is `age_minutes` before the present minute `minute`. Opens the account if
        it is new."""
        row = self._rows.get(account)
        if row is None:
            row = self._open(account, minute)
        self._rows.move_to_end(account)
        row.add(values, minute, age_minutes)
        self.total.add(values, minute, age_minutes)

    def saved_s(self, key_space: str, hit_tokens: int, said_s: float, speed: float) -> float:
        """Returns the seconds of prefill that a hit saved, and remembers the key space's speed.

        said_s: seconds that the engine reports; the result is then `said_s`. 0: the engine does not
            know; the result is then computed from the remembered speed, and is 0 without a speed.
        speed: the engine's prefill speed in tokens/s. 0: the engine does not report it; it is then
            computed from `said_s` and `hit_tokens`.
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
        """Returns each account (tenant, key space and engine) with the sums of its columns over the
        window of time that `Buckets.since` chooses, the most recently used account first. Leaves
        out accounts whose sums are all 0."""
        sums = ((account, row.since(seconds, minute)) for account, row in self._rows.items())
        return [(account, values) for account, values in sums if values.any()][::-1]

    def _open(self, account: Account, minute: int) -> Buckets:
        while len(self._rows) >= self._max_accounts:
            self._fold()
        row = self._rows[account] = Buckets(len(self.columns), minute)
        return row

    def _fold(self) -> None:
        """Folds the least recently used account: merges it into the account that `Account.folded`
        returns. If that account does not exist yet, only renames the least recently used account; a
        later call then reduces the number of accounts."""
        oldest = next(one for one in self._rows if one.folded() != one)
        row, target = self._rows.pop(oldest), oldest.folded()
        self.num_folded += 1
        if target in self._rows:
            self._rows[target].merge(row)
            # Merging a row into the account `target` counts as a use of `target`, so that it is not
            # folded next.
            self._rows.move_to_end(target)
        else:
            self._rows[target] = row

    # Saving and restoring

    def rows(self) -> list[tuple[Account, Buckets]]:
        """Returns all accounts (each a tenant, key space and engine), the least recently used
        account first."""
        return list(self._rows.items())

    def put_back(self, account: Account, row: Buckets) -> None:
        """Restores an account of an earlier server. Call this method in order of use: the account
        counts as used more recently than all accounts that were restored before it. A server of
        another version may have had more accounts; the accounts that were restored first are then
        folded (merged into other accounts)."""
        while len(self._rows) >= self._max_accounts:
            self._fold()
        self._rows[account] = row
        self.total.merge(row)

    def check_invariants(self) -> None:
        """Raises AssertionError if there are too many accounts, or if the accounts do not add up to
        the total."""
        assert len(self._rows) <= self._max_accounts, "too many accounts"
        whole = sum((row.total for row in self._rows.values()), np.zeros(len(self.columns)))
        assert np.allclose(whole, self.total.total), "accounts do not add up to the total"
