"""Keeps the ledger of a running node: counts reports and transfers, updates the forecast of a
larger cache, and saves both.

Always true: counting a request never waits. Updating the forecast takes longer, so requests first
go to a bounded list, which the node's timer processes; if the list is full, the oldest requests are
dropped from it. Counts are written to the ledger's file about every SAVE_S, so a kill loses the
counts of that time. If an existing file can't be used, a new ledger starts and one line is logged;
such a file never makes the server's start fail. Runs on the event loop; a thread (`Clerk`) writes
the file.
"""

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hotkv_proto.blocks import NO_RETENTION
from hotkv_proto.groups import PREFIX_CLOSED
from hotkv_proto.reports import LoadEnd, Miss
from hotkv_proto.table import Words
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.policies import POLICIES
from hotkv_server.cache.room.policies.protocol import Keys
from hotkv_server.cache.values import HOST_TIER
from hotkv_server.ledger.book import pack
from hotkv_server.ledger.book.accounts import Account, Accounts, Usage, Values
from hotkv_server.ledger.book.forecast import GIB, Forecast, Outlook, RequestDemand
from hotkv_server.ledger.book.outcome import counted_group, note_outcome
from hotkv_server.memory.clerk import Clerk
from hotkv_server.memory.state import read_file, replace_file
from hotkv_server.node.capability import Report
from hotkv_server.node.event_loop import slices
from hotkv_server.node.live_session import LiveSession
from hotkv_server.node.names import digits_of

log = logging.getLogger(__name__)

LEDGER_FILE = "ledger"
"""Name of the file in the arena's directory. It is no part of the cache: it stays when the cache is
created anew, and is deleted only with the directory."""
SAVE_S = 2.0
CLOSE_S = 5.0
SEEN_S = 30.0
"""Interval, in seconds, at which the keys that the forecast has seen are copied for the file. It is
longer than SAVE_S, because the keys take half a megabyte. A kill then loses the newest keys, which
changes the forecast little."""
MAX_FOLLOWING = 1024
MAX_FOLLOWING_BLOCKS = 1 << 18
"""Limits of the list of requests that wait for the forecast: at most MAX_FOLLOWING requests with
MAX_FOLLOWING_BLOCKS blocks (2 MiB of keys)."""
MAX_OPEN_LOADS = 4096
"""Most requests with a load in flight that are remembered, over all engines. A request is
remembered until its engine reports the end of the load."""
DEFAULT_POLICY = "hotness"


@dataclass(frozen=True, slots=True)
class Savings:
    """The ledger's sums over a window of time.

    rows: for each account (a tenant, a key space and an engine) its usage (counts of tokens,
        seconds and bytes), the most recently used account first.
    total: usage of all accounts together.
    outlook: forecast for a larger cache.
    began_unix_s: when counting began, seconds since 1970.
    num_folded: number of accounts that were merged into other accounts.
    capacity_bytes: size of the arena.
    """

    rows: list[tuple[Account, Usage]]
    total: Usage
    outlook: Outlook
    began_unix_s: float
    num_folded: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class _OpenLoad:
    """A request whose load from the cache has not ended.

    account: the account in which the request was counted.
    usage: the usage that was counted. If the load fails, its hits are subtracted again.
    minute: minute in which the request was counted, since 1970.
    """

    account: Account
    usage: Usage
    minute: int


class LiveLedger:
    """The ledger of a running node: counts the usage of the cache (hits, misses, saved time, moved
    bytes), and forecasts the savings of a larger cache (see the module).

    directory: directory of the file; None for a ledger that ends with the process.
    tiers: names of the tiers below host memory, in the order of their numbers in `Space.origins`.
    policy: the node's eviction policy, which the forecast simulates.
    taken_back_s: saved seconds that were subtracted because of failed loads, since this server
        started.
    num_lost: number of requests that were dropped, because too many requests waited for the
        forecast.
    """

    def __init__(
        self,
        core: CacheCore,
        directory: Path | None = None,
        tiers: Sequence[str] = (),
        policy: str = DEFAULT_POLICY,
    ) -> None:
        self._core = core
        self._directory = directory
        self._tiers = (HOST_TIER, *tiers)
        kept = _read(directory)
        minute = _minute()
        self._accounts = Accounts(pack.columns_for(tiers, kept), minute)
        # For each session (connection of an engine): how many bytes it has loaded and stored since
        # the last call of `_fold_moved`, which adds them to the accounts.
        self._moved: dict[LiveSession, tuple[int, int]] = {}
        self.forecast = Forecast(POLICIES[policy], minute)
        if kept is not None:
            pack.put_back(kept, self._accounts, self.forecast)
        self._folded_before = self._accounts.num_folded
        self.num_lost = 0
        self.taken_back_s = 0.0
        self._grown = np.zeros(len(self._accounts.columns))
        self._following: deque[tuple[RequestDemand, float]] = deque()
        self._following_blocks = 0
        self._loads: OrderedDict[tuple[str, int], _OpenLoad] = OrderedDict()
        self._is_changed = False
        self._saved_s = self._seen_s = time.monotonic()
        self._seen = (self.forecast.seen(), self.forecast.seen_share)
        self._saving: Future[None] | None = None
        # True if the last write of the file has failed. Only the first failure in a row is logged.
        self._is_broken = False

    def __repr__(self) -> str:
        return f"LiveLedger({self._accounts!r}, {len(self._following)} reports to follow)"

    @property
    def accounts(self) -> Accounts:
        """Returns the ledger's accounts, including all counts until now."""
        self._fold_moved()
        return self._accounts

    # Events

    def report(self, session: LiveSession, report: Report) -> None:
        """Counts a request that an engine has scheduled."""
        outcome = note_outcome(
            self._core,
            session.record.key_space_id,
            report.hashes,
            report.prompt_tokens,
            report.device_hit_tokens,
            report.hit_tokens,
            report.miss,
        )
        account = _account(session)
        usage = Usage(
            requests=1,
            prompt_tokens=report.prompt_tokens,
            device_hit_tokens=report.device_hit_tokens,
            saved_s=self.accounts.saved_s(
                account.key_space,
                sum(outcome.hit_tokens.values()),
                report.saved_s,
                session.prefill_tokens_per_s,
            ),
            waited_s=report.wait_s,
            hit_tokens={self._tiers[at]: count for at, count in outcome.hit_tokens.items()},
            missed_tokens=outcome.missed_tokens,
        )
        self._count(account, usage)
        if report.report_id and outcome.hit_tokens:
            self._loads[session.secret_id, report.report_id] = _OpenLoad(account, usage, _minute())
            if len(self._loads) > MAX_OPEN_LOADS:
                self._loads.popitem(last=False)
        self._follow(session, report)

    def load_ended(self, session: LiveSession, end: LoadEnd) -> None:
        """Counts the wait for a load. If the load failed, subtracts the hit and its saved time,
        counts the hit's tokens as missed, and counts a failed load. Does not count a failed load if
        the request ended before its load (`wait_s` is 0), or if the engine itself cancelled the
        load."""
        was = self._loads.pop((session.secret_id, end.report_id), None)
        if was is None or not end.failed:
            # Count only the wait if the load has succeeded, or if its request is not remembered.
            # The request was then forgotten, or an earlier load of it was counted: after a
            # preemption a request may load again.
            self._count(_account(session), Usage(waited_s=end.wait_s))
        else:
            failed = int(end.wait_s > 0 and end.miss is Miss.FAILED_LOAD)
            self._take_back(was, Usage(waited_s=end.wait_s, failed_loads=failed), end.miss)

    def _take_back(self, load: _OpenLoad, more: Usage, why: Miss = Miss.FAILED_LOAD) -> None:
        """Subtracts the hit of a load, counts its tokens as missed for the reason `why`, and adds
        the usage `more`. Adds all of this to the minute in which the hit was counted, so that no
        window of time has a negative number of hits."""
        hits = load.usage.hit_tokens
        self._count(
            load.account,
            replace(
                more,
                saved_s=-load.usage.saved_s,
                hit_tokens={tier: -count for tier, count in hits.items()},
                missed_tokens={why: sum(hits.values())},
            ),
            max(0, _minute() - load.minute),
        )

    def session_closed(self, session: LiveSession) -> None:
        """Subtracts the hits of those loads of a closed session (connection of an engine) whose end
        was not reported, because the engine or the request ended first. Does not count these loads
        as failed, because operators watch the number of failed loads."""
        for key in [key for key in self._loads if key[0] == session.secret_id]:
            self._take_back(self._loads.pop(key), Usage())

    def moved(self, session: LiveSession, loaded_bytes: int, stored_bytes: int) -> None:
        """Counts the bytes of a transfer (load or store) for a session (connection of an engine).
        They are added to the accounts at the next turn of the timer, or when the accounts are next
        read."""
        if loaded_bytes or stored_bytes:
            loaded, stored = self._moved.get(session, (0, 0))
            self._moved[session] = loaded + loaded_bytes, stored + stored_bytes

    def _fold_moved(self) -> None:
        moved, self._moved = self._moved, {}
        for session, (loaded, stored) in moved.items():
            self._count(_account(session), Usage(loaded_bytes=loaded, stored_bytes=stored))

    def _count(self, account: Account, usage: Usage, age_minutes: int = 0) -> None:
        values = self._accounts.columns.values(usage)
        self._accounts.add(account, values, _minute(), age_minutes)
        self._grown += np.maximum(values, 0.0)
        self.taken_back_s += max(-usage.saved_s, 0.0)
        self._is_changed = True

    # Feeding the forecast

    def _follow(self, session: LiveSession, report: Report) -> None:
        key_space, number = session.key_space, session.record.key_space_id
        group = key_space.groups[counted_group(key_space)]
        step = group.block_tokens // key_space.hash_block_tokens
        demand = RequestDemand(
            _keys(report.hashes[step - 1 :: step], key_space.fingerprint),
            report.prompt_tokens,
            group.block_tokens,
            _block_bytes(self._core, number, group.block_tokens),
            report.hit_tokens // group.block_tokens,
            report.retention == NO_RETENTION
            and self._core.space.room.may_keep_at(group.slot_bytes),
        )
        self._following.append((demand, time.monotonic()))
        self._following_blocks += len(demand.keys)
        while len(self._following) > MAX_FOLLOWING or self._following_blocks > MAX_FOLLOWING_BLOCKS:
            oldest, _ = self._following.popleft()
            self._following_blocks -= len(oldest.keys)
            self.num_lost += 1

    def follow(self) -> Iterator[None]:
        """Forwards the requests reported so far to the forecast, one request per step of the
        generator. Requests that arrive between two steps wait for the next call, so the generator
        always ends."""
        capacity_bytes = self._core.space.pool.capacity_bytes
        for _ in range(len(self._following)):
            if not self._following:
                # The list can be empty: between two steps a large new request may have arrived, for
                # which the waiting requests were dropped.
                return
            demand, now_s = self._following.popleft()
            self._following_blocks -= len(demand.keys)
            self.forecast.observe(demand, capacity_bytes, now_s, _minute())
            self._is_changed = True
            yield

    async def turn(self, clerk: Clerk) -> None:
        """Forwards waiting requests to the forecast. If SAVE_S has passed since the last write,
        also makes the thread of `clerk` write the ledger's file. Called by the node's timer."""
        self._fold_moved()
        async for _ in slices(self.follow()):
            pass
        now_s = time.monotonic()
        is_writing = self._saving is not None and not self._saving.done()
        if self._directory is None or not self._is_changed or is_writing:
            return
        if now_s >= self._saved_s + SAVE_S:
            self._saved_s, self._is_changed = now_s, False
            if now_s >= self._seen_s + SEEN_S:
                self._note_seen()
            directory, pieces = self._directory, self._pieces()
            self._saving = clerk.do(lambda: self._write(directory, pieces))

    async def close(self) -> None:
        """Waits until a running write of the ledger's file has ended, at most CLOSE_S."""
        if self._saving is not None:
            await asyncio.wait([asyncio.wrap_future(self._saving)], timeout=CLOSE_S)

    def save(self) -> None:
        """Forwards waiting requests to the forecast and writes the ledger's file. Blocks the
        calling thread."""
        for _ in self.follow():
            pass
        self._note_seen()
        if self._directory is not None:
            self._write(self._directory, self._pieces())

    def _write(self, directory: Path, pieces: list[bytes]) -> None:
        """Writes the ledger's file. Called on the clerk's thread."""
        try:
            replace_file(directory / LEDGER_FILE, [pack.seal(pieces)])
            self._is_broken = False
        except OSError as error:
            if not self._is_broken:
                log.warning("ledger not saved: %s", error)
            self._is_broken = True

    def _note_seen(self) -> None:
        self._seen_s = time.monotonic()
        self._seen = (self.forecast.seen(), self.forecast.seen_share)

    def _pieces(self) -> list[bytes]:
        return pack.pack(self.accounts, self.forecast, *self._seen)

    # Queries

    def savings(self, since_s: float = 0.0, *, has_rows: bool = True) -> Savings:
        """Returns the sums over the last `since_s` seconds. Rounds `since_s` up to whole minutes,
        or to whole hours if it is above two hours. 0 means all time.

        has_rows: False returns only the total, which is faster.
        """
        minute, columns = _minute(), self.accounts.columns
        rows = self.accounts.since(since_s, minute) if has_rows else []
        return Savings(
            [(account, columns.usage(values)) for account, values in rows],
            columns.usage(self.accounts.total.since(since_s, minute)),
            self.outlook(since_s),
            self.accounts.began_minute * 60.0,
            self.accounts.num_folded,
            self._core.space.pool.capacity_bytes,
        )

    def outlook(self, since_s: float) -> Outlook:
        """Returns the forecast for a larger cache, computed from the requests of the last `since_s`
        seconds; 0: all requests.

        The forecast estimates the hits of an endless cache from a sample, so the estimate may be
        too low. If it is lower than the hits that were counted, the counted hits are returned.
        Limits the gain that is forecast for more memory. The limit is the share of tokens that an
        endless cache would hit, minus the share of tokens that have hit in any tier. Without this
        limit, a block that hits in a tier below host memory already would count as a gain.
        """
        minute = _minute()
        found = self.forecast.outlook(since_s, self._core.space.pool.capacity_bytes, minute)
        total = self.accounts.columns.usage(self.accounts.total.since(since_s, minute))
        if not found.prompt_tokens or not total.prompt_tokens:
            return found
        num_hits = total.device_hit_tokens + sum(total.hit_tokens.values())
        hit_ratio = num_hits / total.prompt_tokens
        most_gain = max(0.0, found.ceiling_ratio - hit_ratio)
        return replace(
            found,
            ceiling_ratio=max(found.ceiling_ratio, hit_ratio),
            gain_ratio=min(found.gain_ratio, most_gain),
            gib_gain_ratio=min(found.gib_gain_ratio, most_gain * GIB / found.step_bytes),
        )

    def minutes(self) -> Values:
        """Returns the usage of each of the last minutes, the oldest minute first. The current
        minute comes last."""
        return self.accounts.total.minutes(_minute())

    @property
    def num_folded(self) -> int:
        """Returns the number of accounts (each a tenant, key space and engine) that were merged
        into other accounts since this server started."""
        return self.accounts.num_folded - self._folded_before

    @property
    def grown(self) -> Usage:
        """Returns the usage (hits, saved prefill time, moved bytes and so on) counted since this
        server started. Hits of loads that failed later are not subtracted, because Prometheus
        requires that counters never fall."""
        self._fold_moved()
        return self._accounts.columns.usage(self._grown)


def _minute() -> int:
    return int(time.time() // 60)


def _account(session: LiveSession) -> Account:
    key_space = session.key_space
    engine_id = session.record.engine_id
    return Account(key_space.tenant, key_space.model, digits_of(key_space), engine_id)


def _keys(hashes: Words, fingerprint: bytes) -> Keys:
    """Returns a 64-bit key for each block hash, uint64 [n]. It is mixed with the key space's
    fingerprint, and stays the same after a restart."""
    salt = np.uint64(int.from_bytes(fingerprint[:8], "little"))
    keys: Keys = np.ascontiguousarray(hashes[:, :2]).view(np.uint64)[:, 0] ^ salt
    return keys


def _block_bytes(core: CacheCore, key_space_id: int, block_tokens: int) -> int:
    """Returns how many bytes of the arena `block_tokens` tokens of a prompt take.

    Counts only the groups in which a hit needs every block, because other groups store few blocks
    of a prompt. If there is no such group, counts the first group.
    """
    groups = core.key_space(key_space_id).groups
    closed = [group for group in groups if group.kind in PREFIX_CLOSED] or [groups[0]]
    return sum(group.slot_bytes * block_tokens // group.block_tokens for group in closed)


def _read(directory: Path | None) -> pack.Kept | None:
    """Reads an earlier server's ledger. Returns None if the file is missing or can't be used."""
    if directory is None:
        return None
    try:
        return pack.unpack(read_file(directory / LEDGER_FILE, pack.MAX_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("ledger begins anew: its file can't be used: %s", error)
        return None
