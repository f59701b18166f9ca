"""Tests `Replies`, the reader of Valkey's replies: whatever the pieces, it returns what was
sent, and refuses what is no reply."""

import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hotkv_server.tiers.remote.client import LateError, LostError
from hotkv_server.tiers.valkey import resp
from hotkv_server.tiers.valkey.resp import (
    MAX_LINE_BYTES,
    MAX_REPLY_BYTES,
    MAX_SKIPPED_BYTES,
    ErrorReply,
    Replies,
    command,
)
from hotkv_server.tiers.valkey.stream import ValkeyStream
from tests.server.certificates import Authority
from tests.support.waiting import wait_for

FOREVER = float("inf")
HEAD_BYTES = 4


class Cut:
    """A connection that returns `content` in pieces of at most `sizes`, in turn."""

    def __init__(self, content: bytes, sizes: list[int]) -> None:
        self.left = content
        self.sizes = sizes
        self.calls = 0

    def receive(self, buffers, until_s: float) -> int:
        if not self.left:
            raise LostError("closed the connection")
        most = min(self.sizes[self.calls % len(self.sizes)], sum(map(len, buffers)))
        self.calls += 1
        piece, self.left = self.left[:most], self.left[most:]
        count = len(piece)
        for buffer in buffers:
            part, piece = piece[: len(buffer)], piece[len(buffer) :]
            buffer[: len(part)] = part
        return count


Sent = tuple[bytes, object]
"""A reply on the wire, and its value."""


def sent_as(form: bytes, text: bytes, value: object) -> Sent:
    """`form`: format of the text's length and the text."""
    return form % (len(text), text), value


def list_as(kind: bytes, items: list[Sent]) -> Sent:
    return b"%b%d\r\n%b" % (kind, len(items), b"".join(wire for wire, _ in items)), [
        value for _, value in items
    ]


def map_of(items: list[Sent]) -> Sent:
    """The keys are k0, k1, ..."""
    wire = b"".join(b"+k%d\r\n%b" % (at, item) for at, (item, _) in enumerate(items))
    value = {b"k%d" % at: item for at, (_, item) in enumerate(items)}
    return b"%%%d\r\n%b" % (len(items), wire), value


line = st.text(st.characters(codec="ascii", exclude_characters="\r\n"), max_size=12).map(str.encode)
scalars: st.SearchStrategy[Sent] = st.one_of(
    line.map(lambda text: (b"+" + text + b"\r\n", text)),
    line.map(lambda text: (b"-ERR" + text + b"\r\n", ErrorReply(b"ERR" + text))),
    st.integers(-(1 << 63), 1 << 63).map(lambda value: (b":%d\r\n" % value, value)),
    st.integers(0, 1 << 90).map(lambda value: (b"(%d\r\n" % value, value)),
    st.sampled_from([(wire, None) for wire in (b"_\r\n", b"$-1\r\n", b"*-1\r\n")]),
    st.sampled_from([(b"#t\r\n", True), (b"#f\r\n", False), (b",1.5\r\n", 1.5)]),
    st.binary(max_size=300).map(lambda text: sent_as(b"$%d\r\n%b\r\n", text, text)),
    st.binary(max_size=9).map(lambda text: sent_as(b"!%d\r\n%b\r\n", text, ErrorReply(text))),
    st.binary(max_size=9).map(lambda text: sent_as(b"=%d\r\n%b\r\n", b"txt:" + text, text)),
)
replies = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(lambda items: list_as(b"*", items)),
        st.lists(inner, max_size=4).map(lambda items: list_as(b"~", items)),
        st.lists(inner, max_size=3).map(map_of),
        inner.map(lambda sent: (b"|1\r\n+ttl\r\n:3\r\n" + sent[0], sent[1])),
    ),
    max_leaves=8,
)
cuts = st.lists(st.integers(1, 400), min_size=1, max_size=5)
PUSH = b">2\r\n+invalidate\r\n*1\r\n$1\r\nk\r\n"


@given(st.lists(st.tuples(st.booleans(), replies), min_size=1, max_size=6), cuts)
@example([(False, (b"*1\r\n" * 8 + b":1\r\n", [[[[[[[[1]]]]]]]]))], [7])
@example([(False, (b"+%b\r\n" % (b"x" * 4095), b"x" * 4095))], [4096])
def test_replies_are_what_was_sent(sent: list[tuple[bool, Sent]], sizes: list[int]) -> None:
    """Messages that the server pushes between replies are skipped."""
    content = b"".join((PUSH if has_push else b"") + wire for has_push, (wire, _) in sent)
    reader = Replies(Cut(content, sizes))
    for _, (_, value) in sent:
        assert reader.next(FOREVER) == value
    assert reader.is_empty


@given(
    st.lists(st.one_of(st.none(), st.just(b"-OOM no"), st.binary(max_size=700)), min_size=1),
    cuts,
    st.booleans(),
)
def test_values_go_where_they_should_and_no_further(
    values: list[bytes | None], sizes: list[int], is_wanted: bool
) -> None:
    wire = {None: PUSH + b"_\r\n", b"-OOM no": PUSH + PUSH + b"-OOM no\r\n"}
    content = b"".join(
        wire.get(value) or b"|1\r\n+a\r\n:3\r\n$%d\r\n%b\r\n" % (len(value), value)
        for value in values
    )
    reader = Replies(Cut(content + b":7\r\n", sizes))
    head = memoryview(bytearray(HEAD_BYTES))
    for value in values:
        memory = bytearray(b"\xee" * 800)

        def place(num_bytes: int, memory: bytearray = memory) -> memoryview | None:
            return memoryview(memory)[50 : 50 + num_bytes - HEAD_BYTES] if is_wanted else None

        reply = reader.value(head, place, FOREVER)
        if value is None or value == b"-OOM no":
            assert reply == (None if value is None else ErrorReply(b"OOM no"))
            assert memory == b"\xee" * 800
            continue
        is_placed = is_wanted and len(value) >= HEAD_BYTES
        assert reply is is_placed
        body = value[HEAD_BYTES:] if is_placed else b""
        assert memory == b"\xee" * 50 + body + b"\xee" * (750 - len(body))
        if len(value) >= HEAD_BYTES:
            assert bytes(head) == value[:HEAD_BYTES]
    assert reader.next(FOREVER) == 7 and reader.is_empty


@given(replies, cuts)
def test_a_reply_that_ends_too_early_is_lost(reply: Sent, sizes: list[int]) -> None:
    for end in range(len(reply[0])):
        with pytest.raises(LostError):
            Replies(Cut(reply[0][:end], sizes)).next(FOREVER)


@given(st.binary(min_size=1, max_size=200), cuts)
def test_garbage_is_a_reply_or_lost(content: bytes, sizes: list[int]) -> None:
    reader = Replies(Cut(content, sizes))
    with pytest.raises(LostError):
        for _ in range(len(content)):
            reader.next(FOREVER)
    reader = Replies(Cut(content, sizes))
    with pytest.raises(LostError):
        for _ in range(len(content)):
            reader.value(memoryview(bytearray(4)), lambda num_bytes: None, FOREVER)


@pytest.mark.parametrize(
    "content",
    [
        b"$%d\r\n" % (MAX_REPLY_BYTES + 1),
        b"*100000\r\n",
        b"*1\r\n" * 9 + b":1\r\n",
        b"+" + b"x" * (MAX_LINE_BYTES + 9),
        b"$3\r\nabcd\r\n",
        b"$3x\r\nabc\r\n",
        b"$-2\r\n",
        b"$+3\r\nabc\r\n",
        b":1e3\r\n",
        b"#x\r\n",
        b",one\r\n",
        b"\r\n",
        b"HTTP/1.1 400 Bad Request\r\n",
    ],
)
def test_what_cannot_be_a_reply_is_lost(content: bytes) -> None:
    with pytest.raises(LostError) as caught:
        Replies(Cut(content, [7])).next(FOREVER)
    # Not about the closed connection behind it.
    assert "closed" not in str(caught.value)


@pytest.mark.parametrize("content", [b":1\r\n", b"+OK\r\n", b"*1\r\n$1\r\na\r\n", b"%0\r\n"])
def test_a_value_of_another_kind_is_lost(content: bytes) -> None:
    with pytest.raises(LostError, match="kind"):
        Replies(Cut(content, [7])).value(memoryview(bytearray(4)), lambda size: None, FOREVER)


def test_unskippable_long_value_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    head = memoryview(bytearray(HEAD_BYTES))
    with pytest.raises(LostError, match="keeps 67108869 bytes under the key of a block"):
        content = b"$%d\r\nhead" % (HEAD_BYTES + MAX_SKIPPED_BYTES + 1)
        Replies(Cut(content, [7])).value(head, lambda size: None, FOREVER)
    monkeypatch.setattr(resp, "MAX_SKIPPED_BYTES", 8)
    replies = Replies(Cut(b"$12\r\nheadlongtail\r\n+next\r\n", [7]))
    assert replies.value(head, lambda size: None, FOREVER) is False
    assert replies.next(FOREVER) == b"next"


def test_a_command_has_its_lengths() -> None:
    assert command(b"GET", b"a\r\nb") == b"*2\r\n$3\r\nGET\r\n$4\r\na\r\nb\r\n"


@pytest.mark.parametrize("within_s", [0.1, 0.0])
def test_server_that_reads_nothing_ends_the_send(within_s: float) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(LateError):
        ValkeyStream(ours).send([bytes(8 << 20)], time.monotonic() + within_s)


def test_slow_send_over_tls_is_no_stall(tmp_path: Path) -> None:
    """Only the first bytes leave this machine, but that is progress."""
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(*Authority(tmp_path, "ca").issue("store"))
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    ours, theirs = socket.socketpair()
    block, reads, received = bytes(range(256)) * 8192, threading.Event(), bytearray()

    def serve() -> None:
        with served.wrap_socket(theirs, server_side=True) as server:
            reads.wait()
            while len(received) < len(block) and (piece := server.recv(1 << 16)):
                received.extend(piece)

    with ThreadPoolExecutor() as pool:
        serving = pool.submit(serve)
        stream = ValkeyStream(trusting.wrap_socket(ours))
        began_s = stream.moved_s
        sending = pool.submit(stream.send, [block], time.monotonic() + 60)
        try:
            wait_for(lambda: stream.moved_s > began_s, "no byte seems to leave")
            assert not sending.done()
        finally:
            reads.set()
            wait([sending])
            stream.close()
        sending.result()
        serving.result()
    assert received == block
