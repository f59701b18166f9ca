"""Reports to the server which blocks the requests with sparse decode use, so that the server evicts
blocks in use after unused blocks.

A *selection* is the set of blocks that a layer has chosen to attend to in a step. The workers
report selections as positions of blocks in a request. The server needs the blocks' hashes. So for
each such request the server has one *sequence* per KV cache group with sparse layers: a list of the
hashes of the request's blocks. A sequence is
- created when a request with a long prompt arrives, or when a request has grown long;
- extended as blocks become complete;
- deleted after the request's end, once the workers have reported the request's last selections.

The selections that the workers report in a step are sent to the server in one report.

Always true: no call of this module waits, and no request depends on its results. After a reconnect
the sequences of running requests are created again. At most `MAX_FOLLOWED` requests have sequences.
While `MAX_UNANSWERED` calls are unanswered, no sequence of a running request is created or
extended, and no selections are sent.
"""

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from hotkv_client.session import Session
from hotkv_client.types import Int32s, LinkState, SequenceCreated, SequenceState
from hotkv_vllm.scheduler.request import RequestState
from hotkv_vllm.sparse.reporter import SparseReport
from hotkv_vllm.sparse.rows import SparseRows

MAX_FOLLOWED = 1024
"""Largest number of requests with sequences (lists of block hashes in the server) at a time. The
server accepts 4096 sequences in a session."""
MAX_CREATED_PER_STEP = 16
MAX_UNANSWERED = 64
ENDING_S = 5.0
"""A sequence (list of a request's block hashes in the server) is deleted at the latest this many
seconds after its request's end, even if the request's last selections (chosen blocks) have not been
reported."""

HashesOf = Callable[[Any, int], Sequence[bytes]]
"""A function that returns the hashes of a request's complete blocks in a KV cache group, given
vLLM's `Request` and the index of the group in the key space."""


class StreamCount:
    """Counts the connections (streams) of a session, so that callers notice a reconnect. The server
    deletes state such as sequences when the connection ends on which it was created.

    The session's thread calls this object when the session's state changes.

    number: number of the present or last connection, from 1; 0 before the first.
    num_changes: number of changes of the session's state so far.
    then: a function that is also called with each state, for example to log it.
    """

    def __init__(self, then: Callable[[LinkState, str], None]) -> None:
        self.number = self.num_changes = 0
        self._then = then

    def __call__(self, state: LinkState, why: str) -> None:
        self.number += state is LinkState.CONNECTED
        self.num_changes += 1
        self._then(state, why)


@dataclass(frozen=True, slots=True)
class SparseGroup:
    """A KV cache group with sparse layers.

    index: the group's index in the session's key space.
    block_tokens: tokens of a block of the group.
    """

    index: int
    block_tokens: int


@dataclass(slots=True, eq=False)
class _Followed:
    """A request with sequences (lists of the hashes of its blocks) in the server.

    request: vLLM's `Request`.
    ids: ids of the request's sequences, one per group; empty before the sequences are created.
    stream: number of the connection in which the sequences were created.
    num_sent: number of blocks that were sent to the server, per group.
    next_tokens: once the request has this many tokens, it has another complete block to send.
    answers: futures of the calls that create the sequences, until their answers are read.
    appends: calls that have sent further blocks, until their answers are read: the index of the
        group's sequence in `ids`, the position of the first block, and the future of the answer.
    has_decoded: True once the request's first sparse step was planned.
    end_by_s: after the request's end: the time at which its sequences are deleted even if the
        workers have not reported its last selections (chosen blocks).
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
    """Creates, extends and deletes the sequences of requests in the server (lists of the hashes of
    a request's blocks), and sends the workers' selections (chosen blocks) to the server. Scheduler
    thread only.

    streams: counts the session's connections (streams) to the server.
    groups: the KV cache groups with sparse layers; a request has one sequence for each of them.
    hashes_of: takes vLLM's `Request` and the index of a group, and returns the hashes of the
        request's complete blocks in the group.
    min_context_tokens: a request with a shorter context has no sequences.
    prefix: the ids of all sequences begin with it.
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
        # True if all groups have blocks of the same size. A worker reports positions of blocks for
        # all its layers together, so only then it is clear which block a position means.
        self._is_even = len({group.block_tokens for group in groups}) == 1
        self._hashes_of = hashes_of
        self._min_tokens = min_context_tokens
        self._ids = (f"{prefix}-s{number}" for number in itertools.count(1))
        self._stream = 0
        self._followed: dict[str, _Followed] = {}
        self._ending: dict[str, _Followed] = {}
        # Ordered sets of request ids. `_to_create`: requests whose sequences must be created.
        # `_awaited`: requests whose calls to create sequences are not answered. `_to_name`: ended
        # requests whose last selections (chosen blocks) the workers must report.
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
        """Begins to report the blocks of a new request to the server (creates its sequences in a
        later step), if the context of its first decode step will have at least
        `min_context_tokens`. Must be called only for a request whose KV may be shared."""
        is_new = request.request_id not in self._followed
        if is_new and request.num_tokens + 1 >= self._min_tokens and request.max_tokens > 1:
            self._follow(request)

    def ended(self, request_id: str, now_s: float) -> None:
        """Handles the end of a request. Deletes its sequences at once if the request has never
        decoded sparsely. Otherwise the sequences are deleted once the workers have reported the
        request's last selections (chosen blocks)."""
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
        """Begins to report the blocks of a request to the server: its sequences will be created in
        a later step. Returns None if too many requests have sequences."""
        if len(self._followed) + len(self._ending) >= MAX_FOLLOWED:
            return None
        one = self._followed[request.request_id] = _Followed(request)
        self._to_create[request.request_id] = None
        return one

    # ---------------------------------------------------------------------------------------- steps

    def step(
        self, rows: SparseRows, requests: Mapping[str, RequestState], now_s: float
    ) -> tuple[str, ...]:
        """Processes a planned step: creates sequences, and sends the hashes of blocks that have
        become complete. Returns the ids of ended requests: the step's message must ask the workers
        to report their last selections (chosen blocks).

        rows: the requests that attend sparsely in the step.
        requests: by id, the requests that hotkv knows (`Admission.states`).
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
        """Processes the workers' report about sparse decode, joined over all ranks: sends its
        selections (chosen blocks) and counters to the server, and deletes the sequences of requests
        in `report.ended`. If nothing can be sent now (`_can_send`), the counters are sent with the
        next report, and the selections are dropped."""
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
        """After a reconnect, makes the next steps create all sequences again, because the server
        has deleted them with the old connection."""
        if self._stream == self._streams.number:
            return
        self._stream = self._streams.number
        self._unanswered.clear()
        self._awaited.clear()
        for one in self._followed.values():
            one.ids, one.answers, one.appends, one.next_tokens = (), [], [], 0
        self._to_create = dict.fromkeys(self._followed)

    def _can_send(self) -> bool:
        """Returns True if the session is connected, and fewer than MAX_UNANSWERED calls are
        unanswered."""
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
        """Sends to the server the blocks of a request that have become complete since the last
        call. Sends blocks again that the server has refused, for example for lack of memory."""
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
        """Reads the server's answers to the calls that create sequences. If the server refused a
        sequence, the blocks of its request are not reported until the next connection."""
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
        """Deletes a request's sequences (lists of block hashes) in the server. First sends the
        hashes of the request's last complete blocks. Does nothing if the connection on which the
        sequences were created has ended."""
        if one.stream != self._streams.number or not self._session.connected:
            return
        self._append(one)
        for sequence_id in one.ids:
            self._unanswered.append(self._session.delete_sequence(sequence_id))

    def _end_overdue(self, now_s: float) -> None:
        """Deletes the sequences of requests that ended at least ENDING_S ago, although their last
        selections (chosen blocks) have not been reported."""
        while self._ending:
            request_id, one = next(iter(self._ending.items()))
            if now_s < one.end_by_s:
                return
            del self._ending[request_id]
            self._delete(one)
