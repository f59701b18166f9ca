"""Checks every request of every method before the service sees it.

A request that can't be parsed, or has too many parts, is answered with a canonical gRPC code and
a reason; gRPC itself would answer UNKNOWN and log a traceback. Streams of health, reflection and
channelz count as guests. Calls of guarded admin methods need a proof that their peer is an
admin; all admin calls go to the audit log. Each call has a request id: `x-request-id` of its
metadata, or a generated one.
"""

import asyncio
import contextlib
import dataclasses
import inspect
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.versions import MAX_PARTS
from hotkv_server.logs import REQUEST_ID
from hotkv_server.node.node import Node
from hotkv_server.wire.errors import abort, as_refusal
from hotkv_server.wire.guard.audit import AuditLog, Who
from hotkv_server.wire.guard.limits import ARRIVAL_S, Pace, SessionlessCalls

# Parts of a request are its fields, list entries and messages. The parser makes an object of
# each, and one can be as short as two bytes, so that a message of moderate size could take long.
# They are counted before it is parsed, on the wire format, until soon after MAX_PARTS. Packed
# bytes (hashes, ids, tokens) are skipped, because they cost little; the calls limit their
# length.


FREE_BYTES = 8192
"""So small a message can't have MAX_PARTS parts."""
_WORD_KINDS: Final = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)

Children = dict[int, "Descriptor | None"]
"""Fields of a message type that may consist of several parts, by number: the type of the field's
messages, or None for numbers, which protobuf packs. Strings and bytes are left out: each is one
part."""


@cache
def _children(kind: Descriptor) -> Children:
    return {
        field.number: field.message_type
        for field in kind.fields
        if field.message_type is not None or field.type not in _WORD_KINDS
    }


def is_light(kind: Descriptor, data: bytes) -> bool:
    """True if a message has at most MAX_PARTS parts. Raises DecodeError if it is incomplete."""
    if len(data) <= FREE_BYTES:
        return True
    try:
        return count(kind, data) <= MAX_PARTS
    except IndexError:
        raise DecodeError("the message ends too soon") from None


def count(kind: Descriptor, data: bytes) -> int:
    """Number of parts; stops soon after MAX_PARTS. Raises IndexError if the message is
    incomplete."""
    parts = 0
    todo: list[tuple[Descriptor, int, int]] = [(kind, 0, len(data))]
    while todo and parts <= MAX_PARTS:
        message, at, end = todo.pop()
        children = _children(message)
        while at < end and parts <= MAX_PARTS:
            tag, at = _varint(data, at)
            parts += 1
            # Wire types: 0: a varint; 1: 8 bytes; 2: a length and then so many bytes; 5: 4
            # bytes. Groups (3, 4) are tags without content.
            match tag & 7:
                case 0:
                    _, at = _varint(data, at)
                case 1:
                    at += 8
                case 2:
                    size, at = _varint(data, at)
                    if tag >> 3 in children:
                        child = children[tag >> 3]
                        if child is None:
                            parts += size
                        else:
                            todo.append((child, at, min(at + size, end)))
                    at += size
                case 5:
                    at += 4
    return parts


def request_id(kind: Descriptor, data: bytes) -> int:
    """Reads the field without parsing the message; -1 unless the message begins with it, as
    usual clients' messages do."""
    field = kind.fields_by_name.get("request_id")
    if field is None or not data or data[0] != field.number << 3:
        return -1
    try:
        value, _ = _varint(data, 1)
    except IndexError:
        return -1
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at position `at`, and the position after it."""
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while byte >= 0x80 and shift < 70:
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        shift += 7
    return value, at + 1


# The interceptor


PREFIX = "/hotkv.v1."
REQUEST_ID_KEY = "x-request-id"
GOOD_REQUEST_ID = re.compile("[A-Za-z0-9._:-]{1,64}")
MAX_UNREAD_GUESTS = 256
"""gRPC keeps an ended call until the client has read the end. With this many calls of guests
kept on a listener, health's Watch, reflection and channelz are refused."""
MAX_ANSWERED = 2048
"""Unary calls of a listener at a time, from the arrival of the whole message until the answer is
read. Most are transfers."""
MAX_UNREAD_BYTES = 32 << 20
"""While a listener's clients have left so many bytes of answers to unary calls unread, further
ones are refused. Requests count too: gRPC keeps them until the call ends."""
Guard = Callable[[Any], None]
"""Raises HotKVError if the peer of a call's context is no admin."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """Stands for a request that could not be parsed or has too many parts.

    request_id: as the client gave it; -1 if unknown.

    Holds no exception: each raise adds frames to its traceback, which keep their requests in
    memory.
    """

    reason: Reason
    message: str
    request_id: int = -1

    def error(self) -> HotKVError:
        """New each time, to be raised once."""
        return HotKVError(self.reason, self.message)

    def WhichOneof(self, name: str) -> str:
        """Makes `SessionCalls.handle` take this for a message with a field "malformed"."""
        return "malformed"


MALFORMED = Malformed(
    Reason.INVALID_FIELD,
    "the request is no message of this method; generate the client from the server's protocol "
    "version",
)
TOO_HEAVY = Malformed(
    Reason.TOO_LARGE,
    f"the request has more than {MAX_PARTS} fields and list entries; send several, with hashes "
    "and ids packed in each",
)


def lenient(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    kind: Descriptor = deserialize.__self__.DESCRIPTOR  # type: ignore[attr-defined]

    def parse(data: bytes) -> Any:
        try:
            if is_light(kind, data):
                return deserialize(data)
            return dataclasses.replace(TOO_HEAVY, request_id=request_id(kind, data))
        except DecodeError:
            return MALFORMED

    return parse


def _begin(context: Any) -> None:
    """Sets the request id of the current task."""
    given = dict(context.invocation_metadata() or ()).get(REQUEST_ID_KEY, "")
    is_good = isinstance(given, str) and GOOD_REQUEST_ID.fullmatch(given)
    REQUEST_ID.set(given if is_good else secrets.token_hex(8))


class EdgeInterceptor(grpc.aio.ServerInterceptor):
    """Parses and checks the requests of all methods; guards and audits admin methods.

    pace: delays refusals of malformed requests and of peers that are not admins.
    who: the peer of an admin call, for the audit log.
    admins: names of the services for operators.
    guard: called before each of their calls; None: peers are not checked.
    """

    def __init__(
        self,
        node: Node,
        pace: Pace,
        guests: SessionlessCalls,
        audit: AuditLog,
        who: Who,
        admins: Collection[str],
        guard: Guard | None = None,
    ) -> None:
        self._node = node
        self._pace = pace
        self._guests = guests
        self._audit = audit
        self._who = who
        self._admins = admins
        self._guard = guard
        self._num_unread_ends = self._num_answered = self._unread_bytes = 0

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        parse, respond, is_ours = (
            lenient(handler.request_deserializer),
            handler.response_serializer,
            details.method.startswith(PREFIX),
        )
        is_admin = details.method[1:].rpartition("/")[0] in self._admins
        guard = self._guard if is_admin else None
        audited = details.method if is_admin and self._audit.wants(details.method) else ""
        # Each method is served as one that takes a stream, so that a request that arrives slowly
        # can be ended for a newer guest. gRPC would not show the call of a single message before
        # it is complete, and MAX_CALLS such calls could wait for ever.
        if handler.unary_unary is not None:

            async def answered(requests: AsyncIterator[Any], context: Any) -> Any:
                _begin(context)
                with self._audited(audited, context) as note:
                    request = await self._only(requests, context, guard)
                    count_unread = await self._counted(context, bounds_bytes=is_ours)
                    note(request)
                    answer = await handler.unary_unary(request, context)
                    count_unread(request, answer)
                    return answer

            return grpc.stream_unary_rpc_method_handler(answered, parse, respond)
        if handler.unary_stream is not None:
            if not is_ours:

                async def watched(requests: AsyncIterator[Any], context: Any) -> None:
                    _begin(context)
                    request = await self._only(requests, context, guard)
                    await self._as_guest(handler.unary_stream(request, context), context)

                return grpc.stream_stream_rpc_method_handler(watched, parse, respond)

            async def streamed(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
                _begin(context)
                with self._audited(audited, context) as note:
                    request = await self._only(requests, context, guard)
                    note(request)
                    async for response in handler.unary_stream(request, context):
                        yield response

            return grpc.stream_stream_rpc_method_handler(streamed, parse, respond)
        assert guard is None, "no admin method takes a stream; guard it here if one does"
        serve = handler.stream_stream
        if is_ours and inspect.iscoroutinefunction(serve):

            async def written(requests: AsyncIterator[Any], context: Any) -> None:
                _begin(context)
                await serve(requests, context)

            return grpc.stream_stream_rpc_method_handler(written, parse, respond)
        if not is_ours:

            async def asked(requests: AsyncIterator[Any], context: Any) -> None:
                _begin(context)
                await self._as_guest(serve(self._each(requests, context), context), context)

            return grpc.stream_stream_rpc_method_handler(asked, parse, respond)

        async def conversed(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            _begin(context)
            async for response in serve(requests, context):
                yield response

        return grpc.stream_stream_rpc_method_handler(conversed, parse, respond)

    @contextlib.contextmanager
    def _audited(self, method: str, context: Any) -> Iterator[Callable[[Any], None]]:
        """Records the call at the end of the `with` block, for a stream after the last answer.
        Yields a function that takes the request once it is accepted; without it, the call is
        recorded without arguments.

        method: empty if the call is not to be recorded.
        """
        if not method:
            yield lambda request: None
            return
        peer, requests = self._who(context), list[Any]()
        outcome = "ok"
        try:
            yield requests.append
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "cancelled"
            raise
        except BaseException:
            # Usually the call was ended with a status. Without one the exception is unexpected.
            name = getattr(context.code(), "name", "OK")
            outcome = "unknown" if name == "OK" else name.lower()
            raise
        finally:
            self._audit.note(method, peer, requests[0] if requests else None, outcome)

    async def _only(self, requests: AsyncIterator[Any], context: Any, guard: Guard | None) -> Any:
        """Reads the single request of a call. Ends the call if it is malformed or late, or
        `guard` refuses."""
        try:
            with self._guests.stay(ARRIVAL_S):
                request = await anext(requests, None)
        except HotKVError as error:
            await abort(context, as_refusal(self._node, error, f"peer={context.peer()}"))
        await self._check(MALFORMED if request is None else request, context, guard)
        return request

    async def _counted(self, context: Any, *, bounds_bytes: bool) -> Callable[[Any, Any], None]:
        """Counts a unary call until the client has read the answer; ends it if there are too many.
        Returns a function that takes request and answer.

        bounds_bytes: False for calls with small messages, such as health checks.
        """
        is_full = bounds_bytes and self._unread_bytes >= MAX_UNREAD_BYTES
        if is_full or self._num_answered >= MAX_ANSWERED:
            error = HotKVError(
                Reason.OVERLOADED,
                f"{self._num_answered} calls are being answered, and clients have not read the "
                f"answers to {self._unread_bytes} bytes of calls; call again, or use a session's "
                "stream",
            )
            await abort(context, as_refusal(self._node, error, f"peer={context.peer()}"))
        num_bytes = 0

        def count_unread(request: Any, answer: Any) -> None:
            nonlocal num_bytes
            num_bytes = request.ByteSize() + answer.ByteSize()
            self._unread_bytes += num_bytes

        def ended(_: Any) -> None:
            self._num_answered -= 1
            self._unread_bytes -= num_bytes

        self._num_answered += 1
        context.add_done_callback(ended)
        return count_unread

    async def _check(self, request: Any, context: Any, guard: Guard | None) -> None:
        try:
            if guard is not None:
                guard(context)
            if isinstance(request, Malformed):
                raise request.error()
        except HotKVError as error:
            await self._pace.turn()
            await abort(context, as_refusal(self._node, error, f"peer={context.peer()}"))

    async def _as_guest(self, answers: AsyncGenerator[Any, None], context: Any) -> None:
        """Writes the answers of a call to health, reflection or channelz."""
        try:
            if self._num_unread_ends >= MAX_UNREAD_GUESTS:
                raise HotKVError(
                    Reason.OVERLOADED,
                    f"{MAX_UNREAD_GUESTS} such calls have ended, and their clients do not read it",
                )
            with self._guests.stay():
                async with contextlib.aclosing(answers):
                    async for response in answers:
                        await context.write(response)
        except HotKVError as error:
            self._num_unread_ends += 1
            try:
                # Waits until the client has read all answers.
                await abort(context, as_refusal(self._node, error, f"peer={context.peer()}"))
            finally:
                self._num_unread_ends -= 1

    async def _each(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Ends the call at a malformed request."""
        async for request in requests:
            await self._check(request, context, None)
            yield request
