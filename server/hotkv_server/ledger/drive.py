"""Keeps the ledger of a running node: counts reports and transfers, feeds the forecast, saves both.

Always true: counting never waits. The forecast is slower, so requests go through a bounded list
that the node's timer works off; a full list drops its oldest. Counts are saved about every
SAVE_S, which is what a kill loses. An unusable file starts a new ledger and never fails a start.
Event loop only; a thread (`Clerk`) writes the file.
"""

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hotkv_proto.blocks import NO_RETENTION
from hotkv_proto.groups import PREFIX_CLOSED
from hotkv_proto.reports import LoadEnd, Miss
from hotkv_proto.table import Words
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.policies.hotness import Hotness
from hotkv_server.cache.room.policies.protocol import Keys
from hotkv_server.cache.values import HOST_TIER, aligned
from hotkv_server.ledger.book import pack
from hotkv_server.ledger.book.accounts import Account, Accounts, Usage, Values
from hotkv_server.ledger.book.forecast import GIB, Forecast, Outlook, RequestDemand
from hotkv_server.ledger.book.outcome import counted_group, note_outcome
from hotkv_server.ledger.book.shadow import MakePolicy
from hotkv_server.memory.clerk import Clerk
from hotkv_server.memory.state import read_file, replace_file
from hotkv_server.node.capability import Report
from hotkv_server.node.event_loop import slices
from hotkv_server.node.live_session import LiveSession
from hotkv_server.node.names import digits_of

log = logging.getLogger(__name__)

LEDGER_FILE = "ledger"
"""In the arena's directory, but it outlives a cache that is created anew."""
SAVE_S = 2.0
CLOSE_S = 5.0
SEEN_S = 30.0
"""Interval at which the forecast's seen keys, half a megabyte, are copied for the file. A kill
loses the newest, which changes little."""
MAX_FOLLOWING = 1024
MAX_FOLLOWING_BLOCKS = 1 << 18
"""Bounds of the requests that wait for the forecast (2 MiB of keys)."""
MAX_OPEN_LOADS = 4096
"""Requests remembered until their engine reports the end of the load, over all engines."""


@dataclass(frozen=True, slots=True)
class Savings:
    """Sums over a window of time.

    rows: by account, the most recently used first.
    num_folded: accounts that were merged into others.
    capacity_bytes: of the arena.
    """

    rows: list[tuple[Account, Usage]]
    total: Usage
    outlook: Outlook
    began_unix_s: float
    num_folded: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class _OpenLoad:
    """A request whose load has not ended.

    usage: as counted; a failed load takes its hits back.
    minute: of the count, since 1970.
    """

    account: Account
    usage: Usage
    minute: int


class LiveLedger:
    """Counts usage and forecasts savings of more memory.

    sessions: all that are open, each time that it is iterated.
    directory: None: the ledger ends with the process.
    tiers: below host memory, in the order of their numbers in `Space.origins`.
    make_policy: makes the node's, which the forecast simulates.
    taken_back_s: saved seconds subtracted for failed loads, since this server's start.
    num_lost: requests dropped before the forecast saw them.
    """

    def __init__(
        self,
        core: CacheCore,
        sessions: Iterable[LiveSession] = (),
        directory: Path | None = None,
        tiers: Sequence[str] = (),
        make_policy: MakePolicy = Hotness,
    ) -> None:
        self._core = core
        self._sessions = sessions
        self._directory = directory
        self._tiers = (HOST_TIER, *tiers)
        kept = _read(directory)
        minute = _minute()
        self._accounts = Accounts(pack.columns_for(tiers, kept), minute)
        # (loaded, stored) bytes of each open session that are counted.
        self._counted: dict[LiveSession, tuple[int, int]] = {}
        self.forecast = Forecast(make_policy, minute)
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
        # Only the first failure in a row is logged.
        self._is_broken = False

    def __repr__(self) -> str:
        return f"LiveLedger({self._accounts!r}, {len(self._following)} reports to follow)"

    @property
    def accounts(self) -> Accounts:
        """With all counts until now."""
        self._count_moved(self._sessions)
        return self._accounts

    # Events

    def report(self, session: LiveSession, report: Report) -> None:
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
            saved_s=self._accounts.saved_s(
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
        """Counts the wait. A failed load also takes its hit back as missed, and counts as failed
        unless the request ended first (`wait_s` 0) or the engine cancelled it."""
        was = self._loads.pop((session.secret_id, end.report_id), None)
        if was is None or not end.failed:
            # Also if the request was forgotten, or an earlier load of it was counted: after a
            # preemption it may load again.
            self._count(_account(session), Usage(waited_s=end.wait_s))
        else:
            failed = int(end.wait_s > 0 and end.miss is Miss.FAILED_LOAD)
            self._take_back(was, Usage(waited_s=end.wait_s, failed_loads=failed), end.miss)

    def _take_back(self, load: _OpenLoad, more: Usage, why: Miss = Miss.FAILED_LOAD) -> None:
        """Counts the hit's tokens as missed, in the minute of the hit, so that no window has
        negative hits."""
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
        """Takes back hits whose load never ended. They don't count as failed loads, which
        operators watch."""
        self._count_moved([session])
        self._counted.pop(session, None)
        for key in [key for key in self._loads if key[0] == session.secret_id]:
            self._take_back(self._loads.pop(key), Usage())

    def _count_moved(self, sessions: Iterable[LiveSession]) -> None:
        """The bytes that these sessions have loaded and stored since the last call."""
        for session in sessions:
            loaded, stored = self._counted.get(session, (0, 0))
            now = session.loaded_bytes, session.stored_bytes
            if now != (loaded, stored):
                self._counted[session] = now
                usage = Usage(loaded_bytes=now[0] - loaded, stored_bytes=now[1] - stored)
                self._count(_account(session), usage)

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
            and self._core.space.room.may_keep_at(aligned(group.slot_bytes)),
        )
        self._following.append((demand, time.monotonic()))
        self._following_blocks += len(demand.keys)
        while len(self._following) > MAX_FOLLOWING or self._following_blocks > MAX_FOLLOWING_BLOCKS:
            oldest, _ = self._following.popleft()
            self._following_blocks -= len(oldest.keys)
            self.num_lost += 1

    def follow(self) -> Iterator[None]:
        """Feeds waiting requests to the forecast, one per step; later ones wait for the next
        call, so it ends."""
        capacity_bytes = self._core.space.pool.capacity_bytes
        for _ in range(len(self._following)):
            if not self._following:
                # A large request may have arrived meanwhile and pushed out all others.
                return
            demand, now_s = self._following.popleft()
            self._following_blocks -= len(demand.keys)
            self.forecast.observe(demand, capacity_bytes, now_s, _minute())
            self._is_changed = True
            yield

    async def turn(self, clerk: Clerk) -> None:
        """Called by the node's timer."""
        self._count_moved(self._sessions)
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
        """Waits for a running write, at most CLOSE_S."""
        if self._saving is not None:
            await asyncio.wait([asyncio.wrap_future(self._saving)], timeout=CLOSE_S)

    def save(self) -> None:
        """Feeds waiting requests to the forecast and writes the file. Blocks."""
        for _ in self.follow():
            pass
        self._note_seen()
        if self._directory is not None:
            self._write(self._directory, self._pieces())

    def _write(self, directory: Path, pieces: list[bytes]) -> None:
        """On the clerk's thread."""
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
        """Sums over `Buckets.since`'s window.

        has_rows: False: only the total, which is faster.
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
        """Forecast from the requests of the last `since_s` (0: all).

        The endless cache is estimated from a sample, so it counts at least the hits that
        happened. Gains stop at what it would hit beyond today's hits in any tier: otherwise hits
        below host memory would count as a gain.
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
        """Oldest first; the current minute is last."""
        return self.accounts.total.minutes(_minute())

    @property
    def num_folded(self) -> int:
        """Since this server's start."""
        return self.accounts.num_folded - self._folded_before

    @property
    def grown(self) -> Usage:
        """Counted since this server's start. Failed loads are not subtracted: Prometheus'
        counters never fall."""
        self._count_moved(self._sessions)
        return self._accounts.columns.usage(self._grown)


def _minute() -> int:
    return int(time.time() // 60)


def _account(session: LiveSession) -> Account:
    key_space = session.key_space
    engine_id = session.record.engine_id
    return Account(key_space.tenant, key_space.model, digits_of(key_space), engine_id)


def _keys(hashes: Words, fingerprint: bytes) -> Keys:
    """uint64 [n], mixed with the key space's fingerprint; the same after a restart."""
    salt = np.uint64(int.from_bytes(fingerprint[:8], "little"))
    keys: Keys = np.ascontiguousarray(hashes[:, :2]).view(np.uint64)[:, 0] ^ salt
    return keys


def _block_bytes(core: CacheCore, key_space_id: int, block_tokens: int) -> int:
    """Bytes of the arena that `block_tokens` tokens take, over the groups in which a hit needs
    every block (others store few), or else the first group."""
    groups = core.key_space(key_space_id).groups
    closed = [group for group in groups if group.kind in PREFIX_CLOSED] or [groups[0]]
    return sum(group.slot_bytes * block_tokens // group.block_tokens for group in closed)


def _read(directory: Path | None) -> pack.Kept | None:
    """An earlier server's ledger; None if it is missing or unusable."""
    if directory is None:
        return None
    try:
        return pack.unpack(read_file(directory / LEDGER_FILE, pack.MAX_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("ledger begins anew: its file can't be used: %s", error)
        return None
