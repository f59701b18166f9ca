"""A server whose answers are any bytes, over real gRPC: for faults of a stream that no server of
ours has. It sees and sends packed messages only."""

from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Any

import grpc


class OddServer:
    """Answers each message of a session's stream with the messages that `answers` makes of it. What
    `answers` raises ends the stream. Use in a `with` block."""

    def __init__(self, target: str, answers: Callable[[bytes], Iterable[bytes]]) -> None:
        self._answers = answers
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        connect: Any = grpc.stream_stream_rpc_method_handler(self._connect)
        handler = grpc.method_handlers_generic_handler(
            "hotkv.v1.SessionService", {"Connect": connect}
        )
        self._server.add_generic_rpc_handlers((handler,))
        self._server.add_insecure_port(target)

    def __enter__(self) -> "OddServer":
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait()

    def _connect(self, requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        for request in requests:
            yield from self._answers(request)
