"""Odd clients that send whole messages: they repeat, amplify, reuse ids, and open and drop sessions
in numbers.

What each kind did is counted under `KIND: what`; when it returns, its sessions are ended.
"""

import contextlib
import mmap
import os
from dataclasses import replace

import grpc
import numpy as np

from hotkv_client import BlockRun, GroupHashes, LoadRun, Role, SessionConfig
from hotkv_client.wire import requests as _wire
from hotkv_client.wire import sparse as _sparse_wire
from hotkv_proto.blocks import NO_OPTIONS, Retention, StoreOptions
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace, Representation
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor
from hotkv_proto.order import NO_ORDER
from hotkv_proto.v1 import cache_pb2, session_pb2, sparse_pb2, sparse_pb2_grpc
from tests.robustness.odd_place import INT32, NUM_BLOCKS, SMALL_WINDOW, Kinds, Place, memory_file
from tests.robustness.raw_client import DEADLINE_S, RawSession, name_of
from tests.server.sparse_support import HEAD_SIZE, KV_HEADS, QUERY_HEADS, RepresentationEngine

NAMES = ("a", "b", "c")
"""Few, so that ids come again."""
NUM_KEY_SPACES = 40
"""The server keeps each for ten minutes and longer, and explains a prompt in all of them. With
hundreds, that would take most of a run's time."""
ODD_SIZES = (0, 1, 2, 7, 64, 4096, 8192, -1, (1 << 31) - 1, 1 << 47, 1 << 62)


class OddSessions:
    """See the module."""

    def __init__(self, place: Place) -> None:
        self._place, self._chance = place, place.chance

    def kinds(self) -> Kinds:
        return {
            "repeats": self.repeats,
            "layouts": self.layouts,
            "ids again": self.ids_again,
            "key spaces": self.key_spaces,
            "sequences": self.sequences,
        }

    def repeats(self) -> None:
        """Sends loads that name places twice or very often, stores that list hashes twice, and
        leases that list a group twice."""
        with self._place.working("repeats") as (session, blocks):
            for _ in range(40):
                what = self._chance.choice(
                    ("positions", "runs", "many", "block ids", "hashes", "groups")
                )
                self._place.note(f"repeats: {what}", session.ask(self._repeating(what, blocks))[0])

    def _repeating(self, what: str, blocks: list[bytes]) -> session_pb2.ConnectRequest:
        chance, name = self._chance, self._chance.randbytes(4).hex()
        places = [chance.randrange(16) for _ in range(chance.choice((2, 3, 40)))]
        match what:
            case "groups":
                return _wire.acquire(
                    name, [GroupHashes(0, blocks)] * chance.choice((1, 2, 1025)), 0, 32
                )
            case "hashes":
                twice = [
                    chance.choice(blocks) if chance.random() < 0.5 else chance.randbytes(32)
                    for _ in range(8)
                ] * 2
                return _wire.store(
                    name,
                    name,
                    [BlockRun(0, twice, np.arange(16, dtype=INT32))] * chance.choice((1, 3)),
                    20,
                    NO_OPTIONS,
                    0,
                    32,
                )
            case "many":
                positions = [np.zeros(chance.choice((1 << 17, (1 << 17) + 1, 5000)), INT32)]
            case "runs":
                positions = [np.array([place], INT32) for place in places * chance.choice((1, 30))]
            case "block ids":
                # Each block once, into few places.
                positions = [np.array(sorted(set(places)), INT32)]
            case _:
                positions = [np.array(places, INT32)]
        ids = [
            np.array([chance.randrange(NUM_BLOCKS) for _ in p], INT32) if len(p) < 5000 else p
            for p in positions
        ]
        return _wire.load(
            name, "lease", [LoadRun(0, p, i) for p, i in zip(positions, ids, strict=True)], 20
        )

    def layouts(self) -> None:
        """Registers layouts of many runs and of single bytes. Blocks stored through the good ones
        come back unchanged."""
        for _ in range(3):
            what = self._chance.choice(
                (
                    "one-byte runs",
                    "many runs",
                    "transposed",
                    "interleaved",
                    "too many runs",
                    "odd numbers",
                )
            )
            slot_bytes, count = (1 << 19, 2) if "many" in what else (4096, 8)
            layout = self._odd_layout(what, slot_bytes, count)
            num_bytes = (
                layout.handles[0].num_bytes
                if 0 < layout.handles[0].num_bytes <= 1 << 22
                else 1 << 16
            )
            fd = memory_file(num_bytes)
            try:
                with self._place.session(slot_bytes=slot_bytes, model="layouts") as session:
                    assert session.link({"kv": fd}) == "answered"
                    word, _ = session.ask(_wire.register_memory(layout, NO_ORDER))
                    self._place.note(f"layouts: {what}", word)
                    if word == "answered":
                        self._copy_through(session, fd, layout, count)
            finally:
                os.close(fd)

    def _odd_layout(self, what: str, slot_bytes: int, count: int) -> Layout:
        chance, size = self._chance, 2 * count * slot_bytes
        dims: tuple[tuple[int, int], ...]
        match what:
            case "one-byte runs":
                dims, run, stride = ((slot_bytes, 2),), 1, 2 * slot_bytes
            case "many runs":
                dims, run, stride = ((4, slot_bytes // 2), (slot_bytes // 4, 2)), 1, 2 * slot_bytes
            case "too many runs":
                dims, run, stride = ((1024, slot_bytes), (1024, 4)), 1, 2 * slot_bytes
            case "transposed":
                dims, run, stride = (
                    ((64, 64), (slot_bytes // 4096, slot_bytes), (64, 1)),
                    1,
                    2 * slot_bytes,
                )
            case "interleaved":
                dims, run, stride = ((slot_bytes // 16, 16 * 2 * count),), 16, 16
            case _:
                dims = tuple(
                    (chance.choice(ODD_SIZES), chance.choice(ODD_SIZES))
                    for _ in range(chance.randrange(10))
                )
                run, stride, size = (
                    chance.choice(ODD_SIZES),
                    chance.choice(ODD_SIZES),
                    chance.choice((size, *ODD_SIZES)),
                )
        if what == "transposed":
            dims = dims[:1] + dims[2:]
        count = count if what != "odd numbers" else chance.choice((count, *ODD_SIZES))
        tensor = PageTensor(
            0,
            "kv",
            chance.choice((0, 0, 0, *ODD_SIZES)) if what == "odd numbers" else 0,
            stride,
            run,
            0,
            dims,
        )
        return Layout(
            0,
            count,
            (MemoryHandle("kv", size),),
            (tensor,) * (2 if what == "odd numbers" and chance.random() < 0.3 else 1),
            "x",
        )

    def _copy_through(self, session: RawSession, fd: int, layout: Layout, count: int) -> None:
        """Stores half of the blocks, loads them into the other half, and compares; now and then a
        transfer is cancelled."""
        memory = np.frombuffer(mmap.mmap(fd, 0), np.uint8)
        memory[:] = np.frombuffer(self._chance.randbytes(len(memory)), np.uint8)
        (tensor,), half = layout.tensors, count // 2
        places = (
            tensor.base_offset_bytes + tensor.run_offsets()[:, None] + np.arange(tensor.run_bytes)
        )
        blocks, name = (
            [self._chance.randbytes(32) for _ in range(half)],
            self._chance.randbytes(4).hex(),
        )
        ids = np.arange(half, dtype=INT32)
        word, answer = session.ask(
            _wire.store(name, name, [BlockRun(0, blocks, ids)], 20, NO_OPTIONS, 0, 32)
        )
        self._place.note("layouts: store", word)
        if word == "answered" and set(answer.store.runs[0].results) == {1}:
            pinned = (
                self._place.must(session, _wire.acquire(name, [GroupHashes(0, blocks)], 0, 32))
                .acquire_lease.groups[0]
                .flags
            )
            at = np.flatnonzero(np.frombuffer(pinned, np.uint8)).astype(INT32)
            request = _wire.load(name, name, [LoadRun(0, at, at + INT32(half))], 20)
            is_cancelled = self._chance.random() < 0.2
            number = session.put(request)
            if is_cancelled:
                session.put(_wire.cancel(name))
            loaded = session.answers({number})[number]
            self._place.note(
                "layouts: load",
                "cancelled"
                if is_cancelled
                else name_of(loaded.error)
                if loaded.HasField("error")
                else "answered",
            )
            for block in (
                at.tolist()
                if not is_cancelled and loaded.load.status == cache_pb2.TRANSFER_STATUS_DONE
                else ()
            ):
                one, other = (
                    memory[places + b * tensor.block_stride_bytes] for b in (block, block + half)
                )
                assert np.array_equal(one, other), f"other bytes came back through {layout}"

    def ids_again(self) -> None:
        """Reuses a few ids of leases, transfers and sequences for other purposes, many at a
        time."""
        with self._place.working("ids") as (session, _):
            asked: dict[int, str] = {}
            for _ in range(60):
                what = self._chance.choice(
                    (
                        "acquire",
                        "reserve",
                        "store",
                        "load",
                        "release",
                        "cancel",
                        "create",
                        "append",
                        "open residency",
                        "extend residency",
                        "close residency",
                        "delete",
                    )
                )
                asked[session.put(self._again(what))] = what
                if self._chance.random() < 0.2:
                    self._place.collect("ids again", session, asked)
            self._place.collect("ids again", session, asked)

    def _again(self, what: str) -> session_pb2.ConnectRequest:
        chance, name, other = self._chance, self._chance.choice(NAMES), self._chance.choice(NAMES)
        hashes = self._place.hashes(chance.randrange(8))
        ids = np.array([chance.randrange(NUM_BLOCKS) for _ in hashes], INT32)
        run = BlockRun(
            0, hashes, ids, depth=chance.choice((0, 3)), parent_hash=chance.choice((b"", bytes(32)))
        )
        match what:
            case "acquire":
                return _wire.acquire(
                    name,
                    [GroupHashes(0, hashes)],
                    chance.choice((0.0, 0.001, 60.0)),
                    32,
                    wants_offsets=chance.random() < 0.3,
                )
            case "reserve":
                retention = Retention(chance.randrange(-8, 9), 1.0, pin=chance.random() < 0.3)
                return _wire.reserve(
                    name,
                    [replace(run, block_ids=np.empty(0, INT32))],
                    chance.choice((0.0, 0.001)),
                    retention,
                    32,
                )
            case "store":
                return _wire.store(
                    other,
                    name,
                    [run] * chance.choice((1, 1, 2)),
                    chance.choice((0.001, 20.0)),
                    StoreOptions(residency_id=chance.choice(("", name))),
                    0,
                    32,
                )
            case "load":
                positions = np.array(chance.sample(range(8), min(len(hashes), 8)), INT32)
                return _wire.load(
                    other,
                    chance.choice((name, "lease")),
                    [LoadRun(0, positions, ids)],
                    chance.choice((0.001, 20.0)),
                )
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

    def key_spaces(self) -> None:
        """Opens and drops sessions of many key spaces, good and bad."""
        with grpc.insecure_channel(self._place.target, SMALL_WINDOW) as channel:
            for _ in range(40):
                what = self._chance.choice(("plain", "plain", "representations", "odd"))
                session = RawSession(channel, self._place.target, self._opening(what))
                self._place.note(f"key spaces: {what}", session.why_not or "answered")
                if not session.why_not and self._chance.random() < 0.3:
                    # While a request is in flight.
                    session.put(_wire.acquire("l", [GroupHashes(0, [])], 0, 32))
                session.close(abruptly=self._chance.random() < 0.5)

    def _opening(self, what: str) -> session_pb2.ConnectRequest:
        chance, number = self._chance, self._chance.randrange(NUM_KEY_SPACES)
        group = GroupSpec(
            GroupKind.FULL_ATTENTION, 16, (4096 * (1 + number % 3),) * (1 + number % 2)
        )
        window = GroupSpec(GroupKind.SLIDING_WINDOW, 32, group.shard_bytes, 64)
        space = KeySpace(f"space {number}", "w", "bfloat16", (group, window)[: 1 + number % 2], 16)
        kinds = (
            tuple(
                Representation(0, "mean", n, (64,) * space.num_shards)
                for n in range(chance.choice((1, 3)))
            )
            if what != "plain"
            else ()
        )
        opening = _wire.open_session(
            SessionConfig(self._place.target, f"e{number}", Role.TOOL, space, kinds)
        )
        if what != "odd":
            return opening
        message = opening.open_session
        groups = message.key_space.groups
        match chance.randrange(9):
            case 0:
                groups[0].shard_byte_counts[:] = [
                    chance.choice(ODD_SIZES) for _ in range(chance.choice((0, 1, 2, 31, 32)))
                ]
            case 1:
                # As many as there may be in one key space alone, for they are kept.
                for _ in range(255 if number == 0 else 256):
                    groups.add().CopyFrom(groups[0])
            case 2:
                groups[0].block_token_count = chance.choice((0, -1, 17, (1 << 31) - 1))
            case 3:
                message.key_space.hash_byte_count = chance.choice(
                    (0, 7, 8, 31, 33, -1, (1 << 31) - 1)
                )
            case 4:
                message.key_space.model = chance.choice(
                    ("", "x" * 40_000, "a\nERROR forged", "\x1b[2J", "\u2603")
                )
            case 5:
                message.engine_id = chance.choice(("", "x" * 300, "a\nb"))
            case 6:
                for kind in message.representations:
                    kind.shard_byte_counts[:] = [
                        chance.choice(ODD_SIZES) for _ in range(chance.choice((0, 1, 5)))
                    ]
            case 7:
                message.protocol_version, message.newest_protocol_version = (
                    chance.choice((-1, 0, 1, 2, 3, (1 << 31) - 1)) for _ in range(2)
                )
                message.features[:] = [  # type: ignore[assignment]
                    chance.choice((0, 1, -1, 99)) for _ in range(chance.choice((0, 1, 5000)))
                ]
            case _:
                groups[0].kind, groups[0].window_token_count = (
                    chance.choice((0, 3, 5, 99)),
                    chance.choice((0, -1, 24)),
                )  # type: ignore[assignment]
        return opening

    def sequences(self) -> None:
        """Creates many sequences, makes odd selections of them, and leaves half to the end of their
        session."""
        with contextlib.ExitStack() as held:
            engine = self._place.sparse_engine(held)
            names = [f"s{number}" for number in range(20)]
            lengths = {
                name: len(self._place.sequence(engine, name, self._chance.choice((0, 1, 8, 60))))
                for name in names
            }
            channel = held.enter_context(grpc.insecure_channel(self._place.target, SMALL_WINDOW))
            requests = [self._odd_selection(engine, lengths) for _ in range(60)]
            for answer in sparse_pb2_grpc.SparseServiceStub(channel).SelectBlocks(
                iter(requests), timeout=2 * DEADLINE_S
            ):
                self._place.note(
                    "sequences: SelectBlocks",
                    name_of(answer.error) if answer.HasField("error") else "answered",
                )
            for name in names[::2]:
                self._place.note(
                    "sequences: delete",
                    "answered"
                    if engine.session.delete_sequence(name).result(DEADLINE_S)
                    else "unknown",
                )

    def _odd_selection(
        self, engine: RepresentationEngine, lengths: dict[str, int]
    ) -> sparse_pb2.SelectBlocksRequest:
        chance, name = self._chance, self._chance.choice(list(lengths))
        request = self._place.selection(
            engine, name, 16 * lengths[name] + chance.choice((0, 1, 15))
        )
        match chance.randrange(8):
            case 0:
                request.layer_index = chance.choice((-1, 3, 1 << 20))
            case 1:
                request.shard_index = chance.choice((-1, 1, 1 << 20))
            case 2:
                request.context_token_count = chance.choice(
                    (-1, 0, 1, 1 << 20, 1 << 40, (1 << 63) - 1)
                )
            case 3:
                request.query = request.query[
                    : chance.choice((0, 1, 4, 4 * HEAD_SIZE, 4 * KV_HEADS * HEAD_SIZE))
                ]
            case 4:
                request.query = np.full(
                    QUERY_HEADS * HEAD_SIZE, chance.choice((np.nan, np.inf, 1e38, 0)), np.float32
                ).tobytes()
            case 5:
                values = np.array(
                    [
                        chance.choice((0.0, -np.inf, np.inf, np.nan, 1e30))
                        for _ in range(QUERY_HEADS)
                    ],
                    np.float32,
                )
                request.always_log_mass = values.tobytes()[: chance.choice((4 * QUERY_HEADS, 4, 3))]
            case _:
                pass
        return request
