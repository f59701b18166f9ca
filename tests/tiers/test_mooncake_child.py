"""Tests the child process of Mooncake's client over a fake store: result codes, messages, its
end."""

import ctypes
import mmap
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hotkv_server.dataplane.plan import Region
from hotkv_server.settings.tiers import MooncakeSettings
from hotkv_server.tiers.mooncake import tier, words
from hotkv_server.tiers.mooncake.child import (
    ABSENT_CODE,
    FULL_CODE,
    AwayError,
    Child,
    MasterLostError,
)
from hotkv_server.tiers.mooncake.words import Line, generation_key, quoted
from hotkv_server.tiers.protocol import NO_GENERATION, Read, Write
from hotkv_server.tiers.remote.client import StoreError

SIZE = 4096
NAMES = ["a", "b", "c"]
RPC_FAIL, OTHER = -900, -1


class Store:
    """Values by name.

    codes: method to the result codes it returns instead.
    said: methods called.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.codes: dict[str, Any] = {}
        self.said: list[str] = []

    def register_buffer(self, address: int, num_bytes: int) -> int:
        return self.codes.get("register_buffer", 0)

    def batch_is_exist(self, names: list[str]) -> list[int]:
        self.said.append("exist")
        codes = self.codes.get("exist")
        return codes.pop(0) if codes else [int(name in self.values) for name in names]

    def batch_put_from_multi_buffers(self, names: Any, addresses: Any, sizes: Any) -> list[int]:
        self.said.append("put")
        if "put" in self.codes:
            return self.codes["put"]
        for name, *buffers in zip(names, addresses, sizes, strict=True):
            parts = [ctypes.string_at(*buffer) for buffer in zip(*buffers, strict=True)]
            self.values.setdefault(name, b"".join(parts))
        return [0] * len(names)

    def batch_get_into_multi_buffers(self, names: Any, addresses: Any, sizes: Any) -> list[int]:
        self.said.append("get")
        if "get" in self.codes:
            return self.codes["get"]
        codes = []
        for name, places, lengths in zip(names, addresses, sizes, strict=True):
            value = self.values.get(name)
            codes.append(ABSENT_CODE if value is None else len(value))
            if value is not None and len(value) != sum(lengths):
                codes[-1] = OTHER
            elif value is not None:
                ctypes.memmove(places[0], value[: lengths[0]], lengths[0])
                ctypes.memmove(places[1], value[lengths[0] :], lengths[1])
        return codes

    def batch_remove(self, names: list[str], force: bool) -> list[int]:
        assert force
        self.said.append("remove")
        return [0 if self.values.pop(name, None) else ABSENT_CODE for name in names]

    def remove(self, name: str, force: bool) -> int:
        return self.codes.get("remove_one", self.batch_remove([name], force)[0])

    def get_size(self, name: str) -> int:
        size = len(self.values[name]) if name in self.values else ABSENT_CODE
        return int(self.codes.get("size", size))

    def get(self, name: str) -> bytes:
        self.said.append("generation")
        return b"" if "unreadable" in self.codes else self.values.get(name, b"")

    def put(self, name: str, value: bytes, config: Any) -> int:
        assert config.with_hard_pin
        value = self.codes.get("rival", value)
        if not (code := self.codes.get("put_one", 0)):
            self.values.setdefault(name, value)
        return int(code)


class Made:
    def __init__(self) -> None:
        self.store, self.arena = Store(), mmap.mmap(-1, 8 * SIZE)
        native = SimpleNamespace(ReplicateConfig=SimpleNamespace)
        self.child = Child(self.store, native, self.arena)
        self.bytes = np.frombuffer(self.arena, np.uint8)
        self.bytes[: 3 * SIZE] = np.random.default_rng(1).integers(0, 256, 3 * SIZE, np.uint8)

    def ask(self, do: str, first: int = 0, generations: tuple[str, ...] = (), **more: Any) -> Any:
        slots = [(first + n) * SIZE for n in range(3)]
        rows = {"names": NAMES, "keys": [name.encode().hex() for name in NAMES], "slots": slots}
        asked = {"do": do, "sizes": [SIZE] * 3, "generations": generations, **rows, **more}
        return self.child.requests[do](asked)


@pytest.fixture
def made() -> Made:
    return Made()


@pytest.mark.parametrize(
    ("answers", "codes"),
    [
        ({"exist": [[0, 0, 0], [1, 0, OTHER]]}, [Write.STORED, Write.FULL, Write.FULL]),
        (
            {"put": [FULL_CODE, OTHER, 0], "exist": [[0, 0, 0], [0, 0, 1]]},
            [Write.FULL, Write.FAILED, Write.STORED],
        ),
    ],
)
def test_what_was_put_is_looked_for(made: Made, answers: Any, codes: list[Write]) -> None:
    made.store.codes |= answers
    assert made.ask("write")["codes"] == codes


def test_a_get_that_fails_is_no_damage(made: Made) -> None:
    made.ask("write")
    assert made.ask("write")["codes"] == [Write.PRESENT] * 3
    assert made.ask("read", 4)["codes"] == [Read.FOUND] * 3
    assert np.array_equal(made.bytes[4 * SIZE : 7 * SIZE], made.bytes[: 3 * SIZE])
    made.store.values["c"] = made.store.values["a"]
    assert made.ask("read", 4)["codes"] == [Read.FOUND, Read.FOUND, Read.CORRUPT]
    made.store.values["b"] += b"more"
    made.store.codes["get"] = [OTHER, OTHER, ABSENT_CODE]
    assert made.ask("read", 4)["codes"] == [Read.FAILED, Read.CORRUPT, Read.ABSENT]
    assert set(made.store.values) == {"a"}
    assert made.ask("forget") == {} and not made.store.values


@pytest.mark.parametrize("do, codes", [
    ("probe", {"exist": [[1, RPC_FAIL, 1]]}), ("write", {"exist": [[0, RPC_FAIL, 1]]}),
    ("write", {"put": [0, RPC_FAIL, 0]}), ("read", {"get": [SIZE + 24, RPC_FAIL, ABSENT_CODE]}),
    ("read", {"get": [OTHER] * 3, "size": RPC_FAIL}), ("generations", {"put_one": RPC_FAIL}),
    ("raise", {"remove_one": RPC_FAIL}), ("raise", {"remove_one": OTHER}),
])  # fmt: skip
def test_a_lost_master_answers_nothing(made: Made, do: str, codes: dict[str, Any]) -> None:
    made.store.codes |= codes
    with pytest.raises(MasterLostError):
        made.ask(do, fingerprint="f", fingerprints=["f"], floor=0)


def test_memory_that_is_refused_ends_the_child() -> None:
    store = Store()
    store.codes["register_buffer"] = OTHER
    with pytest.raises(MasterLostError, match="register"):
        Child(store, None, mmap.mmap(-1, SIZE))


@pytest.mark.parametrize(
    "slot, size", [(-SIZE, SIZE), (8 * SIZE, SIZE), (7 * SIZE, 2 * SIZE), (0, 0)]
)
@pytest.mark.parametrize("do", ["read", "write"])
def test_slots_outside_the_arena_are_refused(made: Made, do: str, slot: int, size: int) -> None:
    asked = {"names": ["a"], "keys": ["61"], "slots": [slot], "sizes": [size], "generations": []}
    with pytest.raises(ValueError, match="outside"):
        made.child.requests[do](asked)
    assert not {"put", "get"} & set(made.store.said)


def test_generations_are_read_behind_the_blocks(made: Made) -> None:
    begun = made.ask("generations", fingerprints=["f"])["generations"]
    generation = begun["f"]
    assert generation > 0 and made.ask("generations", fingerprints=["f"])["generations"] == begun
    for do, first in (("read", "get"), ("probe", "exist")):
        made.store.said.clear()
        assert made.ask(do, 4, generations=("f", "g"))["generations"] == {
            "f": generation,
            "g": NO_GENERATION,
        }
        assert made.store.said == [first, "generation", "generation"]
    raised = made.ask("raise", fingerprint="f", floor=generation + (1 << 40))["generation"]
    assert raised > generation + (1 << 40)
    assert made.ask("raise", fingerprint="g", floor=0)["generation"] > 0
    made.store.codes["size"] = RPC_FAIL
    with pytest.raises(MasterLostError):
        made.ask("read", 4, generations=("h",))


@pytest.mark.parametrize("value", [b"x", b"-4", b"1.5", b"0", b"9" * 30])
def test_malformed_generation_ends_with_a_flush(made: Made, value: bytes) -> None:
    made.store.values[generation_key("f")] = value
    for do in ("read", "probe"):
        with pytest.raises(MasterLostError, match="no number"):
            made.ask(do, 4, generations=("f",))
    assert made.ask("generations", fingerprints=["f", "g"])["generations"].keys() == {"g"}
    assert made.ask("raise", fingerprint="f", floor=7)["generation"] > 7
    assert made.ask("read", 4, generations=("f",))["generations"]["f"] > 7


def test_lost_generation_is_not_taken_for_none(made: Made) -> None:
    """The key exists, but its bytes died with a process: not absent, until the master has
    dropped the key."""
    generation = made.ask("generations", fingerprints=["f"])["generations"]["f"]
    made.store.codes["unreadable"] = True
    for do in ("read", "probe", "generations"):
        with pytest.raises(AwayError, match="can't be read"):
            made.ask(do, 4, generations=("f",), fingerprints=["f"])
    with pytest.raises(AwayError):
        made.ask("raise", fingerprint="f", floor=generation)
    del made.store.codes["unreadable"]
    assert made.ask("raise", fingerprint="f", floor=generation)["generation"] > generation


def test_another_nodes_old_generation_is_no_flush(made: Made) -> None:
    generation = made.ask("generations", fingerprints=["f"])["generations"]["f"]
    made.store.codes["rival"] = b"%d" % generation
    for floor in (0, generation):
        with pytest.raises(MasterLostError, match="old generation"):
            made.ask("raise", fingerprint="f", floor=floor)
        made.store.values.clear()
    assert made.ask("raise", fingerprint="f", floor=generation - 1)["generation"] == generation


def test_a_flush_that_leaves_no_trace_has_failed(made: Made) -> None:
    """Without room, a first flush removes the old generation, which others notice; a second
    changes nothing."""
    made.ask("generations", fingerprints=["f"])
    made.store.codes["put_one"] = FULL_CODE
    assert made.ask("raise", fingerprint="f", floor=0)["generation"] == NO_GENERATION
    assert made.ask("generations", fingerprints=["f"])["generations"] == {"f": NO_GENERATION}
    with pytest.raises(MasterLostError, match="no room"):
        made.ask("raise", fingerprint="f", floor=0)


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
