"""Lines between a tier and its Mooncake child are bounded and in time; a process that is no child
is lost."""

import socket
import time
from collections.abc import Iterator

import pytest

from hotkv_server.dataplane.plan import Region
from hotkv_server.settings.tiers import MooncakeSettings
from hotkv_server.tiers.mooncake import tier, words
from hotkv_server.tiers.mooncake.words import Line, quoted
from hotkv_server.tiers.remote.client import StoreError

Ends = tuple[Line, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    mine, theirs = socket.socketpair()
    yield Line(mine), theirs
    mine.close()
    theirs.close()


def test_messages_come_one_by_one(ends: Ends) -> None:
    line, other = ends
    other.sendall(b'{"a": 1}\n{"b"')
    assert line.receive() == {"a": 1}
    other.sendall(b": 2}\n")
    assert line.receive(time.monotonic() + 5) == {"b": 2}
    line.send({"c": "ä"})
    assert other.recv(100) == b'{"c": "\\u00e4"}\n'


def test_nothing_is_waited_for_beyond_the_limit(ends: Ends) -> None:
    line, other = ends
    other.sendall(b'{"a"')
    with pytest.raises(TimeoutError):
        line.receive(time.monotonic() + 0.1)
    with pytest.raises(TimeoutError):
        line.send({}, time.monotonic())


def test_a_line_without_end_is_bounded(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    line, other = ends
    monkeypatch.setattr(words, "MAX_LINE_BYTES", 1 << 12)
    other.setblocking(False)
    assert other.send(b"x" * (1 << 16)) > 1 << 12
    with pytest.raises(EOFError):
        line.receive(time.monotonic() + 20)
    assert len(line._received) <= (1 << 12) + words.RECEIVE_BYTES


@pytest.mark.parametrize("said", [b"[]\n", b"1\n", b""])
def test_what_is_no_object_is_the_end(ends: Ends, said: bytes) -> None:
    line, other = ends
    other.sendall(said)
    other.close()
    with pytest.raises(EOFError):
        line.receive(time.monotonic() + 5)


def test_keys_that_differ_are_quoted_apart_and_readable() -> None:
    assert quoted(b"hotkv/1/ab/0~1") == "hotkv/1/ab/0~1"
    assert quoted(b"%00\x00\xff") == "%2500%00%FF"
    assert len({quoted(bytes([n])) for n in range(256)}) == 256


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("tier.CHILD", "hotkv_no_such_module", "lost its child"),
        ("tier.sys.executable", "/none", r"no child process \(No such file"),
    ],
)
def test_a_child_that_ends_is_lost_and_reaped(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setattr(f"hotkv_server.tiers.mooncake.{name}", value)
    settings = MooncakeSettings(master="127.0.0.1:1", local_hostname="127.0.0.1")
    with open("/dev/null", "rb") as file, pytest.raises(StoreError, match=words):
        memories = [(Region(0, 1, "arena"), file.fileno())]
        tier.MooncakeClient(settings, memories, time.monotonic() + 20)
