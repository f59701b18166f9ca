"""Makes the rows of slow requests and transfers, and registers them with the node."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hotkv_proto.reports import LoadEnd
from hotkv_server.node.capability import (
    Capability,
    Figures,
    Filters,
    Report,
    Topic,
    TransferTimes,
)
from hotkv_server.node.live_session import LiveSession
from hotkv_server.node.node import Node
from hotkv_server.settings import Settings
from hotkv_server.slow.book import KEPT, WINDOW_S, Open, SlowBook

DEFAULT_ROWS = 10


@dataclass(frozen=True, slots=True)
class SlowRequest:
    """A request's waits for the cache, as its engine has measured them.

    lookup_s: for lookups and leases.
    ended_s: of the monotonic clock.
    """

    engine_name: str
    model_name: str
    session_id: str
    prompt_tokens: int
    hit_tokens: int
    saved_s: float
    lookup_s: float
    load_s: float
    failed: bool
    ended_s: float

    @property
    def took_s(self) -> float:
        return self.lookup_s + self.load_s


@dataclass(frozen=True, slots=True)
class SlowTransfer:
    """A transfer. `ended_s`: of the monotonic clock."""

    engine_name: str
    model_name: str
    times: TransferTimes
    ended_s: float


def attach(settings: Settings, node: Node) -> "SlowCapability":
    return SlowCapability(node)


class SlowCapability(Capability):
    def __init__(self, node: Node) -> None:
        self.requests: SlowBook[SlowRequest] = SlowBook()
        self.transfers: SlowBook[SlowTransfer] = SlowBook()
        self._loading: Open[SlowRequest] = Open()
        node.events.request_scheduled.add(self._scheduled)
        node.events.load_ended.add(self._loaded)
        node.events.transfer_ended.add(self._moved)

    def __repr__(self) -> str:
        return f"SlowCapability({self.requests!r} requests, {self.transfers!r} transfers)"

    def topics(self) -> Mapping[str, Topic]:
        return {"slow": Topic(self._tell, ("page_size",))}

    def _scheduled(self, session: LiveSession, report: Report) -> None:
        now_s = time.monotonic()
        one = SlowRequest(
            session.engine_name,
            session.model_name,
            report.session_id,
            report.prompt_tokens,
            report.hit_tokens,
            report.saved_s,
            report.wait_s,
            0.0,
            False,
            now_s,
        )
        # With a report id, not before the end of its load.
        key = session.secret_id, report.report_id
        left = self._loading.begin(key, one) if report.report_id else one
        if left is not None:
            self._note(left)

    def _loaded(self, session: LiveSession, load: LoadEnd) -> None:
        one = self._loading.end((session.secret_id, load.report_id))
        if one is not None:
            ended_s = time.monotonic()
            self._note(replace(one, load_s=load.wait_s, failed=load.failed, ended_s=ended_s))

    def _note(self, one: SlowRequest) -> None:
        self.requests.note(one, one.took_s, one.ended_s)

    def _moved(self, session: LiveSession, times: TransferTimes) -> None:
        now_s = time.monotonic()
        if self.transfers.admits(times.took_s, now_s):
            one = SlowTransfer(session.engine_name, session.model_name, times, now_s)
            self.transfers.note(one, times.took_s, now_s)

    def _tell(self, filters: Filters) -> Figures:
        now_s, most = time.monotonic(), filters.page_size(DEFAULT_ROWS, KEPT)
        return {
            "requests": [_request(one, now_s) for _, one in self.requests.slowest(most, now_s)],
            "transfers": [_transfer(one, now_s) for _, one in self.transfers.slowest(most, now_s)],
            "window_s": 2 * WINDOW_S,
        }


def _request(one: SlowRequest, now_s: float) -> Figures:
    return {
        "engine_name": one.engine_name,
        "model_name": one.model_name,
        "session_id": one.session_id,
        "age_s": max(0.0, now_s - one.ended_s),
        "took_s": one.took_s,
        "lookup_s": one.lookup_s,
        "load_s": one.load_s,
        "saved_s": one.saved_s,
        "prompt_token_count": one.prompt_tokens,
        "hit_token_count": one.hit_tokens,
        "failed": one.failed,
    }


def _transfer(one: SlowTransfer, now_s: float) -> Figures:
    times = one.times
    return {
        "engine_name": one.engine_name,
        "model_name": one.model_name,
        "age_s": max(0.0, now_s - one.ended_s),
        "direction": "load" if times.is_load else "store",
        "outcome": times.outcome,
        "byte_count": times.num_bytes,
        "took_s": times.took_s,
        "room_s": times.room_s,
        "ready_s": times.ready_s,
        "queue_s": times.queue_s,
        "copy_s": times.copy_s,
    }
