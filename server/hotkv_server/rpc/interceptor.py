"""Bytes that are no message of the protocol get a canonical code with a reason, like every other bad input.

gRPC itself would answer UNKNOWN with a Python error. Only methods of `hotkv.v1` are treated.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from hotkv.errors import HotKVError, Reason
from hotkv_server.rpc.errors import abort

PREFIX = "/hotkv.v1."
MALFORMED = HotKVError(
    Reason.INVALID_FIELD, "the request is no message of this method; generate the client from the server's protocol version"
)


class Malformed:
    """Stands for a request that could not be parsed."""

    def WhichOneof(self, name: str) -> str:
        """As for a message: the stream's dispatch sees a body that it does not know."""
        return "malformed"

    request_id = -1
    """The client's number is lost with its message."""


def _lenient(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return Malformed()

    return parse


class MalformedInterceptor(grpc.aio.ServerInterceptor):
    """Replaces the parsing of requests."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or not details.method.startswith(PREFIX):
            return handler
        parse = _lenient(handler.request_deserializer)
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(handler.stream_stream, parse, handler.response_serializer)
        if handler.unary_stream is not None:
            serve_stream = handler.unary_stream

            async def checked_stream(request: Any, context: Any) -> AsyncIterator[Any]:
                if isinstance(request, Malformed):
                    await abort(context, MALFORMED)
                async for response in serve_stream(request, context):
                    yield response

            return grpc.unary_stream_rpc_method_handler(checked_stream, parse, handler.response_serializer)
        serve = handler.unary_unary

        async def checked(request: Any, context: Any) -> Any:
            if isinstance(request, Malformed):
                await abort(context, MALFORMED)
            return await serve(request, context)

        return grpc.unary_unary_rpc_method_handler(checked, parse, handler.response_serializer)
