"""RESP, the protocol of Redis and Valkey, versions 2 and 3.

Always true: `Replies` reads a reply to its last byte, or raises; then close the connection. It
reads block values into the caller's memory, and bounds all sizes that a server sends.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from hotkv_server.tiers.remote.client import LostError, quoted

MAX_LINE_BYTES = 4096
MAX_REPLY_BYTES = 1 << 16
"""Of a string, except block values."""
MAX_SKIPPED_BYTES = 64 << 20
"""Skipping more would take longer than a new connection."""
MAX_ITEMS = 1 << 14
"""Of an array, map or set: as many as a cluster has hash slots."""
MAX_DEPTH = 8
"""Of nested arrays."""
BUFFER_BYTES = 1 << 14
"""For received bytes that are not parsed yet."""
BESIDE_VALUE_BYTES = 128
"""Received beyond a value, its line end and more, so that it takes one system call. So few are
cheap to copy."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    text: bytes

    @property
    def code(self) -> str:
        """First word, such as OOM."""
        return self.text.split(b" ", 1)[0].decode("ascii", "replace")


Reply: TypeAlias = (
    "bool | int | float | bytes | ErrorReply | list[Reply] | dict[bytes, Reply] | None"
)
Place: TypeAlias = Callable[[int], "memoryview | None"]
"""See `Replies.value`."""


class ReplySource(Protocol):
    """Bytes for `Replies`."""

    def receive(self, buffers: Sequence[memoryview], until_s: float) -> int:
        """Waits for bytes and fills the buffers in order. Returns their number: at least 1,
        perhaps fewer than fit."""


def command(*words: bytes) -> bytes:
    """RESP of a command."""
    return b"".join(
        (b"*%d\r\n" % len(words), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in words))
    )


class Command(NamedTuple):
    """`key` decides on the cluster's server; `pieces` are its RESP."""

    key: bytes
    pieces: tuple[bytes | memoryview, ...]

    @classmethod
    def of(cls, key: bytes, name: bytes, *words: bytes) -> "Command":
        return cls(key, (command(name, key, *words),))


class Replies:
    """Not thread-safe. Methods raise LostError or LateError."""

    def __init__(self, source: ReplySource) -> None:
        self._source = source
        self._bytes = bytearray(BUFFER_BYTES)
        self._buffer = memoryview(self._bytes)
        # Bytes that are not parsed yet.
        self._begin = self._end = 0

    def __repr__(self) -> str:
        return f"Replies({self._end - self._begin} bytes read ahead)"

    @property
    def is_empty(self) -> bool:
        return self._begin == self._end

    def next(self, until_s: float) -> Reply:
        while True:
            kind, rest = self._line(until_s, BUFFER_BYTES)
            reply = self._reply(kind, rest, until_s, 0)
            # Pushes (>) answer no command; attributes (|) describe the next reply.
            if kind not in b">|":
                return reply

    def value(self, head: memoryview, place: Place, until_s: float) -> "bool | ErrorReply | None":
        """Reads a string to memory and returns True, or skips it and returns False. None for null,
        or the error.

        `head`: gets the first bytes; shorter strings are skipped.
        `place`: called with the length, once `head` is full; returns memory of the rest's size,
            or None to skip it.
        """
        kind, rest = self._line(until_s, BESIDE_VALUE_BYTES)
        while kind in b">|":
            self._reply(kind, rest, until_s, 0)
            kind, rest = self._line(until_s, BESIDE_VALUE_BYTES)
        if kind == b"$" and rest != b"-1":
            num_bytes, body = _length(rest, 1 << 40), None
            skipped = num_bytes
            if num_bytes >= len(head):
                self._take(head, until_s)
                skipped -= len(head)
                body = place(num_bytes)
            if body is not None:
                assert len(body) == skipped, "the memory is not for the rest of the value"
                self._take(body, until_s)
                skipped = 0
            if skipped > MAX_SKIPPED_BYTES:
                raise LostError(f"keeps {num_bytes} bytes under the key of a block")
            self._skip(skipped, until_s)
            self._line_end(until_s)
            return body is not None
        reply = self._reply(kind, rest, until_s, 0)
        if reply is None or isinstance(reply, ErrorReply):
            return reply
        raise LostError(f"answers GET with a reply of kind {quoted(kind)}")

    def _reply(self, kind: bytes, rest: bytes, until_s: float, depth: int) -> Reply:
        if depth > MAX_DEPTH:
            raise LostError(f"sends a reply nested more than {MAX_DEPTH} deep")
        if kind == b"+":
            return rest
        if kind == b"-":
            return ErrorReply(rest)
        if kind in b":(":
            return _integer(rest)
        if kind == b"_" or (kind in b"$*" and rest == b"-1"):
            return None
        if kind == b"#" and rest in (b"t", b"f"):
            return rest == b"t"
        if kind == b",":
            return _double(rest)
        if kind in b"$!=":
            return self._string(kind, _length(rest, MAX_REPLY_BYTES), until_s)
        if kind in b"*~>":
            return self._items(_length(rest, MAX_ITEMS), until_s, depth)
        if kind in b"%|":
            items = self._items(2 * _length(rest, MAX_ITEMS), until_s, depth)
            pairs = zip(items[::2], items[1::2], strict=True)
            return {name: value for name, value in pairs if isinstance(name, bytes)}
        raise LostError(f"sends what is no reply: {quoted(kind + rest)}")

    def _string(self, kind: bytes, num_bytes: int, until_s: float) -> Reply:
        text = bytearray(num_bytes)
        self._take(memoryview(text), until_s)
        self._line_end(until_s)
        if kind == b"!":
            return ErrorReply(bytes(text))
        # A verbatim string begins with its format, such as "txt:".
        return bytes(text[4:] if kind == b"=" else text)

    def _items(self, count: int, until_s: float, depth: int) -> "list[Reply]":
        items: list[Reply] = []
        while len(items) < count:
            kind, rest = self._line(until_s, BUFFER_BYTES)
            item = self._reply(kind, rest, until_s, depth + 1)
            if kind != b"|":
                items.append(item)
        return items

    def _line(self, until_s: float, ahead_bytes: int) -> tuple[bytes, bytes]:
        """A line's first byte, the kind, and its rest. `ahead_bytes`: most to receive at once."""
        while True:
            begin, end = self._begin, self._bytes.find(b"\r\n", self._begin, self._end)
            if end > begin:
                self._begin = end + 2
                return bytes(self._buffer[begin : begin + 1]), bytes(self._buffer[begin + 1 : end])
            if end == begin or self._end - begin > MAX_LINE_BYTES:
                said = bytes(self._buffer[begin : self._end])[:40]
                raise LostError(f"sends what is no reply: {quoted(said)}")
            self._more(until_s, ahead_bytes)

    def _line_end(self, until_s: float) -> None:
        end = bytearray(2)
        self._take(memoryview(end), until_s)
        if end != b"\r\n":
            raise LostError("sends a string that is longer than it says")

    def _take(self, into: memoryview, until_s: float) -> None:
        """Fills `into` from the buffer, then directly."""
        at = min(len(into), self._end - self._begin)
        into[:at] = self._buffer[self._begin : self._begin + at]
        self._begin += at
        while at < len(into):
            self._begin = self._end = 0
            ahead = self._buffer[:BESIDE_VALUE_BYTES]
            count = self._source.receive([into[at:], ahead], until_s)
            self._end = max(0, count - (len(into) - at))
            at = min(len(into), at + count)

    def _skip(self, num_bytes: int, until_s: float) -> None:
        while num_bytes:
            if self._begin == self._end:
                self._more(until_s, BUFFER_BYTES)
            count = min(num_bytes, self._end - self._begin)
            self._begin += count
            num_bytes -= count

    def _more(self, until_s: float, most_bytes: int) -> None:
        if self._begin:
            left = self._end - self._begin
            self._buffer[:left] = bytes(self._buffer[self._begin : self._end])
            self._begin, self._end = 0, left
        room = self._buffer[self._end : self._end + most_bytes]
        self._end += self._source.receive([room], until_s)


def _integer(text: bytes) -> int:
    digits = text[1:] if text[:1] in (b"-", b"+") else text
    if not digits.isdigit() or len(digits) > 40:
        raise LostError(f"sends a number that is none: {quoted(text)}")
    return int(text)


def _double(text: bytes) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise LostError(f"sends a number that is none: {quoted(text)}") from error


def _length(text: bytes, most: int) -> int:
    if not text.isdigit() or len(text) > 15 or int(text) > most:
        raise LostError(f"sends a length that can't be: {quoted(text)}")
    return int(text)
