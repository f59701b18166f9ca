"""Reports to the server which blocks sparse requests use, so that it evicts unused blocks first.

Workers report positions; the server needs hashes. So it has for each request one *sequence* per
group with sparse layers, a list of block hashes:
- created when a request with a long prompt arrives, or a request has grown long;
- extended as blocks become complete;
- deleted after the request's end, once its last selections are reported.

Always true: no call waits, and no request depends on the results. After a reconnect sequences
are created again. At most `MAX_FOLLOWED` requests have some. While `MAX_UNANSWERED` calls are
unanswered, none are created or extended, and no selections are sent.
"""

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from hotkv_client.session import Session
from hotkv_client.types import Int32s, SequenceCreated, SequenceState
from hotkv_sparse.vllm.scheduler.rows import SparseRows
from hotkv_sparse.vllm.worker.reporter import SparseReport
from hotkv_vllm.link import StreamCount
from hotkv_vllm.scheduler.request import RequestState

MAX_FOLLOWED = 1024
"""Requests with sequences. The server accepts 4096 sequences in a session."""
MAX_CREATED_PER_STEP = 16
MAX_UNANSWERED = 64
ENDING_S = 5.0
"""After a request's end its sequences are deleted, even if last selections are missing."""

HashesOf = Callable[[Any, int], Sequence[bytes]]
"""Hashes of a `Request`'s complete blocks in a group of the key space, by index."""


@dataclass(frozen=True, slots=True)
class SparseGroup:
    """A group with sparse layers.

    index: in the session's key space.
    """

    index: int
    block_tokens: int


@dataclass(slots=True, eq=False)
class _Followed:
    """A request with sequences in the server.

    ids: one per group; empty before creation.
    stream: connection on which they were created.
    num_sent: blocks, per group.
    next_tokens: length with another complete block.
    answers: of creating calls.
    appends: index in `ids`, position of the first block, answer.
    has_decoded: the first sparse step was planned.
    end_by_s: when they are deleted at the latest, after the request's end.
    """

    request: Any
    ids: tuple[str, ...] = ()
    stream: int = 0
    num_sent: list[int] = field(default_factory=list)
    next_tokens: int = 0
    answers: "list[Future[SequenceCreated]]" = field(default_factory=list)
    appends: "list[tuple[int, int, Future[SequenceState]]]" = field(default_factory=list)
    has_decoded: bool = False
    end_by_s: float = 0.0


class SparseSequences:
    """Scheduler thread only.

    groups: those with sparse layers.
    min_context_tokens: shorter requests have no sequences.
    prefix: of the ids of all sequences.
    """

    def __init__(
        self,
        session: Session,
        streams: StreamCount,
        groups: Sequence[SparseGroup],
        hashes_of: HashesOf,
        min_context_tokens: int,
        prefix: str,
    ) -> None:
        self._session = session
        self._streams = streams
        self._groups = tuple(groups)
        # A worker reports positions for all layers together: they are clear only if all blocks
        # have the same size.
        self._is_even = len({group.block_tokens for group in groups}) == 1
        self._hashes_of = hashes_of
        self._min_tokens = min_context_tokens
        self._ids = (f"{prefix}-s{number}" for number in itertools.count(1))
        self._stream = 0
        self._followed: dict[str, _Followed] = {}
        self._ending: dict[str, _Followed] = {}
        # Ordered sets of request ids. `_awaited`: creating calls are not answered. `_to_name`:
        # ended requests whose last selections the workers must report.
        self._to_create: dict[str, None] = {}
        self._awaited: dict[str, None] = {}
        self._to_name: dict[str, None] = {}
        self._unanswered: deque[Future[Any]] = deque()
        self._counters: dict[int, dict[str, float]] = {}

    def __repr__(self) -> str:
        return (
            f"SparseSequences({len(self._followed)} requests, {len(self._ending)} ending, "
            f"{len(self._unanswered)} calls unanswered)"
        )

    # ------------------------------------------------------------------------------------- requests

    def arrived(self, request: Any) -> None:
        """Follows a request whose first decode step will be long enough. Its KV must be allowed
        to be shared."""
        is_new = request.request_id not in self._followed
        if is_new and request.num_tokens + 1 >= self._min_tokens and request.max_tokens > 1:
            self._follow(request)

    def ended(self, request_id: str, now_s: float) -> None:
        """Waits for the last selections if the request has decoded sparsely."""
        self._to_create.pop(request_id, None)
        self._awaited.pop(request_id, None)
        one = self._followed.pop(request_id, None)
        if one is None or not one.ids:
            return
        if not one.has_decoded:
            self._delete(one)
            return
        one.end_by_s = now_s + ENDING_S
        self._ending[request_id] = one
        self._to_name[request_id] = None

    def _follow(self, request: Any) -> _Followed | None:
        """None if too many requests have sequences."""
        if len(self._followed) + len(self._ending) >= MAX_FOLLOWED:
            return None
        one = self._followed[request.request_id] = _Followed(request)
        self._to_create[request.request_id] = None
        return one

    # ---------------------------------------------------------------------------------------- steps

    def step(
        self, rows: SparseRows, requests: Mapping[str, RequestState], now_s: float
    ) -> tuple[str, ...]:
        """Returns the ended requests whose last selections the step's message must ask for.

        requests: by id (`Admission.states`).
        """
        self._notice_stream()
        can_send = self._can_send()
        self._notice_refusals()
        for request_id in rows.request_ids:
            one = self._followed.get(request_id)
            if one is None:
                state = requests.get(request_id)
                one = None if state is None else self._follow(state.request)
            if one is not None:
                one.has_decoded = True
                if can_send and one.request.num_tokens >= one.next_tokens:
                    self._append(one)
        if can_send and self._to_create:
            self._create_some()
        if self._ending:
            self._end_overdue(now_s)
        named, self._to_name = tuple(self._to_name), {}
        return named

    def reported(self, report: SparseReport) -> None:
        """The report is joined over all ranks. If nothing can be sent now, counters wait, and
        selections are dropped."""
        for index, growth in report.layers.items():
            counters = self._counters.setdefault(index, {})
            for name, value in growth.items():
                counters[name] = counters.get(name, 0.0) + value
        ended = {
            request_id: self._ending.pop(request_id, None) for request_id in sorted(report.ended)
        }
        if self._can_send():
            positions: dict[str, Int32s] = {}
            for request_id, selected in report.positions.items() if self._is_even else ():
                one = self._followed.get(request_id) or ended.get(request_id)
                if one is not None and one.stream == self._streams.number:
                    positions |= dict.fromkeys(one.ids, selected)
            if positions or self._counters:
                self._session.report_sparse(positions, self._counters)
                self._counters = {}
        for one in ended.values():
            if one is not None:
                self._delete(one)

    # --------------------------------------------------------------------------------------- server

    def _notice_stream(self) -> None:
        """Creates all sequences again after a reconnect."""
        if self._stream == self._streams.number:
            return
        self._stream = self._streams.number
        self._unanswered.clear()
        self._awaited.clear()
        for one in self._followed.values():
            one.ids, one.answers, one.appends, one.next_tokens = (), [], [], 0
        self._to_create = dict.fromkeys(self._followed)

    def _can_send(self) -> bool:
        while self._unanswered and self._unanswered[0].done():
            self._unanswered.popleft()
        return self._session.connected and len(self._unanswered) < MAX_UNANSWERED

    def _create_some(self) -> None:
        for request_id in list(itertools.islice(self._to_create, MAX_CREATED_PER_STEP)):
            del self._to_create[request_id]
            one = self._followed[request_id]
            hashes = [self._hashes_of(one.request, group.index) for group in self._groups]
            one.ids, one.stream = (
                tuple(itertools.islice(self._ids, len(self._groups))),
                self._stream,
            )
            one.answers = [
                self._session.create_sequence(sequence_id, group.index, own)
                for sequence_id, group, own in zip(one.ids, self._groups, hashes, strict=True)
            ]
            self._unanswered.extend(one.answers)
            self._note_sent(one, hashes)
            self._awaited[request_id] = None

    def _append(self, one: _Followed) -> None:
        """Newly complete blocks, and those that the server has refused, for example for lack of
        memory."""
        if not one.ids:
            return
        appends, one.appends = one.appends, []
        for place, first, answer in appends:
            if not answer.done():
                one.appends.append((place, first, answer))
            elif answer.exception() is not None:
                one.num_sent[place] = min(one.num_sent[place], first)
        hashes = [self._hashes_of(one.request, group.index) for group in self._groups]
        for place, (sequence_id, own) in enumerate(zip(one.ids, hashes, strict=True)):
            sent = one.num_sent[place]
            if len(own) > sent:
                answer = self._session.append_blocks(sequence_id, sent, own[sent:])
                one.appends.append((place, sent, answer))
                self._unanswered.append(answer)
        self._note_sent(one, hashes)

    def _note_sent(self, one: _Followed, hashes: Sequence[Sequence[bytes]]) -> None:
        one.num_sent = [len(own) for own in hashes]
        one.next_tokens = min(
            (sent + 1) * group.block_tokens
            for group, sent in zip(self._groups, one.num_sent, strict=True)
        )

    def _notice_refusals(self) -> None:
        """A request whose sequence was refused is not reported until the next connection."""
        for request_id in list(self._awaited):
            one = self._followed[request_id]
            if not all(answer.done() for answer in one.answers):
                continue
            del self._awaited[request_id]
            answers, one.answers = one.answers, []
            if any(answer.exception() is not None for answer in answers):
                self._delete(one)
                one.ids = ()

    def _delete(self, one: _Followed) -> None:
        """Sends the last complete blocks first. Does nothing if the sequences' connection has
        ended."""
        if one.stream != self._streams.number or not self._session.connected:
            return
        self._append(one)
        for sequence_id in one.ids:
            self._unanswered.append(self._session.delete_sequence(sequence_id))

    def _end_overdue(self, now_s: float) -> None:
        while self._ending:
            request_id, one = next(iter(self._ending.items()))
            if now_s < one.end_by_s:
                return
            del self._ending[request_id]
            self._delete(one)
