"""Odd clients that send whole messages: they repeat items, amplify, reuse ids, and open and drop
many sessions. Inputs are counted under `KIND: what`. Each kind ends its sessions."""

import contextlib
import mmap
import os
from dataclasses import replace
from typing import Any

import grpc
import numpy as np

from hotkv_client import BlockRun, GroupHashes, LoadRun, Role, SessionConfig
from hotkv_client.wire import requests as _wire
from hotkv_client.wire import sparse as _sparse_wire
from hotkv_proto.blocks import Retention, StoreOptions
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace, Representation
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor
from hotkv_proto.order import NO_ORDER
from hotkv_proto.v1 import cache_pb2, session_pb2, sparse_pb2, sparse_pb2_grpc
from tests.robustness import odd_place
from tests.robustness.odd_place import INT32, NUM_BLOCKS, SMALL_WINDOW, Kinds, Place, memory_file
from tests.robustness.raw_client import DEADLINE_S, RawSession, word_of
from tests.server.sparse_support import HEAD_SIZE, KV_HEADS, QUERY_HEADS, RepresentationEngine

NAMES = ("a", "b", "c")
"""There are only a few names, so that ids are used again."""
NUM_KEY_SPACES = 40
"""The server keeps each key space for at least ten minutes, and `explain` searches a prompt in all
of them. With hundreds of key spaces this would take most of a run's time."""
REPEATS = ("positions", "runs", "many", "block ids", "hashes", "groups")
GOOD_LAYOUTS = ("one-byte runs", "many runs", "transposed", "interleaved")
LAYOUTS = (*GOOD_LAYOUTS, "too many runs", "odd numbers")
OF_LEASES = ("acquire", "reserve", "store", "load", "release", "cancel", "create", "append")
CALLS = (*OF_LEASES, "open residency", "extend residency", "close residency", "delete")
ODD_NAMES = ("", "x" * 40_000, "a\nERROR forged", "\x1b[2J", "\u2603")
ODD_MASSES = (0.0, -np.inf, np.inf, np.nan, 1e30)
ODD_TOKENS = (-1, 0, 1, 1 << 20, 1 << 40, (1 << 63) - 1)
ODD_SIZES = (0, 1, 2, 7, 64, 4096, 8192, -1, (1 << 31) - 1, 1 << 47, 1 << 62)


class OddSessions:
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
        """Sends loads that name positions twice or very often, stores that list hashes twice, and
        leases that list a group twice."""
        with self._place.working("repeats") as (session, blocks):
            for _ in range(40):
                what = self._chance.choice(REPEATS)
                self._place.note(f"repeats: {what}", session.ask(self._repeating(what, blocks))[0])

    def _repeating(self, what: str, blocks: list[bytes]) -> session_pb2.ConnectRequest:
        chance, name = self._chance, self._chance.randbytes(4).hex()
        places = [chance.randrange(16) for _ in range(chance.choice((2, 3, 40)))]
        match what:
            case "groups":
                return odd_place.acquire(name, blocks, chance.choice((1, 2, 1025)))
            case "hashes":
                some = self._some_of(blocks, 8)
                return odd_place.store(name, [odd_place.run_of(some * 2)] * chance.choice((1, 3)))
            case "many":
                positions = [np.zeros(chance.choice((1 << 17, (1 << 17) + 1, 5000)), INT32)]
            case "runs":
                positions = [np.array([place], INT32) for place in places * chance.choice((1, 30))]
            case "block ids":
                # Each block is named once, but many blocks go to the same few places.
                positions = [np.array(sorted(set(places)), INT32)]
            case _:
                positions = [np.array(places, INT32)]
        runs = [LoadRun(0, p, self._ids(len(p)) if len(p) < 5000 else p) for p in positions]
        return _wire.load(name, "lease", runs, 20)

    def _some_of(self, blocks: list[bytes], count: int) -> list[bytes]:
        """Returns hashes; half of them are hashes of these blocks."""
        chance = self._chance
        return [
            chance.choice(blocks) if chance.random() < 0.5 else chance.randbytes(32)
            for _ in range(count)
        ]

    def _ids(self, count: int) -> np.ndarray:
        return np.array([self._chance.randrange(NUM_BLOCKS) for _ in range(count)], INT32)

    def _sizes(self, *counts: int) -> list[int]:
        """Returns a list of odd sizes, whose length is one of the counts."""
        return [self._chance.choice(ODD_SIZES) for _ in range(self._chance.choice(counts))]

    def layouts(self) -> None:
        """Registers layouts with many runs and with single bytes. Blocks stored through the valid
        layouts come back unchanged."""
        for _ in range(3):
            what = self._chance.choice(LAYOUTS)
            slot_bytes, count = (1 << 19, 2) if "many" in what else (4096, 8)
            layout = self._odd_layout(what, slot_bytes, count)
            wanted = layout.handles[0].num_bytes
            fd = memory_file(wanted if 0 < wanted <= 1 << 22 else 1 << 16)
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
        base, run, stride, num_tensors = 0, 1, 2 * slot_bytes, 1
        match what:
            case "one-byte runs":
                dims = ((slot_bytes, 2),)
            case "many runs":
                dims = ((4, slot_bytes // 2), (slot_bytes // 4, 2))
            case "too many runs":
                dims = ((1024, slot_bytes), (1024, 4))
            case "transposed":
                dims = ((64, 64), (64, 1))
            case "interleaved":
                dims, run, stride = ((slot_bytes // 16, 16 * 2 * count),), 16, 16
            case _:
                pairs = range(chance.randrange(10))
                dims = tuple((chance.choice(ODD_SIZES), chance.choice(ODD_SIZES)) for _ in pairs)
                run, stride = self._sizes(2)
                base, size = chance.choice((0, 0, 0, *ODD_SIZES)), chance.choice((size, *ODD_SIZES))
                count, num_tensors = chance.choice((count, *ODD_SIZES)), chance.choice((1, 1, 2))
        tensor = PageTensor(0, "kv", base, stride, run, 0, dims)
        return Layout(0, count, (MemoryHandle("kv", size),), (tensor,) * num_tensors, "x")

    def _copy_through(self, session: RawSession, fd: int, layout: Layout, count: int) -> None:
        """Stores half of the blocks, loads them into the other half, and compares; now and then a
        transfer is cancelled."""
        memory = np.frombuffer(mmap.mmap(fd, 0), np.uint8)
        memory[:] = np.frombuffer(self._chance.randbytes(len(memory)), np.uint8)
        (tensor,), half = layout.tensors, count // 2
        starts = tensor.base_offset_bytes + tensor.run_offsets()
        places = starts[:, None] + np.arange(tensor.run_bytes)
        blocks = [self._chance.randbytes(32) for _ in range(half)]
        name = self._chance.randbytes(4).hex()
        word, answer = session.ask(odd_place.store(name, [odd_place.run_of(blocks)]))
        self._place.note("layouts: store", word)
        if word != "answered" or set(answer.store.runs[0].results) != {1}:
            return
        leased = self._place.must(session, odd_place.acquire(name, blocks)).acquire_lease
        at = np.flatnonzero(np.frombuffer(leased.groups[0].flags, np.uint8)).astype(INT32)
        number = session.put(_wire.load(name, name, [LoadRun(0, at, at + INT32(half))], 20))
        if self._chance.random() < 0.2:
            session.put(_wire.cancel(name))
            session.answers({number})
            self._place.note("layouts: load", "cancelled")
            return
        loaded = session.answers({number})[number]
        self._place.note("layouts: load", word_of(loaded))
        if loaded.load.status == cache_pb2.TRANSFER_STATUS_DONE:
            for block in at.tolist():
                one = memory[places + block * tensor.block_stride_bytes]
                other = memory[places + (block + half) * tensor.block_stride_bytes]
                assert np.array_equal(one, other), f"other bytes came back through {layout}"

    def ids_again(self) -> None:
        """Reuses a few ids of leases, transfers and sequences for other purposes, many at a
        time."""
        with self._place.working("ids") as (session, _):
            asked: dict[int, str] = {}
            for _ in range(60):
                what = self._chance.choice(CALLS)
                asked[session.put(self._again(what))] = what
                if self._chance.random() < 0.2:
                    self._place.collect("ids again", session, asked)
            self._place.collect("ids again", session, asked)

    def _again(self, what: str) -> session_pb2.ConnectRequest:
        chance, name, other = self._chance, self._chance.choice(NAMES), self._chance.choice(NAMES)
        hashes = self._place.hashes(chance.randrange(8))
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
                return odd_place.store(
                    other, runs, lease=name, timeout_s=timeout_s, options=options
                )
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

    def key_spaces(self) -> None:
        """Opens and drops sessions of many key spaces, good and bad."""
        with grpc.insecure_channel(self._place.target, SMALL_WINDOW) as channel:
            for _ in range(40):
                what = self._chance.choice(("plain", "plain", "representations", "odd"))
                session = RawSession(channel, self._place.target, self._opening(what))
                self._place.note(f"key spaces: {what}", session.why_not or "answered")
                if not session.why_not and self._chance.random() < 0.3:
                    # The session ends while a request is in flight.
                    session.put(_wire.acquire("l", [GroupHashes(0, [])], 0, 32))
                session.close(abruptly=self._chance.random() < 0.5)

    def _opening(self, what: str) -> session_pb2.ConnectRequest:
        chance, number = self._chance, self._chance.randrange(NUM_KEY_SPACES)
        sizes = (4096 * (1 + number % 3),) * (1 + number % 2)
        group = GroupSpec(GroupKind.FULL_ATTENTION, 16, sizes)
        window = GroupSpec(GroupKind.SLIDING_WINDOW, 32, sizes, 64)
        space = KeySpace(f"space {number}", "w", "bfloat16", (group, window)[: 1 + number % 2], 16)
        num_kinds = chance.choice((1, 3)) if what != "plain" else 0
        shards = (64,) * space.num_shards
        kinds = tuple(Representation(0, "mean", n, shards) for n in range(num_kinds))
        config = SessionConfig(self._place.target, f"e{number}", Role.TOOL, space, kinds)
        opening = _wire.open_session(config)
        if what == "odd":
            self._spoil(opening.open_session, number)
        return opening

    def _spoil(self, message: session_pb2.OpenSession, number: int) -> None:
        chance, space = self._chance, message.key_space
        groups, most = space.groups, (1 << 31) - 1
        match chance.randrange(9):
            case 0:
                groups[0].shard_byte_counts[:] = self._sizes(0, 1, 2, 31, 32)
            case 1:
                # The server keeps key spaces, so this size is the limit for one.
                for _ in range(255 if number == 0 else 256):
                    groups.add().CopyFrom(groups[0])
            case 2:
                groups[0].block_token_count = chance.choice((0, -1, 17, most))
            case 3:
                space.hash_byte_count = chance.choice((0, 7, 8, 31, 33, -1, most))
            case 4:
                space.model = chance.choice(ODD_NAMES)
            case 5:
                message.engine_id = chance.choice(("", "x" * 300, "a\nb"))
            case 6:
                for kind in message.representations:
                    kind.shard_byte_counts[:] = self._sizes(0, 1, 5)
            case 7:
                message.protocol_version = chance.choice((-1, 0, 1, 2, 3, most))
                message.newest_protocol_version = chance.choice((-1, 0, 1, 2, 3, most))
                named = range(chance.choice((0, 1, 5000)))
                features: Any = [chance.choice((0, 1, -1, 99)) for _ in named]
                message.features[:] = features
            case _:
                groups[0].kind = chance.choice((0, 3, 5, 99))  # type: ignore[assignment]
                groups[0].window_token_count = chance.choice((0, -1, 24))

    def sequences(self) -> None:
        """Creates many sequences and makes odd selections of them. Deletes half; the others end
        with their session."""
        note, lengths = self._place.note, dict[str, int]()
        with contextlib.ExitStack() as held:
            engine = self._place.sparse_engine(held)
            for number in range(20):
                name, length = f"s{number}", self._chance.choice((0, 1, 8, 60))
                lengths[name] = len(self._place.sequence(engine, name, length))
            channel = held.enter_context(grpc.insecure_channel(self._place.target, SMALL_WINDOW))
            requests = [self._odd_selection(engine, lengths) for _ in range(60)]
            select = sparse_pb2_grpc.SparseServiceStub(channel).SelectBlocks
            for answer in select(iter(requests), timeout=2 * DEADLINE_S):
                note("sequences: SelectBlocks", word_of(answer))
            for name in [*lengths][::2]:
                was_there = engine.session.delete_sequence(name).result(DEADLINE_S)
                note("sequences: delete", "answered" if was_there else "unknown")

    def _odd_selection(
        self, engine: RepresentationEngine, lengths: dict[str, int]
    ) -> sparse_pb2.SelectBlocksRequest:
        chance, name = self._chance, self._chance.choice(list(lengths))
        tokens = 16 * lengths[name] + chance.choice((0, 1, 15))
        request = self._place.selection(engine, name, tokens)
        match chance.randrange(8):
            case 0:
                request.layer_index = chance.choice((-1, 3, 1 << 20))
            case 1:
                request.shard_index = chance.choice((-1, 1, 1 << 20))
            case 2:
                request.context_token_count = chance.choice(ODD_TOKENS)
            case 3:
                sizes = (0, 1, 4, 4 * HEAD_SIZE, 4 * KV_HEADS * HEAD_SIZE)
                request.query = request.query[: chance.choice(sizes)]
            case 4:
                value = chance.choice((np.nan, np.inf, 1e38, 0))
                request.query = np.full(QUERY_HEADS * HEAD_SIZE, value, np.float32).tobytes()
            case 5:
                odd = [chance.choice(ODD_MASSES) for _ in range(QUERY_HEADS)]
                packed, num_bytes = np.array(odd, np.float32).tobytes(), (4 * QUERY_HEADS, 4, 3)
                request.always_log_mass = packed[: chance.choice(num_bytes)]
            case _:
                pass
        return request
