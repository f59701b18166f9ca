"""Clients that reuse ids for other purposes, and send unusable file descriptors. Answers are
counted under `KIND: what`. No wait is longer than DEADLINE_S."""

import contextlib
import ctypes
import fcntl
import os
import random
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace

import grpc
import numpy as np

from hotkv_client import BlockRun, GroupHashes, LoadRun, Role, SessionConfig
from hotkv_client.wire import call_messages as _wire
from hotkv_client.wire import sparse as _sparse_wire
from hotkv_proto.blocks import NO_OPTIONS, Retention, StoreOptions
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace
from hotkv_proto.layout import FENCE_HANDLE, FENCE_WORDS, Layout, MemoryHandle, PageTensor
from hotkv_proto.order import NO_ORDER
from hotkv_proto.v1 import session_pb2
from tests.robustness.raw_client import RawSession, word_of

INT32 = np.int32
NUM_BLOCKS, SLOT_BYTES = 48, 8192
MEMORY_BYTES = NUM_BLOCKS * SLOT_BYTES
LAYOUT = Layout(
    0,
    NUM_BLOCKS,
    (MemoryHandle("kv", MEMORY_BYTES),),
    (PageTensor(0, "kv", 0, SLOT_BYTES, SLOT_BYTES, 0),),
    "x",
)
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
NAMES = ("a", "b", "c")
"""Few, so that ids are often reused."""
OF_LEASES = ("acquire", "reserve", "store", "load", "release", "cancel", "create", "append")
CALLS = (*OF_LEASES, "open residency", "extend residency", "close residency", "delete")
F_ADD_SEALS, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE, F_SEAL_FUTURE_WRITE = 1033, 2, 4, 8, 16
SEALS = (F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE, F_SEAL_FUTURE_WRITE, 14)
LATER_SEALS = (F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE)
PUNCH_HOLE = 0x03
"""FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE."""
PLAIN_FILES = ("whole", "whole", "whole", "holes", "short", "empty", "sealed", "read-only", "path")
STRANGE_FILES = (*PLAIN_FILES, "pipe", "socket", "device", "folder")
libc = ctypes.CDLL(None, use_errno=True)


def memory_file(num_bytes: int, *, filled: bool = True) -> int:
    """A memfd; a hole unless `filled`."""
    fd = os.memfd_create("odd", os.MFD_ALLOW_SEALING)
    if filled and num_bytes:
        os.posix_fallocate(fd, 0, num_bytes)
    else:
        os.truncate(fd, num_bytes)
    return fd


def run_of(blocks: list[bytes]) -> BlockRun:
    return BlockRun(0, blocks, np.arange(len(blocks), dtype=INT32))


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


class OddClients:
    def __init__(
        self, target: str, chance: random.Random, note: Callable[[str, str], None]
    ) -> None:
        self.target, self.chance, self.note = target, chance, note

    def kinds(self) -> dict[str, Callable[[], None]]:
        return {"ids again": self.ids_again, "descriptors": self.descriptors}

    @contextlib.contextmanager
    def session(self, model: str) -> Iterator[RawSession]:
        """In a key space with one group."""
        group = GroupSpec(GroupKind.FULL_ATTENTION, 16, (SLOT_BYTES,))
        space = KeySpace(model, "w", "bfloat16", (group,), 16)
        asked = SessionConfig(self.target, f"odd {model}", Role.TOOL, space)
        with grpc.insecure_channel(self.target, OWN_CONNECTION) as channel:
            session = RawSession(channel, self.target, _wire.open_session(asked))
            try:
                yield session
            finally:
                session.close(abruptly=self.chance.random() < 0.5)

    def hashes(self, count: int) -> list[bytes]:
        """About half from a small set, so that calls meet."""
        return [
            bytes([self.chance.randrange(64)]) * 32
            if self.chance.random() < 0.5
            else self.chance.randbytes(32)
            for _ in range(count)
        ]

    @contextlib.contextmanager
    def working(self, model: str) -> Iterator[RawSession]:
        """With memory, and a read lease `lease` on sixteen blocks."""
        fd = memory_file(MEMORY_BYTES)
        blocks = [bytes([number]) * 32 for number in range(16)]
        try:
            with self.session(model) as session:
                assert session.link({"kv": fd}) == "answered"
                for request in (
                    _wire.register_memory(LAYOUT, NO_ORDER),
                    store("first", [run_of(blocks)]),
                    _wire.acquire("lease", [GroupHashes(0, blocks)], 0, 32),
                ):
                    word, answer = session.ask(request)
                    assert word == "answered", f"{word}: {answer}"
                yield session
        finally:
            os.close(fd)

    def collect(self, kind: str, session: RawSession, asked: dict[int, str]) -> None:
        answers = session.answers(set(asked))
        for number, what in asked.items():
            answer = answers.get(number)
            self.note(f"{kind}: {what}", "ended" if answer is None else word_of(answer))
        asked.clear()

    def _ids(self, count: int) -> np.ndarray:
        return np.array([self.chance.randrange(NUM_BLOCKS) for _ in range(count)], INT32)

    def ids_again(self) -> None:
        with self.working("ids") as session:
            asked: dict[int, str] = {}
            for _ in range(60):
                what = self.chance.choice(CALLS)
                asked[session.put(self._again(what))] = what
                if self.chance.random() < 0.2:
                    self.collect("ids again", session, asked)
            self.collect("ids again", session, asked)

    def _again(self, what: str) -> session_pb2.ConnectRequest:
        chance, name, other = self.chance, self.chance.choice(NAMES), self.chance.choice(NAMES)
        hashes = self.hashes(chance.randrange(8))
        ids, parent, short_s = self._ids(len(hashes)), bytes(chance.choice((0, 32))), (0.001, 20.0)
        run = BlockRun(0, hashes, ids, depth=chance.choice((0, 3)), parent_hash=parent)
        match what:
            case "acquire":
                groups, ttl_s = [GroupHashes(0, hashes)], chance.choice((0.0, 0.001, 60.0))
                wants_offsets = chance.random() < 0.3
                return _wire.acquire(name, groups, ttl_s, 32, wants_offsets=wants_offsets)
            case "reserve":
                retention = Retention(chance.randrange(-8, 9), 1.0, pin=chance.random() < 0.3)
                without_ids = [replace(run, block_ids=np.empty(0, INT32))]
                return _wire.reserve(name, without_ids, chance.choice((0.0, 0.001)), retention, 32)
            case "store":
                runs, timeout_s = [run] * chance.choice((1, 1, 2)), chance.choice(short_s)
                options = StoreOptions(residency_id=chance.choice(("", name)))
                return store(other, runs, lease=name, timeout_s=timeout_s, options=options)
            case "load":
                positions = np.array(chance.sample(range(8), min(len(hashes), 8)), INT32)
                lease, loads = chance.choice((name, "lease")), [LoadRun(0, positions, ids)]
                return _wire.load(other, lease, loads, chance.choice(short_s))
            case "release":
                return _wire.release(name)
            case "cancel":
                return _wire.cancel(other)
            case "create":
                return _sparse_wire.create_sequence(name, 0, hashes, None, 32)
            case "open residency":
                counts = {chance.choice((0, 0, 0, 1, -1)): chance.choice((0, 1, 8, 300, 1 << 33))}
                return _wire.open_residency(name, counts)
            case "extend residency":
                group, first = chance.choice((0, 0, 0, 1)), chance.choice((0, 0, 3, -1))
                return _wire.extend_residency(name, group, first, hashes, 32)
            case "close residency":
                return _wire.close_residency(name)
            case "append":
                return _sparse_wire.append_blocks(name, chance.randrange(4), hashes, 32)
            case _:
                return _sparse_wire.delete_sequence(name)

    def descriptors(self) -> None:
        """Too short, with holes, sealed, changed afterwards, or no memory at all."""
        note = self.note
        for _ in range(4):
            with contextlib.ExitStack() as held:
                session = held.enter_context(self.session("descriptors"))
                kinds = {
                    FENCE_HANDLE: self._strange_file(held, 4 * FENCE_WORDS),
                    "kv": self._strange_file(held, MEMORY_BYTES),
                }
                fds = {name: fd for name, (_, fd) in kinds.items()}
                word = session.link(fds)
                for name, (what, _) in kinds.items():
                    kind = "fence" if name == FENCE_HANDLE else "memory"
                    note(f"descriptors: {kind} {what}", word)
                if word != "answered":
                    plain = memory_file(MEMORY_BYTES)
                    held.callback(os.close, plain)
                    note("descriptors: link again", session.link({"kv": plain}))
                register = _wire.register_memory(LAYOUT, NO_ORDER)
                note("descriptors: register", session.ask(register)[0])
                asked: dict[int, str] = {}
                for number in range(8):
                    run = run_of(self.hashes(NUM_BLOCKS))
                    word_index = self.chance.choice((0, 1, 7, FENCE_WORDS - 1, FENCE_WORDS, -1))
                    request = store(f"{number}", [run], fence_index=word_index)
                    asked[session.put(request)] = "store"
                    if self.chance.random() < 0.4:
                        self._spoil(self.chance.choice(list(fds.values())))
                self.collect("descriptors", session, asked)

    def _strange_file(self, held: contextlib.ExitStack, num_bytes: int) -> tuple[str, int]:
        what = self.chance.choice(STRANGE_FILES)
        match what:
            case "pipe":
                fd, other = os.pipe()
                held.callback(os.close, other)
            case "socket":
                one, two = socket.socketpair()
                held.callback(two.close)
                fd = one.detach()
            case "device":
                fd = os.open("/dev/zero", os.O_RDWR)
            case "folder":
                fd = os.open("/dev/shm", os.O_RDONLY)
            case _:
                size = {"short": num_bytes // 2, "empty": 0}.get(what, num_bytes)
                fd = memory_file(size, filled=what != "holes")
                if what == "sealed":
                    # Fails if the server has mapped the file.
                    fcntl.fcntl(fd, F_ADD_SEALS, self.chance.choice(SEALS))
                if what in ("read-only", "path"):
                    mode = os.O_RDONLY if what == "read-only" else os.O_PATH
                    plain, fd = fd, os.open(f"/proc/self/fd/{fd}", mode)
                    os.close(plain)
        held.callback(os.close, fd)
        return what, fd

    def _spoil(self, fd: int) -> None:
        """Changes a file that the server may have mapped. Ignores OSError."""
        with contextlib.suppress(OSError):
            match self.chance.choice(("cut", "grow", "punch", "write", "seal")):
                case "cut":
                    os.truncate(fd, self.chance.choice((0, 1, 2048, 4096)))
                case "grow":
                    os.truncate(fd, 1 << 23)
                case "punch":
                    libc.fallocate(fd, PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(4096))
                case "write":
                    word_index = self.chance.choice((0, 1, 7, FENCE_WORDS - 1))
                    os.pwrite(fd, (1).to_bytes(4, "little"), 4 * word_index)
                case _:
                    fcntl.fcntl(fd, F_ADD_SEALS, self.chance.choice(LATER_SEALS))
