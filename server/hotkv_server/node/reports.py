"""Engines report scheduled requests; the node records a use of their blocks.

A report has block hashes, never tokens, and not for each group: the length of a hit in the
engine's own cache gives the blocks that it used (`hotkv_proto.groups`). One invalid report
refuses its whole message.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_proto.errors import invalid
from hotkv_proto.groups import needed_blocks
from hotkv_proto.keys import KeySpace
from hotkv_proto.reports import LoadEnd
from hotkv_server.cache.values import HashList
from hotkv_server.node.broadcast import Feeds
from hotkv_server.node.capability import Ended, NodeEvents, Report, run_all
from hotkv_server.node.event_loop import Breaks, slices
from hotkv_server.node.live_session import LiveSession

MAX_PROMPT_TOKENS = 1 << 32
"""More than any model's context has. With it, sums over all reports fit into 64 bits."""
MAX_OPEN_LOADS = 4096
"""Most hits that wait for their load's end. Beyond this the oldest are forgotten, and never
counted."""


def check(report: Report, key_space: KeySpace) -> None:
    """Raises INVALID_FIELD if the numbers of a report contradict each other."""
    if len(report.hashes) * key_space.hash_block_tokens > report.prompt_tokens:
        raise invalid(
            f"requests.hashes has {len(report.hashes)} hashes of {key_space.hash_block_tokens} "
            f"tokens each; prompt_token_count is {report.prompt_tokens}"
        )
    if not 0 <= report.device_hit_tokens <= report.hit_tokens <= report.prompt_tokens:
        raise invalid(
            f"requests: device_hit_token_count {report.device_hit_tokens}, hit_token_count "
            f"{report.hit_tokens} and "
            f"prompt_token_count {report.prompt_tokens} must rise in this order, from 0"
        )
    if report.prompt_tokens > MAX_PROMPT_TOKENS:
        raise invalid(
            f"requests.prompt_token_count is {report.prompt_tokens}; at most "
            f"{MAX_PROMPT_TOKENS} are accepted"
        )


def used_blocks(report: Report, key_space: KeySpace) -> list[HashList]:
    """What the hit in the engine's own cache needed; all blocks of the prompt if the request
    asks for a `Retention`. A list for each group with such blocks."""
    lists, needs = [], needed_blocks(key_space.groups, report.device_hit_tokens)
    for index, (group, needed) in enumerate(zip(key_space.groups, needs, strict=True)):
        step = group.block_tokens // key_space.hash_block_tokens
        hashes = np.ascontiguousarray(report.hashes[step - 1 :: step])
        chosen = hashes if report.retention != NO_RETENTION else hashes[needed.start : needed.stop]
        if len(chosen):
            lists.append(HashList(index, chosen))
    return lists


@dataclass(frozen=True, slots=True)
class WatchedReport:
    """A report as clients of WatchRequests receive it.

    unix_time_s: when the request reached its engine.
    """

    key_space_id: int
    hash_bytes: int
    unix_time_s: float
    report: Report

    @property
    def num_bytes(self) -> int:
        return int(self.report.hashes.nbytes)


@dataclass(slots=True)
class ReportCounters:
    """Sums over all reports since the start.

    hit_tokens: with the part of a hit that an engine loads once its load has succeeded.
    """

    requests: int = 0
    prompt_tokens: int = 0
    device_hit_tokens: int = 0
    hit_tokens: int = 0

    def count(self, report: Report) -> None:
        self.requests += 1
        self.prompt_tokens += report.prompt_tokens
        self.device_hit_tokens += report.device_hit_tokens
        self.hit_tokens += report.device_hit_tokens if report.report_id else report.hit_tokens


Use = Callable[[int, HashList, float, Retention], Iterator[None]]
"""As `CacheCore.use`."""


class Reports:
    def __init__(self, use: Use, events: NodeEvents) -> None:
        self._use = use
        self._events = events
        self.counters = ReportCounters()
        # Tokens that an engine loads for a request, by session and report.
        self._loads: OrderedDict[tuple[str, int], int] = OrderedDict()
        self.watched: Feeds[WatchedReport] = Feeds()

    def check(self, session: LiveSession, reports: Sequence[Report]) -> None:
        """To be called before `note`."""
        for report in reports:
            check(report, session.key_space)

    async def note(self, session: LiveSession, reports: Sequence[Report]) -> None:
        """Records a use of the blocks, and pins them if asked for. Other tasks run between two
        requests."""
        now_s, unix_time_s = time.monotonic(), time.time()
        number, hash_bytes = session.record.key_space_id, session.key_space.hash_bytes
        self.watched.put(
            WatchedReport(number, hash_bytes, unix_time_s - report.age_s, report)
            for report in reports
        )
        for report in reports:
            self.counters.count(report)
            if report.report_id and report.hit_tokens > report.device_hit_tokens:
                num_tokens = report.hit_tokens - report.device_hit_tokens
                self._loads[session.secret_id, report.report_id] = num_tokens
                if len(self._loads) > MAX_OPEN_LOADS:
                    self._loads.popitem(last=False)
        async for _ in slices(self._uses(session, reports, now_s)):
            pass
        breaks = Breaks()
        for report in reports:
            for noted in self._events.request_noted:
                await noted(session, report)
            await breaks.between()

    def ended(
        self, session: LiveSession, requests: Sequence[Ended], loads: Sequence[LoadEnd]
    ) -> None:
        """Counts the hits whose load has succeeded, and notifies the capabilities."""
        for load in loads:
            num_tokens = self._loads.pop((session.secret_id, load.report_id), 0)
            if not load.failed:
                self.counters.hit_tokens += num_tokens
        run_all(
            [
                *(partial(self._events.load_ended, session, load) for load in loads),
                *(partial(self._events.request_ended, session, request) for request in requests),
            ]
        )

    def _uses(
        self, session: LiveSession, reports: Sequence[Report], now_s: float
    ) -> Iterator[None]:
        for report in reports:
            self._events.request_scheduled(session, report)
            for hash_list in used_blocks(report, session.key_space):
                yield from self._use(session.record.number, hash_list, now_s, report.retention)
                yield
