"""A session whose test decides every message, descriptor and pause. Raises AssertionError if a
wait takes longer than DEADLINE_S, or an answer has the reason INTERNAL."""

import contextlib
import os
import queue
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from hotkv_client.targets import descriptor_socket
from hotkv_client.wire import link_messages as _link_messages
from hotkv_proto.v1 import errors_pb2, session_pb2, session_pb2_grpc

DEADLINE_S = 30.0
MAX_PACKET_BYTES = 65536
BAD_CODES = ("INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED")
"""A defect of the server, whatever the message."""


def name_of(error: errors_pb2.ErrorDetail) -> str:
    reason = errors_pb2.ErrorReason.Name(error.reason).removeprefix("ERROR_REASON_")
    assert reason != "INTERNAL", error
    return reason


def word_of(answer: Any) -> str:
    """The refusal's reason, or `answered`."""
    return name_of(answer.error) if answer.HasField("error") else "answered"


def code_of(error: grpc.RpcError) -> str:
    code = str(error.code().name)
    assert code not in BAD_CODES, error
    return code


class RawSession:
    """A session's gRPC stream, without the client library. `why_not`: status code of a refused
    session, else empty."""

    def __init__(
        self, channel: grpc.Channel, target: str, opening: session_pb2.ConnectRequest
    ) -> None:
        self._target = target
        self._outbox: queue.SimpleQueue[session_pb2.ConnectRequest | None] = queue.SimpleQueue()
        self._next_id = 1
        self.call: Any = session_pb2_grpc.SessionServiceStub(channel).Connect(
            self._requests(), timeout=2 * DEADLINE_S
        )
        self._answers = iter(self.call)
        self.put(opening)
        self.session_id = self.why_not = ""
        self._links: list[socket.socket] = []
        try:
            self.session_id = next(self._answers).session_opened.session_id
        except grpc.RpcError as error:
            self.why_not = code_of(error)

    def _requests(self) -> Iterator[session_pb2.ConnectRequest]:
        yield from iter(self._outbox.get, None)

    def put(self, request: session_pb2.ConnectRequest) -> int:
        request.request_id, self._next_id = self._next_id, self._next_id + 1
        self._outbox.put(request)
        return request.request_id

    def answers(self, ids: set[int]) -> dict[int, session_pb2.ConnectResponse]:
        """Reads until these ids are answered, or the stream has ended."""
        found: dict[int, session_pb2.ConnectResponse] = {}
        try:
            while ids - found.keys():
                answer = next(self._answers)
                found[answer.request_id] = answer
        except StopIteration:
            pass
        except grpc.RpcError as error:
            code_of(error)
        return found

    def ask(self, request: session_pb2.ConnectRequest) -> tuple[str, session_pb2.ConnectResponse]:
        """The answer, and before it `answered`, a refusal's reason, or `ended`."""
        number = self.put(request)
        answer = self.answers({number}).get(number)
        if answer is None:
            return "ended", session_pb2.ConnectResponse()
        return word_of(answer), answer

    def link(self, fds: dict[str, int]) -> str:
        """Sends descriptors and keeps the connection open. Returns `answered`, or the refusal's
        reason."""
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._links.append(link)
        link.settimeout(DEADLINE_S)
        link.connect(str(descriptor_socket(self._target)))
        packet = _link_messages.link_request(self.session_id, list(fds))
        try:
            socket.send_fds(link, [packet], list(fds.values()))
            answer, received, _, _ = socket.recv_fds(link, MAX_PACKET_BYTES, 4)
        except OSError as error:
            assert not isinstance(error, TimeoutError), "the descriptor socket does not answer"
            return f"refused: {type(error).__name__}"
        for fd in received:
            os.close(fd)
        return word_of(session_pb2.LinkResponse.FromString(answer))

    def close(self, *, abruptly: bool = False) -> None:
        """`abruptly`: as if the client were killed."""
        self._outbox.put(None)
        if abruptly:
            self.call.cancel()
        else:
            with contextlib.suppress(grpc.RpcError):
                for _ in self.call:
                    pass
        for link in self._links:
            link.close()


class Footprint:
    def __init__(self, pid: int) -> None:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines if ":" in line)
        self.anonymous_bytes = int(status["RssAnon"].split()[0]) << 10
        self.num_threads = int(status["Threads"])
        self.num_fds = len(os.listdir(f"/proc/{pid}/fd"))

    def __repr__(self) -> str:
        return (
            f"Footprint({self.anonymous_bytes >> 20} MiB anonymous, {self.num_fds} "
            f"descriptors, {self.num_threads} threads)"
        )
