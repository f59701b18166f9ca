"""Accounts: what each engine of each tenant has used, by key space.

Always true: there are at most `max_accounts`; what was ever counted is in exactly one of them and
in `total`. A new account beyond that folds the one that was used longest ago: engines of a key
space into one account named OTHERS, and those into one for the whole node. So engines that come and
go under new names do not grow it.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace

import numpy as np

from hotkv_server.ledger.book.buckets import Buckets, Values
from hotkv_server.ledger.book.columns import Columns

MAX_ACCOUNTS = 64
"""With some 30 columns an account has 75 KB."""
OTHERS = "others"


@dataclass(frozen=True, slots=True)
class Account:
    """Who: `tenant` (empty without tenants), `model` and `key_space`, the fingerprint's first
    digits, and the engine."""

    tenant: str
    model: str
    key_space: str
    engine_id: str

    def folded(self) -> "Account":
        """The account that this one is folded into; itself if there is none."""
        if self.engine_id != OTHERS:
            return replace(self, engine_id=OTHERS)
        return Account(OTHERS, OTHERS, OTHERS, OTHERS)


class Accounts:
    """See the module. Times are whole minutes since 1970."""

    def __init__(self, columns: Columns, minute: int, max_accounts: int = MAX_ACCOUNTS) -> None:
        self.columns = columns
        self.began_minute = minute
        self.num_folded = 0
        self.total = Buckets(len(columns), minute)
        self._max_accounts = max_accounts
        # The one used longest ago first.
        self._rows: OrderedDict[Account, Buckets] = OrderedDict()

    def __repr__(self) -> str:
        return f"Accounts({len(self._rows)} accounts, {self.num_folded} folded)"

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, account: Account, values: Values, minute: int) -> None:
        """Counts `values` [columns] for an account."""
        row = self._rows.get(account)
        if row is None:
            row = self._open(account, minute)
        self._rows.move_to_end(account)
        row.add(values, minute)
        self.total.add(values, minute)

    def since(self, seconds: float, minute: int) -> list[tuple[Account, Values]]:
        """The sums of each account that has some, as `Buckets.since`; the one used last comes
        first."""
        sums = ((account, row.since(seconds, minute)) for account, row in self._rows.items())
        return [(account, values) for account, values in sums if values.any()][::-1]

    def _open(self, account: Account, minute: int) -> Buckets:
        while len(self._rows) >= self._max_accounts:
            self._fold()
        row = self._rows[account] = Buckets(len(self.columns), minute)
        return row

    def _fold(self) -> None:
        """Folds the account that was used longest ago. Each call takes one away, or brings one
        closer to the account for all."""
        oldest = next(one for one in self._rows if one.folded() != one)
        row, target = self._rows.pop(oldest), oldest.folded()
        self.num_folded += 1
        if target in self._rows:
            self._rows[target].merge(row)
            # Accounts of key spaces whose engines come and go are in use.
            self._rows.move_to_end(target)
        else:
            self._rows[target] = row

    # What outlives the server

    def rows(self) -> list[tuple[Account, Buckets]]:
        """All accounts, the one used longest ago first."""
        return list(self._rows.items())

    def put_back(self, account: Account, row: Buckets) -> None:
        """Takes over an account of an earlier server, which was used later than those before."""
        while len(self._rows) >= self._max_accounts:
            self._fold()
        self._rows[account] = row
        self.total.merge(row)

    def check_invariants(self) -> None:
        """Raises AssertionError if the accounts do not add up."""
        assert len(self._rows) <= self._max_accounts, "too many accounts"
        whole = sum((row.total for row in self._rows.values()), np.zeros(len(self.columns)))
        assert np.allclose(whole, self.total.total), "accounts do not add up to the total"
