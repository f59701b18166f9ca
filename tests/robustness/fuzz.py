"""A fuzzer for the server: random and mutated messages to every call, misbehaving clients
(`odd_clients`), mutated files.

The server must answer each message, or refuse it with another reason than INTERNAL; stay alive,
fast and small; log no traceback; and leave a well-behaved client's blocks alone. A mutated file is
read or refused.

`python -m tests.robustness.fuzz --inputs 1000000 --seed 1` prints counts.
"""

import argparse
import collections
import os
import queue
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from demo.processes import Server, runtime_folder
from hotkv_client import BlockRun, GroupHashes, LoadRun
from hotkv_client.admin import AdminClient
from hotkv_client.paged_engine import PagedEngine
from hotkv_client.wire import call_messages as _wire
from hotkv_proto.table import TableGeometry
from hotkv_proto.v1 import session_pb2, sparse_pb2, warm_pb2
from hotkv_server.memory.arena import USE_FILE, _read_use
from hotkv_server.memory.state import (
    KnownKeySpace,
    ServerState,
    StateError,
    read_state,
    write_state,
)
from tests.doubles.with_constants import COMMAND, constant
from tests.robustness.odd_calls import ENVELOPE, SERVER_STREAMS, UNARY
from tests.robustness.odd_clients import OddClients
from tests.robustness.raw_client import BAD_CODES, Footprint, code_of, word_of

NUM_BLOCKS = 64
HASHES = [random.Random(number).randbytes(32) for number in range(48)]
STREAM_MESSAGES = 300
IN_FLIGHT = 32
PING_DEADLINE_S = 10.0
SETTLE_S = 30.0
"""By then all of an ended client's resources must be released."""
MORE_DESCRIPTORS, MORE_BYTES = 64, 96 << 20
"""Allowed growth after a round: 32 MiB for key spaces (`MAX_WEIGHT_BYTES`), 32 MiB of heap not
yet returned (`FREE_BYTES`), as much for late imports and allocators. A leak of 100 bytes per
input exceeds it."""
SMALL_NUMBERS = (0, 1, 2, 3, 7, 16, 63, 64, 255, 256)
ODD_NUMBERS = (*SMALL_NUMBERS, 1 << 14, 1 << 18, (1 << 31) - 1, -1, -2, -(1 << 31))
ODD_FLOATS = (0.0, 0.1, 1.0, -1.0, float("inf"), float("nan"), 1e300, 256.0)
FILTERS = ("page_size", "page_token", "key_space_id", "since_s", "session_id", "odd")
SHORT_TEXTS = ("", "a", "b", "c", "l1", "rot2u", "\u2603", "\x00", "%s%n")
TEXTS = (*SHORT_TEXTS, "x" * 300, "y" * 20_000, "../../etc/passwd", "unix:/tmp/x")


@dataclass
class Tally:
    sent: "collections.Counter[str]" = field(default_factory=collections.Counter)
    answers: "collections.defaultdict[str, collections.Counter[str]]" = field(
        default_factory=lambda: collections.defaultdict(collections.Counter)
    )
    footprints: str = ""
    """The server's before the first round, the largest, and after the last."""

    @property
    def inputs(self) -> int:
        return self.sent.total()

    def note(self, name: str, answer: str) -> None:
        self.sent[name] += 1
        self.answers[name][answer] += 1

    def rows(self) -> list[tuple[str, int, str]]:
        return [(name, count, self._said(name)) for name, count in sorted(self.sent.items())]

    def _said(self, name: str) -> str:
        return ", ".join(f"{answer} {n}" for answer, n in self.answers[name].most_common(6))


TOPICS = ("", "server", "tiers", "key_spaces", "sessions", "blocks", "residencies", "hints")
TOPICS += ("savings", "sparse_layers")


class Odd:
    """Random messages, mostly of plausible values; their bytes may be mutated."""

    def __init__(self, seed: int, session_id: str) -> None:
        self.random = random.Random(seed)
        self.session_id = session_id

    def message(self, kind: type[Message]) -> bytes:
        made = kind()
        self.fill(made, 3)
        return self.mutated(made.SerializeToString())

    def fill(self, message: Message, depth: int) -> None:
        chance = self.random
        chosen = {chance.choice(one.fields).name for one in message.DESCRIPTOR.oneofs}
        if chance.random() < 0.5 and isinstance(message, warm_pb2.PrefetchBlocksRequest):
            # Without an existing key space nearly all would be refused for that.
            message.key_space_id = 1
            message.groups.add(hashes=self.packed("hashes"))
            return
        for described in message.DESCRIPTOR.fields:
            name, is_message = described.name, described.message_type is not None
            if chance.random() < 0.15 or (described.containing_oneof and name not in chosen):
                continue
            if name == "filters":
                for key in chance.sample(FILTERS, chance.choice((0, 1, 1, 2))):
                    value = chance.choice(("1", "20", "-1", "nan", self.text()))
                    message.filters[key] = value  # type: ignore[attr-defined]
            elif described.is_repeated:
                values: Any = getattr(message, name)
                for _ in range(chance.choice((0, 1, 1, 1, 2, 5))):
                    if not is_message:
                        values.append(self.value(described))
                    elif depth:
                        self.fill(values.add(), depth - 1)
            elif not is_message:
                setattr(message, name, self.value(described))
            elif depth and chance.random() < 0.8:
                child = getattr(message, name)
                child.SetInParent()
                self.fill(child, depth - 1)

    def value(self, described: FieldDescriptor) -> Any:
        chance, name, kind = self.random, described.name, described.type
        if kind == FieldDescriptor.TYPE_BYTES:
            return self.packed(name)
        if name == "topic" and chance.random() < 0.9:
            return chance.choice(TOPICS)
        if name == "kv_hints" and chance.random() < 0.9:
            return ENVELOPE
        if kind == FieldDescriptor.TYPE_STRING:
            is_own = name == "session_id" and chance.random() < 0.9
            return self.session_id if is_own else self.text()
        if kind == FieldDescriptor.TYPE_BOOL:
            return chance.random() < 0.5
        if kind in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
            return chance.choice(ODD_FLOATS)
        if kind == FieldDescriptor.TYPE_ENUM:
            return chance.choice([value.number for value in described.enum_type.values])
        if name in ("group_index", "key_space_id") and chance.random() < 0.8:
            return chance.choice((0, 1))
        return 0 if name == "fence_index" else chance.choice(ODD_NUMBERS)

    def packed(self, name: str) -> bytes:
        chance, count = self.random, self.random.choice((0, 1, 2, 3, 8, 20))
        if "hash" in name:
            known = [chance.random() < 0.8 for _ in range(count)]
            return b"".join(chance.choice(HASHES) if k else chance.randbytes(32) for k in known)
        if "ids" in name or "positions" in name:
            places = (*range(count + 1), NUM_BLOCKS, -1)
            return np.array([chance.choice(places) for _ in range(count)], np.int32).tobytes()
        return chance.randbytes(chance.choice((0, 1, 4, 32, 100, 4096)))

    def text(self) -> str:
        return self.random.choice(TEXTS)

    def mutated(self, data: bytes) -> bytes:
        chance = self.random
        if chance.random() < 0.4 or not data:
            return data
        changed = bytearray(data)
        for _ in range(chance.choice((1, 1, 2, 4, 16))):
            at = chance.randrange(len(changed)) if changed else 0
            what = chance.random()
            if what < 0.4 and changed:
                changed[at] ^= 1 << chance.randrange(8)
            elif what < 0.6:
                changed[at:at] = chance.randbytes(chance.choice((1, 2, 8)))
            elif what < 0.75:
                del changed[at : at + chance.choice((1, 2, 8, 100))]
            elif what < 0.9:
                other = chance.randrange(len(changed) + 1)
                changed[at:at] = changed[other : other + chance.choice((2, 10, 50))]
            elif changed:
                changed[at] = chance.choice((0, 0xFF, 0x7F, 0x80))
        return bytes(changed)


class Fuzzer:
    """The bystander, a well-behaved client, must keep its blocks."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server, self.seed, self.tally = server, seed, Tally()
        self.bystander, self.victim = (
            self.engine("fuzz", "bystander"),
            self.engine("fuzzed", "victim"),
        )
        dice = np.random.default_rng(seed)
        self.bystander.kv[:] = dice.integers(0, 256, self.bystander.kv.shape, np.uint8)
        self.content = self.bystander.kv[:, :20].copy()
        self.victim.kv[:] = 7
        self.own = [os.urandom(32) for _ in range(20)]
        self.keep()
        self.channel = grpc.insecure_channel(server.target)
        path = Path(server.target.removeprefix("unix:")).with_name("admin.sock")
        self.admin_channel = grpc.insecure_channel(f"unix:{path}")
        self.odd = Odd(seed, self.session_id(self.victim))
        clients = OddClients(server.target, random.Random(seed), self.tally.note)
        self.kinds = [*clients.kinds().items()]
        self.rounds = 0
        self.first = self.most = self.last = Footprint(server.pid)

    def engine(self, model: str, name: str) -> PagedEngine:
        target, sizes = self.server.target, {"layers": 2, "num_blocks": NUM_BLOCKS}
        made = PagedEngine(target, model=model, engine_id=name, page_bytes=4096, **sizes)  # type: ignore[arg-type]
        return made.connect()

    @staticmethod
    def session_id(engine: PagedEngine) -> str:
        connection = engine.session._connection
        assert connection is not None
        return connection.session_id

    def keep(self) -> None:
        run = BlockRun(0, self.own, np.arange(20, dtype=np.int32))
        name = os.urandom(8).hex()
        self.bystander.session.store(name, name, [run], 20).result(60)

    def look(self) -> None:
        assert self.server._child.process.poll() is None, "the server has ended"
        session, kv = self.bystander.session, self.bystander.kv
        session.ping(PING_DEADLINE_S)
        self.keep()
        kv[:, 30:50] = 0
        name, ids = os.urandom(8).hex(), np.arange(20, dtype=np.int32)
        assert session.acquire(name, [GroupHashes(0, self.own)]).result(60).pinned[0].all()
        session.load(name, name, [LoadRun(0, ids, ids + np.int32(30))], 20).result(20)
        session.release(name)
        assert np.array_equal(kv[:, 30:50], self.content), "a bystander's block has other bytes"
        log = self.server.log.read_text()
        assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:4000]
        assert self.victim.session.connected or self.victim.session.wait_connected(20)
        self.odd.session_id = self.session_id(self.victim)

    def check_footprint(self) -> None:
        deadline_s = time.monotonic() + SETTLE_S
        while left := self.left_behind():
            assert time.monotonic() < deadline_s, f"{SETTLE_S} s after its end: {left}"
            time.sleep(0.02)

    def left_behind(self) -> str:
        """What the server has not yet released after a round; empty if all."""
        with AdminClient(self.server.target) as admin:
            engines = {session["engine_id"] for session in admin.sessions()}
            num_transfers = admin.info()["counters"]["transfers_in_flight"]
        others = engines - {"bystander", "victim"}
        self.last = now = Footprint(self.server.pid)
        self.most = max(self.most, now, key=lambda footprint: footprint.anonymous_bytes)
        if others or num_transfers:
            return f"{num_transfers} transfers and the sessions {others}"
        has_grown = now.num_fds > self.first.num_fds + MORE_DESCRIPTORS
        has_grown |= now.anonymous_bytes > self.first.anonymous_bytes + MORE_BYTES
        return f"{now}, after {self.first} at first" if has_grown else ""

    def calls(self, count: int) -> None:
        """Random calls; of streamed answers only the first message is read."""
        kinds = UNARY | SERVER_STREAMS
        for _ in range(count):
            name = self.odd.random.choice(sorted(kinds))
            is_admin = name.startswith(("Admin", "Event", "WarmStart"))
            channel = self.admin_channel if is_admin else self.channel
            package = "grpc.health.v1" if name == "Health/Watch" else "hotkv.v1"
            path, message = f"/{package}.{name}", self.odd.message(kinds[name])
            try:
                if name in SERVER_STREAMS:
                    call = channel.unary_stream(path)(message, timeout=PING_DEADLINE_S)
                    next(call)
                    call.cancel()
                else:
                    channel.unary_unary(path)(message, timeout=PING_DEADLINE_S)
                self.tally.note(name, "answered")
            except grpc.RpcError as error:
                self.tally.note(name, code_of(error))

    def stream(self, method: str, kind: type[Message], first: list[bytes]) -> None:
        """The server may leave some messages behind `first` unanswered, or end the stream."""
        waiting: queue.Queue[bytes | None] = queue.Queue()
        free, broken = threading.Semaphore(IN_FLIGHT), list[str]()
        name = method.rpartition("/")[2]

        def requests() -> Iterator[bytes]:
            yield from first
            yield from iter(waiting.get, None)

        def read() -> None:
            try:
                for answer in call:
                    self.count_answer(name, answer)
                    free.release()
            except grpc.RpcError as error:
                code = error.code().name
                self.tally.answers[name][f"stream {code}"] += 1
                if code in BAD_CODES:
                    broken.append(f"{name}: {error}")

        call = self.channel.stream_stream(method)(requests(), timeout=60)
        reader = threading.Thread(target=read)
        reader.start()
        for _ in range(STREAM_MESSAGES):
            # The server does not answer every message.
            free.acquire(timeout=0.002)
            if not call.is_active():
                break
            waiting.put(self.odd.message(kind))
            self.tally.sent[name] += 1
        waiting.put(None)
        reader.join(60)
        call.cancel()
        assert not broken, broken[0]

    def count_answer(self, name: str, answer: bytes) -> None:
        is_session = name == "Connect"
        kind: Any = session_pb2.ConnectResponse if is_session else sparse_pb2.SelectBlocksResponse
        self.tally.answers[name][word_of(kind.FromString(answer))] += 1

    def round(self) -> None:
        self.calls(300)
        opening = _wire.open_session(self.victim.session.config).SerializeToString()
        self.stream("/hotkv.v1.SessionService/Connect", session_pb2.ConnectRequest, [opening])
        if self.odd.random.random() < 0.2:
            self.stream("/hotkv.v1.SessionService/Connect", session_pb2.ConnectRequest, [])
        self.stream("/hotkv.v1.SparseService/SelectBlocks", sparse_pb2.SelectBlocksRequest, [])
        name, do = self.kinds[self.rounds % len(self.kinds)]
        self.rounds += 1
        try:
            do()
        except BaseException as error:
            error.add_note(f"while odd clients did: {name}")
            raise

    def close(self) -> None:
        for one in (self.bystander, self.victim, self.channel, self.admin_channel):
            one.close()


def spoil(data: bytes, chance: random.Random) -> bytes:
    changed = np.frombuffer(data, np.uint8).copy()
    for _ in range(chance.choice((1, 1, 3, 10))):
        at, count = chance.randrange(len(changed)), chance.choice((1, 1, 4, 8))
        changed[at : at + count] = chance.choice((0, 255, chance.randrange(256)))
    return changed.tobytes()[: len(changed) - chance.choice((0, 0, 0, 1, 7, len(changed) // 2))]


class FileFuzzer:
    def __init__(self, folder: Path, seed: int, tally: Tally) -> None:
        from tests.core import old_tables as cases

        self.chance, self.tally = random.Random(seed), tally
        self.folder, self.path = folder, folder / "file"
        self.geometry = cases.filled().space.index.table.geometry
        self.header = self.geometry.pack()
        space = KnownKeySpace(1, cases.KEY_SPACE, (cases.KIND,))
        write_state(self.path, ServerState(1 << 16, (space,)))
        self.state = self.path.read_bytes()
        self.use = b"HOTKVUS1" + np.array([1, 0, 41], np.int64).tobytes() + bytes(4 * 41)

    def each(self) -> dict[str, Callable[[], None]]:
        return {
            "table header": self.try_header,
            "state.json": self.try_state,
            "use": self.try_use,
        }

    def run(self, name: str) -> None:
        """A reader must accept the file, or raise StateError or ValueError."""
        try:
            self.each()[name]()
            self.tally.note(name, "read")
        except (StateError, ValueError) as error:
            self.tally.note(name, f"refused: {type(error).__name__}")

    def try_header(self) -> None:
        file_bytes = self.chance.choice((0, 4096, 1 << 20, 1 << 30))
        TableGeometry.unpack(spoil(self.header, self.chance), file_bytes)

    def try_state(self) -> None:
        self.path.write_bytes(spoil(self.state, self.chance))
        read_state(self.path)

    def try_use(self) -> None:
        (self.folder / USE_FILE).write_bytes(spoil(self.use, self.chance))
        _read_use(self.folder / USE_FILE, self.geometry)


FLAGS = (
    *constant("startup.access.MALFORMED_PER_S", 10**6),
    *("--tiers.disk.bytes", "16MiB"),
)


def fuzz(inputs: int, seed: int, *, say: Callable[[str], None] = lambda _: None) -> Tally:
    """A tenth of the inputs are files. Raises AssertionError at the first violation."""
    with (
        runtime_folder(128 << 20) as folder,
        Server(
            folder, "16MiB", *FLAGS, "--tiers.disk.path", f"{folder}/disk", command=COMMAND
        ) as server,
    ):
        server.wait_ready()
        fuzzer = Fuzzer(server, seed)
        tally, began_s = fuzzer.tally, time.monotonic()
        try:
            while tally.inputs < inputs * 0.9:
                fuzzer.round()
                fuzzer.look()
                fuzzer.check_footprint()
                took_s = time.monotonic() - began_s
                say(f"{tally.inputs} inputs, {took_s:.0f} s, {fuzzer.last}, most {fuzzer.most}")
        finally:
            fuzzer.close()
        tally.footprints = f"{fuzzer.first} at first, {fuzzer.most} at most, {fuzzer.last} at last"
    with tempfile.TemporaryDirectory() as name:
        files = FileFuzzer(Path(name), seed, tally)
        while tally.inputs < inputs:
            for target in files.each():
                files.run(target)
    return tally


def main() -> int:
    options = argparse.ArgumentParser(description="Fuzzes every call and every file.")
    options.add_argument("--inputs", type=int, default=1_000_000)
    options.add_argument("--seed", type=int, default=int(time.time()))
    chosen = options.parse_args()
    print(f"seed {chosen.seed}", flush=True)
    began_s, last_s = time.monotonic(), [0.0]

    def say(text: str) -> None:
        if time.monotonic() - last_s[0] > 60:
            last_s[0] = time.monotonic()
            print(text, flush=True)

    tally = fuzz(chosen.inputs, chosen.seed, say=say)
    for name, count, answers in tally.rows():
        print(f"{name:34} {count:8}  {answers}")
    print(f"{'all':34} {tally.inputs:8}  in {time.monotonic() - began_s:.0f} s; {tally.footprints}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
