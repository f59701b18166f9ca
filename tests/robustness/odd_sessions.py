"""Odd clients that send whole messages: they register odd layouts and reuse ids. Each kind is
counted under `KIND: what`, and ends its sessions."""

import mmap
import os
from dataclasses import replace

import numpy as np

from hotkv_client import BlockRun, GroupHashes, LoadRun
from hotkv_client.wire import requests as _wire
from hotkv_client.wire import sparse as _sparse_wire
from hotkv_proto.blocks import Retention, StoreOptions
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor
from hotkv_proto.order import NO_ORDER
from hotkv_proto.v1 import cache_pb2, session_pb2
from tests.robustness import odd_place
from tests.robustness.odd_place import INT32, NUM_BLOCKS, Kinds, Place, memory_file
from tests.robustness.raw_client import RawSession, word_of

NAMES = ("a", "b", "c")
"""Few names, so that ids come again."""
GOOD_LAYOUTS = ("one-byte runs", "many runs", "transposed", "interleaved")
LAYOUTS = (*GOOD_LAYOUTS, "too many runs", "odd numbers")
OF_LEASES = ("acquire", "reserve", "store", "load", "release", "cancel", "create", "append")
CALLS = (*OF_LEASES, "open residency", "extend residency", "close residency", "delete")
ODD_SIZES = (0, 1, 2, 7, 64, 4096, 8192, -1, (1 << 31) - 1, 1 << 47, 1 << 62)


class OddSessions:
    def __init__(self, place: Place) -> None:
        self._place, self._chance = place, place.chance

    def kinds(self) -> Kinds:
        return {"layouts": self.layouts, "ids again": self.ids_again}

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
