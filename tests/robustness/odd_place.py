"""The server of the odd clients, with the helpers that all of them need. The helpers' `with` blocks
close everything that they opened; no wait is longer than DEADLINE_S."""

import contextlib
import os
import random
import socket
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np

from hotkv_client import BlockRun, GroupHashes, Role, SessionConfig
from hotkv_client.link import descriptor_socket
from hotkv_client.wire import requests as _wire
from hotkv_proto.blocks import NO_OPTIONS, StoreOptions
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor
from hotkv_proto.order import NO_ORDER
from hotkv_proto.v1 import session_pb2, sparse_pb2
from tests.robustness.raw_client import DEADLINE_S, RawSession, word_of
from tests.server.sparse_support import HEAD_SIZE, LAYERS, QUERY_HEADS, RepresentationEngine

INT32 = np.int32
NUM_BLOCKS = 48
SMALL_WINDOW = [
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 65536),
    ("grpc.use_local_subchannel_pool", 1),
]
"""gRPC options of a channel that shares no connection with others and buffers little."""
Kinds = dict[str, Callable[[], None]]
"""Kinds of odd clients, by name. Each call of such a function makes some tens of inputs."""


def memory_file(num_bytes: int, *, filled: bool = True) -> int:
    """Returns a memfd. Unless `filled`, the file is one hole."""
    fd = os.memfd_create("odd", os.MFD_ALLOW_SEALING)
    if filled and num_bytes:
        os.posix_fallocate(fd, 0, num_bytes)
    else:
        os.truncate(fd, num_bytes)
    return fd


def run_of(blocks: list[bytes], ids: np.ndarray | None = None, **more: Any) -> BlockRun:
    """Returns a run of group 0; block ids count from 0 unless `ids` are given."""
    places = np.arange(len(blocks), dtype=INT32) if ids is None else ids
    return BlockRun(0, blocks, places, **more)


def store(
    name: str,
    runs: list[BlockRun],
    *,
    lease: str = "",
    timeout_s: float = 20.0,
    options: StoreOptions = NO_OPTIONS,
    fence_index: int = 0,
) -> session_pb2.ConnectRequest:
    return _wire.store(name, lease or name, runs, timeout_s, options, fence_index, 32)


def acquire(name: str, blocks: list[bytes], num_groups: int = 1) -> session_pb2.ConnectRequest:
    return _wire.acquire(name, [GroupHashes(0, blocks)] * num_groups, 0, 32)


class Place:
    """A server, and helpers for its clients.

    note: counts an input and its answer.
    look: checks that other clients are served.
    """

    def __init__(
        self,
        target: str,
        admin: str,
        http_port: int,
        chance: random.Random,
        note: Callable[[str, str], None],
        look: Callable[[], None],
    ) -> None:
        self.target, self.admin, self.http_port = target, admin, http_port
        self.chance, self.note, self.look = chance, note, look

    @contextlib.contextmanager
    def session(
        self, *, slot_bytes: int = 8192, model: str = "odd", hears: bool = False
    ) -> Iterator[RawSession]:
        """Opens a session over a new channel, whose key space has one group; closes it
        afterwards."""
        group = GroupSpec(GroupKind.FULL_ATTENTION, 16, (slot_bytes,))
        space = KeySpace(f"{model} {slot_bytes}", "w", "bfloat16", (group,), 16)
        on_evicted = (lambda _: None) if hears else None
        asked = SessionConfig(self.target, f"odd {model}", Role.TOOL, space, on_evicted=on_evicted)
        with grpc.insecure_channel(self.target, SMALL_WINDOW) as channel:
            session = RawSession(channel, self.target, _wire.open_session(asked))
            try:
                yield session
            finally:
                session.close(abruptly=self.chance.random() < 0.5)

    def hashes(self, count: int) -> list[bytes]:
        """Returns hashes, half of them from a small set that other calls use too."""
        return [
            bytes([self.chance.randrange(64)]) * 32
            if self.chance.random() < 0.5
            else self.chance.randbytes(32)
            for _ in range(count)
        ]

    def plain(self, num_bytes: int, slot_bytes: int = 8192) -> Layout:
        tensor = PageTensor(0, "kv", 0, slot_bytes, slot_bytes, 0)
        handles = (MemoryHandle("kv", num_bytes),)
        return Layout(0, num_bytes // slot_bytes, handles, (tensor,), "x")

    @contextlib.contextmanager
    def working(self, model: str) -> Iterator[tuple[RawSession, list[bytes]]]:
        """Opens a session with memory and a read lease `lease` on sixteen blocks."""
        fd = memory_file(NUM_BLOCKS * 8192)
        try:
            with self.session(model=model) as session:
                assert session.link({"kv": fd}) == "answered"
                self.must(session, _wire.register_memory(self.plain(NUM_BLOCKS * 8192), NO_ORDER))
                blocks = [bytes([number]) * 32 for number in range(16)]
                self.must(session, store("first", [run_of(blocks)]))
                self.must(session, acquire("lease", blocks))
                yield session, blocks
        finally:
            os.close(fd)

    def must(
        self, session: RawSession, request: session_pb2.ConnectRequest
    ) -> session_pb2.ConnectResponse:
        word, answer = session.ask(request)
        assert word == "answered", f"{word}: {answer}"
        return answer

    def connection(self, what: str) -> socket.socket:
        """Opens a connection and sends no byte."""
        if what == "http":
            return socket.create_connection(("127.0.0.1", self.http_port), DEADLINE_S)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(DEADLINE_S)
        try:
            connection.connect(str(descriptor_socket(self.target)))
        except OSError:
            connection.close()
            raise
        return connection

    def sparse_engine(self, held: contextlib.ExitStack) -> RepresentationEngine:
        """Connects an engine with representations and stores some blocks."""
        name = f"sparse {self.chance.randrange(8)}"
        engine = RepresentationEngine(self.target, name, "odd sparse")
        held.callback(engine.close)
        engine.store([bytes([100 + number]) * 32 for number in range(64)])
        return engine

    def sequence(self, engine: RepresentationEngine, name: str, length: int) -> list[bytes]:
        blocks = [bytes([100 + number]) * 32 for number in range(length)]
        config = engine.select_config(self.chance.choice((0, 16)))
        engine.session.create_sequence(name, 0, blocks, config).result(DEADLINE_S)
        self.note("slow readers: create", "answered")
        return blocks

    def selection(
        self, engine: RepresentationEngine, name: str, context_tokens: int
    ) -> sparse_pb2.SelectBlocksRequest:
        connection = engine.session._connection
        assert connection is not None
        dice = np.random.default_rng(self.chance.randrange(1 << 30))
        return sparse_pb2.SelectBlocksRequest(
            session_id=connection.session_id,
            sequence_id=name,
            layer_index=self.chance.choice(LAYERS),
            query=dice.standard_normal(QUERY_HEADS * HEAD_SIZE, np.float32).tobytes(),
            context_token_count=context_tokens,
        )

    def collect(self, kind: str, session: RawSession, asked: dict[int, str]) -> None:
        answers = session.answers(set(asked))
        for number, what in asked.items():
            answer = answers.get(number)
            self.note(f"{kind}: {what}", "ended" if answer is None else word_of(answer))
        asked.clear()
