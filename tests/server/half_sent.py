"""An HTTP/2 client that leaves gRPC messages incomplete, which gRPC's own can't."""

import contextlib
import select
import socket
import threading
from pathlib import Path

import h2.config
import h2.connection
import h2.events
import h2.exceptions

from tests.support.waiting import WAIT_S


class HalfSender:
    """A thread that withholds the last byte of each message. `num_ended`: calls that the server
    has ended."""

    def __init__(self, grpc_socket: Path) -> None:
        self.num_ended = 0
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(grpc_socket))
        self._socket.settimeout(WAIT_S)
        self._http = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self._http.initiate_connection()
        self._left: dict[int, tuple[bytes, int]] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def num_left(self) -> int:
        """Bytes that flow control does not let through yet."""
        with self._lock:
            return sum(len(head) + count for head, count in self._left.values())

    def call(self, path: str, message_bytes: int, before: bytes = b"") -> None:
        """The message `before` is sent whole."""
        with self._lock:
            stream = self._http.get_next_available_stream_id()
            headers = {
                ":method": "POST",
                ":scheme": "http",
                ":path": path,
                ":authority": "x",
                "te": "trailers",
            }
            self._http.send_headers(
                stream, [*headers.items(), ("content-type", "application/grpc")]
            )
            first = b"\0" + len(before).to_bytes(4, "big") + before if before else b""
            self._left[stream] = (
                first + b"\0" + message_bytes.to_bytes(4, "big"),
                message_bytes - 1,
            )

    def _run(self) -> None:
        with contextlib.suppress(OSError, h2.exceptions.ProtocolError):
            while not self._closed.is_set():
                with self._lock:
                    for stream in list(self._left):
                        self._send_some(stream)
                    ready = self._http.data_to_send()
                self._socket.sendall(ready)
                if select.select([self._socket], [], [], 0.01)[0]:
                    self._hear(self._socket.recv(1 << 16))

    def _send_some(self, stream: int) -> None:
        head, count = self._left[stream]
        window = min(
            self._http.local_flow_control_window(stream), self._http.max_outbound_frame_size
        )
        if head and window >= len(head):
            self._http.send_data(stream, head)
            self._left[stream] = (b"", count)
        elif not head and min(window, count):
            self._http.send_data(stream, bytes(min(window, count)))
            self._left[stream] = (b"", count - min(window, count))

    def _hear(self, data: bytes) -> None:
        with self._lock:
            for event in self._http.receive_data(data):
                if isinstance(
                    event, h2.events.StreamReset | h2.events.StreamEnded
                ) and self._left.pop(event.stream_id, None):
                    self.num_ended += 1
                elif isinstance(event, h2.events.DataReceived):
                    self._http.acknowledge_received_data(
                        event.flow_controlled_length, event.stream_id
                    )

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._socket.close()
