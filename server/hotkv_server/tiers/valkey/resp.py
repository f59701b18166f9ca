"""Encodes commands and parses replies of RESP, the protocol of Redis and Valkey, in versions 2 and
3.

Always true: `Replies` reads a reply exactly to its last byte, or raises. After an exception the
connection must be closed. `Replies` reads the value of a block directly into the caller's memory,
and checks all sizes that a server sends against limits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from hotkv_server.tiers.remote.client import LostError, quoted

MAX_LINE_BYTES = 4096
"""Longest line in a reply."""
MAX_REPLY_BYTES = 1 << 16
"""Longest string in a reply, in bytes, except values of blocks."""
MAX_SKIPPED_BYTES = 64 << 20
"""Longest string that the reader skips, in bytes. To skip more would take longer than to connect
again."""
MAX_ITEMS = 1 << 14
"""Most members of an array, map or set: the number of hash slots of a cluster."""
MAX_DEPTH = 8
"""Most levels of arrays within arrays in a reply."""
BUFFER_BYTES = 1 << 14
"""Size of the buffer for received bytes that are not parsed yet."""
BESIDE_VALUE_BYTES = 128
"""Number of bytes that are received beyond the end of a value: the line end of the value and the
beginning of the next reply. So a value needs only one system call. To copy so few bytes costs
little."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error reply of the server."""

    text: bytes

    @property
    def code(self) -> str:
        """The first word of the error, such as OOM."""
        return self.text.split(b" ", 1)[0].decode("ascii", "replace")


Reply: TypeAlias = (
    "bool | int | float | bytes | ErrorReply | list[Reply] | dict[bytes, Reply] | None"
)
Place: TypeAlias = Callable[[int], "memoryview | None"]
"""Chooses the memory for a value. `Replies.value` calls it with the length of the whole value, when
it has read the value's first bytes (the head). It returns the memory to which the rest of the value
is written, of exactly the rest's size; None to skip the rest."""


class ReplySource(Protocol):
    """A source of bytes for `Replies`, such as `ValkeyStream`."""

    def receive(self, buffers: Sequence[memoryview], until_s: float) -> int:
        """Waits until bytes have arrived, and writes them to the buffers, in order. Returns their
        number: at least 1, and perhaps fewer than the buffers can take."""


def command(*words: bytes) -> bytes:
    """Returns the RESP bytes of a command. `words`: its name and its arguments."""
    return b"".join(
        (b"*%d\r\n" % len(words), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in words))
    )


class Command(NamedTuple):
    """A command about a key.

    `key`: decides to which server of a cluster the command is sent.
    `pieces`: buffers with the RESP bytes of the command, in order.
    """

    key: bytes
    pieces: tuple[bytes | memoryview, ...]

    @classmethod
    def of(cls, key: bytes, name: bytes, *words: bytes) -> "Command":
        """Returns the command `name key words...`."""
        return cls(key, (command(name, key, *words),))


class Replies:
    """Reads replies from a source of bytes and parses them. Not thread-safe."""

    def __init__(self, source: ReplySource) -> None:
        self._source = source
        self._bytes = bytearray(BUFFER_BYTES)
        self._buffer = memoryview(self._bytes)
        # The range of the buffer with bytes that have arrived and are not parsed yet.
        self._begin = self._end = 0

    def __repr__(self) -> str:
        return f"Replies({self._end - self._begin} bytes read ahead)"

    @property
    def is_empty(self) -> bool:
        """True if no received bytes are left to parse."""
        return self._begin == self._end

    def next(self, until_s: float) -> Reply:
        """Waits for the next reply and returns it. Raises LostError or LateError."""
        while True:
            kind, rest = self._line(until_s, BUFFER_BYTES)
            reply = self._reply(kind, rest, until_s, 0)
            # Skip pushes (>), which answer no command, and attributes (|), which describe the next
            # reply.
            if kind not in b">|":
                return reply

    def value(self, head: memoryview, place: Place, until_s: float) -> "bool | ErrorReply | None":
        """Reads the next reply, which must be a string, null or an error. Returns True for a string
        that was written to memory, False for a string that was skipped, None for null, and an
        ErrorReply for an error. Raises LostError or LateError.

        `head`: gets the first bytes of the string. A string that is shorter than `head` is
            skipped.
        `place`: called with the length of the string, once `head` is full. Returns the memory that
            gets the rest of the string; None skips the rest.
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
        # A verbatim string (=) begins with its format, such as "txt:".
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
        """Reads the next line. Returns its first byte, which is the kind of reply, and the rest of
        the line. `ahead_bytes`: most bytes to receive at a time; they may include bytes after the
        line."""
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
        """Fills `into` with the next bytes. Copies the bytes that are in the buffer already, and
        receives the remaining bytes directly into `into`."""
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
