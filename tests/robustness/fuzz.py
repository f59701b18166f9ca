"""Fuzzing: sends odd, mutated and meaningless messages to every call of the server, and gives
mutated files to its readers.

A real server process gets messages over its socket. They are made from their descriptors, with
hashes, ids and positions that exist, and most are then mutated byte by byte. Other clients
misbehave below messages (`odd_sessions`, `odd_connections`). The server answers each with a
response or a canonical refusal, never INTERNAL. It stays alive and quick and logs no traceback, and
a bystander's blocks come back byte for byte. After each round its sessions and transfers have
ended, and memory and descriptors of the server stay bounded. Files (block table, state, times of
last use) are mutated and read in this process: whatever they contain, the restored cache is
consistent.

`python -m tests.robustness.fuzz --inputs 1000000 --seed 1` prints how often each message was sent
and how it was answered.
"""

import argparse
import collections
import json
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
from hotkv_client.testing import PagedEngine
from hotkv_client.wire import requests as _wire
from hotkv_proto.errors import HotKVError
from hotkv_proto.table import TableGeometry
from hotkv_proto.v1 import errors_pb2, session_pb2, sparse_pb2
from hotkv_server.cache.restore import restore
from hotkv_server.memory.arena import USE_FILE, _read_use
from hotkv_server.memory.state import (
    KnownKeySpace,
    ServerState,
    StateError,
    read_state,
    write_state,
)
from tests.robustness.odd_calls import UNARY, odd_envelope
from tests.robustness.odd_connections import OddConnections
from tests.robustness.odd_place import Place
from tests.robustness.odd_sessions import OddSessions
from tests.robustness.raw_client import Footprint
from tests.server.support import http_port

NUM_BLOCKS = 64
HASHES = [random.Random(number).randbytes(32) for number in range(48)]
STREAM_MESSAGES = 300
IN_FLIGHT = 32
PING_DEADLINE_S = 10.0
SETTLE_S = 30.0
"""The server has dropped everything of a client this long after the client's end."""
KINDS_OF_ROUND = 2
"""Kinds of odd clients in a round; after five rounds each had its turn."""
MORE_DESCRIPTORS, MORE_BYTES = 64, 96 << 20
"""Growth allowed to the server when a round's clients are gone: key spaces (`MAX_WEIGHT_BYTES`,
32 MiB), free heap that is not given back yet (`FREE_BYTES`, 32 MiB), and as much again for what is
loaded at first use and for the allocators of Python and gRPC. A leak of 100 bytes for each input
breaks it within a million."""
ODD_NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    16,
    63,
    64,
    255,
    256,
    1 << 14,
    (1 << 31) - 1,
    -1,
    -2,
    -(1 << 31),
    1 << 18,
)


@dataclass
class Tally:
    """How often each message was sent, and how it was answered."""

    sent: "collections.Counter[str]" = field(default_factory=collections.Counter)
    answers: "collections.defaultdict[str, collections.Counter[str]]" = field(
        default_factory=lambda: collections.defaultdict(collections.Counter)
    )
    footprints: str = ""
    """Of the server: at first, at most, and after the last round."""

    @property
    def inputs(self) -> int:
        return self.sent.total()

    def note(self, name: str, answer: str) -> None:
        """Notes one input and its answer."""
        self.sent[name] += 1
        self.answers[name][answer] += 1

    def rows(self) -> list[tuple[str, int, str]]:
        return [
            (
                name,
                count,
                ", ".join(f"{answer} {n}" for answer, n in self.answers[name].most_common(6)),
            )
            for name, count in sorted(self.sent.items())
        ]


TOPICS = (
    "", "server", "tiers", "key_spaces", "sessions", "blocks", "residencies", "hints", "savings",
    "sparse_layers",
)  # fmt: skip


class Odd:
    """Makes messages: mostly sensible fields, some of them not; then perhaps other bytes."""

    def __init__(self, seed: int, session_id: str) -> None:
        self.random = random.Random(seed)
        self.session_id = session_id

    def message(self, kind: type[Message]) -> bytes:
        """Bytes that may be a message of this kind."""
        made = kind()
        self.fill(made, 3)
        return self.mutated(made.SerializeToString())

    def fill(self, message: Message, depth: int) -> None:
        chosen = {self.random.choice(one.fields).name for one in message.DESCRIPTOR.oneofs}
        for described in message.DESCRIPTOR.fields:
            if self.random.random() < 0.15 or (
                described.containing_oneof is not None and described.name not in chosen
            ):
                continue
            if described.name == "filters":
                names = ("page_size", "page_token", "key_space_id", "since_s", "session_id", "odd")
                for name in self.random.sample(names, self.random.choice((0, 1, 1, 2))):
                    value = self.random.choice(("1", "20", "-1", "nan", self.text()))
                    message.filters[name] = value  # type: ignore[attr-defined]
            elif described.is_repeated:
                values: Any = getattr(message, described.name)
                for _ in range(self.random.choice((0, 1, 1, 1, 2, 5))):
                    if described.message_type is not None:
                        if depth:
                            self.fill(values.add(), depth - 1)
                    else:
                        values.append(self.value(described))
            elif described.message_type is not None:
                if depth and self.random.random() < 0.8:
                    child = getattr(message, described.name)
                    child.SetInParent()
                    self.fill(child, depth - 1)
            else:
                setattr(message, described.name, self.value(described))

    def value(self, described: FieldDescriptor) -> Any:
        chance, name = self.random, described.name
        if described.type == FieldDescriptor.TYPE_BYTES:
            return self.packed(name)
        if name == "topic" and chance.random() < 0.9:
            return chance.choice(TOPICS)
        if name == "kv_hints":
            return odd_envelope(chance) if chance.random() < 0.9 else self.text()
        if described.type == FieldDescriptor.TYPE_STRING:
            return (
                self.session_id if name == "session_id" and chance.random() < 0.9 else self.text()
            )
        if described.type == FieldDescriptor.TYPE_BOOL:
            return chance.random() < 0.5
        if described.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
            return chance.choice((0.0, 0.1, 1.0, -1.0, float("inf"), float("nan"), 1e300, 256.0))
        if described.type == FieldDescriptor.TYPE_ENUM:
            return chance.choice([value.number for value in described.enum_type.values])
        if name in ("group_index", "key_space_id") and chance.random() < 0.8:
            return chance.choice((0, 1))
        if name == "fence_index":
            return 0
        number = chance.choice(ODD_NUMBERS)
        return (
            number
            if described.type in (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_SINT64)
            else max(-(1 << 31), min(number, (1 << 31) - 1))
        )

    def packed(self, name: str) -> bytes:
        chance, count = self.random, self.random.choice((0, 1, 2, 3, 8, 20))
        if "hash" in name:
            return b"".join(
                chance.choice(HASHES) if chance.random() < 0.8 else chance.randbytes(32)
                for _ in range(count)
            )
        if "ids" in name or "positions" in name:
            return np.array(
                [chance.choice((*range(count + 1), NUM_BLOCKS, -1)) for _ in range(count)], np.int32
            ).tobytes()
        return chance.randbytes(chance.choice((0, 1, 4, 32, 100, 4096)))

    def text(self) -> str:
        return self.random.choice(
            (
                "",
                "a",
                "b",
                "c",
                "l1",
                "rot2u",
                "x" * 300,
                "y" * 20_000,
                "\u2603",
                "../../etc/passwd",
                "unix:/tmp/x",
                "\x00",
                "%s%n",
            )
        )

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


def _as_is(message: bytes) -> bytes:
    return message


class Fuzzer:
    """Fuzzes one server; a bystander's blocks must not change."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.tally = Tally()
        self.seed = seed
        sizes = {"layers": 2, "num_blocks": NUM_BLOCKS, "page_bytes": 4096}
        self.bystander = PagedEngine(
            server.target, model="fuzz", engine_id="bystander", **sizes
        ).connect()  # type: ignore[arg-type]
        self.bystander.kv[:] = np.random.default_rng(seed).integers(
            0, 256, self.bystander.kv.shape, np.uint8
        )
        self.content = self.bystander.kv[:, :20].copy()
        self.victim = PagedEngine(
            server.target, model="fuzzed", engine_id="victim", **sizes
        ).connect()  # type: ignore[arg-type]
        self.victim.kv[:] = 7
        self.own = [os.urandom(32) for _ in range(20)]
        self.keep()
        self.channel = grpc.insecure_channel(server.target)
        admin = Path(server.target.removeprefix("unix:")).with_name("admin.sock")
        self.admin_channel = grpc.insecure_channel(f"unix:{admin}")
        self.odd = Odd(seed, self.session_id(self.victim))
        place = Place(
            server.target,
            f"unix:{admin}",
            http_port(server),
            random.Random(seed),
            self.tally.note,
            self.look,
        )
        self.kinds = [*OddSessions(place).kinds().items(), *OddConnections(place).kinds().items()]
        self.rounds = 0
        self.first = self.most = self.last = Footprint(server.pid)

    @staticmethod
    def session_id(engine: PagedEngine) -> str:
        connection = engine.session._connection
        assert connection is not None
        return connection.session_id

    def keep(self) -> None:
        """Stores the bystander's blocks unless they are there."""
        run = BlockRun(0, self.own, np.arange(20, dtype=np.int32))
        name = os.urandom(8).hex()
        self.bystander.session.store(name, name, [run], 20).result(60)

    def look(self) -> None:
        """Raises AssertionError if the server is dead, slow or wrong."""
        assert self.server._child.process.poll() is None, "the server has ended"
        self.bystander.session.ping(PING_DEADLINE_S)
        self.keep()
        self.bystander.kv[:, 30:50] = 0
        name, ids = os.urandom(8).hex(), np.arange(20, dtype=np.int32)
        assert (
            self.bystander.session.acquire(name, [GroupHashes(0, self.own)])
            .result(60)
            .pinned[0]
            .all()
        )
        self.bystander.session.load(name, name, [LoadRun(0, ids, ids + np.int32(30))], 20).result(
            20
        )
        self.bystander.session.release(name)
        assert np.array_equal(self.bystander.kv[:, 30:50], self.content), (
            "a bystander's block came back with other bytes"
        )
        log = self.server.log.read_text()
        assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:4000]
        if not self.victim.session.connected:
            assert self.victim.session.wait_connected(20)
        self.odd.session_id = self.session_id(self.victim)

    def check_footprint(self) -> None:
        """Raises AssertionError if sessions or transfers of the round remain, or the server has
        grown beyond its bounds."""
        deadline_s = time.monotonic() + SETTLE_S
        while left := self.left_behind():
            assert time.monotonic() < deadline_s, (
                f"{SETTLE_S} s after its end a round has left {left}"
            )
            time.sleep(0.02)

    def left_behind(self) -> str:
        """Returns what remains of the odd clients, or "" if nothing does."""
        with AdminClient(self.server.target) as admin:
            others = [
                session["engine_id"]
                for session in admin.sessions()
                if session["engine_id"] not in ("bystander", "victim")
            ]
            num_transfers = admin.info()["counters"]["transfers_in_flight"]
        self.last = now = Footprint(self.server.pid)
        self.most = max(self.most, now, key=lambda footprint: footprint.anonymous_bytes)
        if others or num_transfers:
            return f"{num_transfers} transfers and the sessions {others}"
        if (
            now.num_fds > self.first.num_fds + MORE_DESCRIPTORS
            or now.anonymous_bytes > self.first.anonymous_bytes + MORE_BYTES
        ):
            return f"{now}, after {self.first} at first"
        return ""

    def unary(self, count: int) -> None:
        """Makes so many calls of random methods."""
        names = sorted(UNARY)
        for _ in range(count):
            name = self.odd.random.choice(names)
            channel = self.admin_channel if name.startswith("Admin") else self.channel
            call = channel.unary_unary(
                f"/hotkv.v1.{name}", request_serializer=_as_is, response_deserializer=_as_is
            )
            self.tally.sent[name] += 1
            try:
                call(self.odd.message(UNARY[name]), timeout=PING_DEADLINE_S)
                self.tally.answers[name]["answered"] += 1
            except grpc.RpcError as error:
                code = error.code().name
                self.tally.answers[name][code] += 1
                assert code not in ("INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED"), f"{name}: {error}"

    def stream(self, method: str, kind: type[Message], first: list[bytes]) -> None:
        """Sends one stream of messages. The server may leave some unanswered, or end the stream."""
        waiting: queue.Queue[bytes | None] = queue.Queue()
        free = threading.Semaphore(IN_FLIGHT)
        name = method.rpartition("/")[2]

        def requests() -> Iterator[bytes]:
            yield from first
            while (message := waiting.get()) is not None:
                yield message

        def read() -> None:
            try:
                for answer in call:
                    self.count_answer(name, answer)
                    free.release()
            except grpc.RpcError as error:
                code = error.code().name
                self.tally.answers[name][f"stream {code}"] += 1
                if code in ("INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED"):
                    broken.append(f"{name}: {error}")

        broken: list[str] = []
        call = self.channel.stream_stream(
            method, request_serializer=_as_is, response_deserializer=_as_is
        )(requests(), timeout=60)
        reader = threading.Thread(target=read)
        reader.start()
        for _ in range(STREAM_MESSAGES):
            # Reports, and messages without a request, have no answer.
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
        error: errors_pb2.ErrorDetail | None = None
        if name == "Connect":
            connected = session_pb2.ConnectResponse.FromString(answer)
            error = connected.error if connected.WhichOneof("body") == "error" else None
        else:
            selected = sparse_pb2.SelectBlocksResponse.FromString(answer)
            error = selected.error if selected.HasField("error") else None
        reason = (
            "answered"
            if error is None
            else errors_pb2.ErrorReason.Name(error.reason).removeprefix("ERROR_REASON_")
        )
        self.tally.answers[name][reason] += 1
        assert reason != "INTERNAL", error

    def round(self) -> None:
        """Makes calls and streams of each kind, then two kinds of odd clients."""
        self.unary(300)
        opening = _wire.open_session(self.victim.session.config).SerializeToString()
        self.stream("/hotkv.v1.SessionService/Connect", session_pb2.ConnectRequest, [opening])
        if self.odd.random.random() < 0.2:
            self.stream("/hotkv.v1.SessionService/Connect", session_pb2.ConnectRequest, [])
        self.stream("/hotkv.v1.SparseService/SelectBlocks", sparse_pb2.SelectBlocksRequest, [])
        for _ in range(KINDS_OF_ROUND):
            name, do = self.kinds[self.rounds % len(self.kinds)]
            self.rounds += 1
            try:
                do()
            except BaseException as error:
                error.add_note(f"while odd clients did: {name}")
                raise

    def close(self) -> None:
        self.bystander.close()
        self.victim.close()
        self.channel.close()
        self.admin_channel.close()


def spoil(data: bytes, chance: random.Random) -> bytes:
    """Changes bytes in some places, or the length."""
    changed = np.frombuffer(data, np.uint8).copy()
    for _ in range(chance.choice((1, 1, 3, 10))):
        at = chance.randrange(len(changed))
        changed[at : at + chance.choice((1, 1, 4, 8))] = chance.choice(
            (0, 255, chance.randrange(256))
        )
    return changed.tobytes()[: len(changed) - chance.choice((0, 0, 0, 1, 7, len(changed) // 2))]


class FileFuzzer:
    """Mutates the files that a server reads at start."""

    def __init__(self, folder: Path, seed: int, tally: Tally) -> None:
        from tests.core import old_tables as cases

        self.chance, self.tally, self.cases = random.Random(seed), tally, cases
        self.path = folder / "file"
        self.folder = folder
        core = cases.filled()
        self.records = core.space.index.table.records.copy()
        self.header = core.space.index.table.geometry.pack()
        write_state(
            self.path, ServerState(1 << 16, (KnownKeySpace(1, cases.KEY_SPACE, (cases.KIND,)),))
        )
        self.state = self.path.read_bytes()
        self.use = (
            b"HOTKVUS1"
            + np.array([1, 0], np.int64).tobytes()
            + np.array([41], np.int64).tobytes()
            + bytes(4 * 41)
        )
        self.geometry = core.space.index.table.geometry

    def each(self) -> dict[str, Callable[[], None]]:
        return {
            "table header": self.try_header,
            "table records": self.try_records,
            "state.json": self.try_state,
            "use": self.try_use,
        }

    def run(self, name: str) -> None:
        """Reads one mutated file. Raises anything but a refusal."""
        self.tally.sent[name] += 1
        try:
            self.each()[name]()
            self.tally.answers[name]["read"] += 1
        except (StateError, ValueError) as error:
            self.tally.answers[name][f"refused: {type(error).__name__}"] += 1

    def try_header(self) -> None:
        TableGeometry.unpack(
            spoil(self.header, self.chance), self.chance.choice((0, 4096, 1 << 20, 1 << 30))
        )

    def try_state(self) -> None:
        self.path.write_bytes(spoil(self.state, self.chance))
        read_state(self.path)

    def try_use(self) -> None:
        (self.folder / USE_FILE).write_bytes(spoil(self.use, self.chance))
        _read_use(self.folder / USE_FILE, self.geometry)

    def try_records(self) -> None:
        records = np.frombuffer(
            spoil(self.records.tobytes(), self.chance).ljust(self.records.nbytes, b"\0"), np.uint32
        )
        core = self.cases.empty()
        try:
            restore(core, records.reshape(self.records.shape).copy(), {1: 1}, None, 5.0)
        except HotKVError as error:
            raise AssertionError(f"restore refused: {error}") from error
        core.check_invariants()


FLAGS = ("--arena.slab-bytes", "64KiB", "--security.malformed-per-s", "1000000")


def fuzz(inputs: int, seed: int, *, say: Callable[[str], None] = lambda _: None) -> Tally:
    """Sends so many inputs, a tenth of them files. Raises AssertionError at the first violation."""
    with runtime_folder(128 << 20) as folder, Server(folder, "16MiB", *FLAGS) as server:
        server.wait_ready()
        fuzzer = Fuzzer(server, seed)
        began_s = time.monotonic()
        try:
            while fuzzer.tally.inputs < inputs * 0.9:
                fuzzer.round()
                fuzzer.look()
                fuzzer.check_footprint()
                say(
                    f"{fuzzer.tally.inputs} inputs, {time.monotonic() - began_s:.0f} s, "
                    f"{fuzzer.last}, at most {fuzzer.most}"
                )
        finally:
            fuzzer.close()
        tally = fuzzer.tally
        tally.footprints = f"{fuzzer.first} at first, {fuzzer.most} at most, {fuzzer.last} at last"
    with tempfile.TemporaryDirectory() as name:
        files = FileFuzzer(Path(name), seed, tally)
        while tally.inputs < inputs:
            for target in files.each():
                files.run(target)
    return tally


def main() -> int:
    """Runs the command."""
    options = argparse.ArgumentParser(description="Fuzzes every call and every file.")
    options.add_argument("--inputs", type=int, default=1_000_000)
    options.add_argument("--seed", type=int, default=int(time.time()))
    options.add_argument("--json", action="store_true", help="print one JSON object last")
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
    if chosen.json:
        print(json.dumps({"inputs": tally.inputs, "sent": tally.sent, "answers": tally.answers}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
