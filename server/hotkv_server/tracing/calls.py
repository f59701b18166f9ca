"""Traced versions of lookup, lease, load and store in `wire.calls`, with the same answers and
errors."""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from hotkv_proto.blocks import BlockResult, TransferStatus
from hotkv_proto.v1 import cache_pb2
from hotkv_server.node.live_session import LiveSession
from hotkv_server.node.node import Node
from hotkv_server.node.transfers import TransferEnd
from hotkv_server.tracing.drive import Tracing, reason, wall_ns
from hotkv_server.wire.calls import block_runs
from hotkv_server.wire.edge import Calls

if TYPE_CHECKING:
    from hotkv_proto.traces import Span

INT32_BYTES = 4
Answer = TypeVar("Answer", cache_pb2.LookupResponse, cache_pb2.AcquireLeaseResponse)


class TracedCalls:
    def __init__(self, tracing: Tracing, calls: Calls) -> None:
        self._tracing = tracing
        self._calls = calls

    def lookup(
        self, node: Node, session: LiveSession | None, request: cache_pb2.LookupRequest
    ) -> "cache_pb2.LookupResponse | asyncio.Task[cache_pb2.LookupResponse]":
        return self._answered(
            "lookup",
            request.traceparent,
            session,
            lambda: self._calls.lookup(node, session, request),
        )

    def acquire(
        self, node: Node, session: LiveSession, request: cache_pb2.AcquireLeaseRequest
    ) -> "cache_pb2.AcquireLeaseResponse | asyncio.Task[cache_pb2.AcquireLeaseResponse]":
        return self._answered(
            "lease",
            request.traceparent,
            session,
            lambda: self._calls.acquire(node, session, request),
        )

    def _answered(
        self,
        name: str,
        traceparent: str,
        session: LiveSession | None,
        call: "Callable[[], Answer | asyncio.Task[Answer]]",
    ) -> "Answer | asyncio.Task[Answer]":
        """The call's span ends with the answer, which may be a task.

        traceparent: the caller's span as a W3C header; empty without one.
        """
        span = self._tracing.begin(name, traceparent)
        if span is None:
            return call()
        span.attributes = _of_session(session)
        with self._tracing.serving(span):
            answer = call()
        if isinstance(answer, asyncio.Task):
            answer.add_done_callback(partial(_answered, span))
        else:
            _found(span, answer.groups)
        return answer

    def load(
        self, node: Node, session: LiveSession, request: cache_pb2.LoadRequest
    ) -> "asyncio.Future[TransferEnd]":
        span = self._tracing.begin("load", request.traceparent)
        if span is None:
            return self._calls.load(node, session, request)
        span.attributes = _of_session(session)
        span.attributes["hotkv.blocks"] = _num_blocks(request.runs)
        with self._tracing.serving(span):
            end = self._calls.load(node, session, request)
        end.add_done_callback(partial(_moved, span))
        return end

    async def store(
        self, node: Node, session: LiveSession, request: cache_pb2.StoreRequest
    ) -> "asyncio.Future[TransferEnd]":
        span = self._tracing.begin("store", request.traceparent)
        if span is None:
            return await self._calls.store(node, session, request)
        span.attributes = _of_session(session)
        span.attributes["hotkv.blocks"] = _num_blocks(request.runs)
        with self._tracing.serving(span):
            end = await self._calls.store(node, session, request)
        if node.tiers is not None:
            runs = block_runs(session, request.runs)
            self._tracing.stored(span, (run.hashes for run in runs))
        end.add_done_callback(partial(_moved, span))
        return end


def _of_session(session: LiveSession | None) -> dict[str, str | bool | int | float]:
    if session is None:
        return {}
    record = session.record
    return {"hotkv.session": record.number, "hotkv.key_space": record.key_space_id}


def _num_blocks(runs: Iterable[cache_pb2.LoadRun] | Iterable[cache_pb2.BlockRun]) -> int:
    return sum(len(run.block_ids) // INT32_BYTES for run in runs)


def _found(span: "Span", groups: Iterable[cache_pb2.GroupFlags]) -> None:
    # Of the answer: reading the request's hashes would copy them.
    flags = b"".join(one.flags for one in groups)
    span.attributes["hotkv.blocks"] = len(flags)
    span.attributes["hotkv.found_blocks"] = flags.count(1)
    span.end()


def _answered(span: "Span", done: "asyncio.Task[Answer]") -> None:
    if done.cancelled():
        span.end("CANCELLED")
    elif (error := done.exception()) is not None:
        span.end(reason(error))
    else:
        _found(span, done.result().groups)


def _moved(span: "Span", done: "asyncio.Future[TransferEnd]") -> None:
    """Adds child spans for the wait before the copy, and for the copy."""
    if done.cancelled():
        span.end("CANCELLED")
        return
    end = done.result()
    span.attributes["hotkv.bytes"] = end.num_bytes
    for values in end.results:
        for value, count in enumerate(np.bincount(values).tolist()):
            if count:
                name = f"hotkv.{BlockResult(value).name.lower()}_blocks"
                span.attributes[name] = int(span.attributes.get(name, 0)) + count
    error = "" if end.status is TransferStatus.DONE else end.status.name
    if end.copy_began_s is None:
        span.end(error)
        return
    began_ns, ended_ns = wall_ns(end.copy_began_s), wall_ns(end.copy_ended_s)
    span.child("hotkv.wait", span.began_ns).end(ended_ns=began_ns)
    copy = span.child("hotkv.copy", began_ns)
    copy.attributes["hotkv.bytes"] = end.num_bytes
    copy.end(error, ended_ns)
    span.end(error)
