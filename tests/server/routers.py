"""A router that subscribes to the server's KV events as to an engine's."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    AllBlocksCleared,
    BlockStored,
    KVEventBatch,
)
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from demo.processes import Server, runtime_folder
from hotkv_client import BlockResult
from hotkv_proto.groups import GroupSpec
from tests.server.places import Connected, store
from tests.server.support import FULL, GroupsEngine, hashes

DECODER = msgspec.msgpack.Decoder(type=KVEventBatch)
Make = Callable[..., GroupsEngine]
WAIT_MS = 60_000


def topic(model: str) -> str:
    return f"kv@node:{socket.gethostname()}@{model}"


def external(block_hash: bytes) -> Any:
    return maybe_convert_block_hash(BlockHash(block_hash))


class Router:
    """Reads events as vLLM's example does. Messages must have the bytes that vLLM would send."""

    def __init__(self, folder: Path, topic: str) -> None:
        self.context = zmq.Context()
        self.folder, self.topic = folder, topic
        self.sub = self.context.socket(zmq.SUB)
        self.sub.connect(f"ipc://{folder}/events")
        self.sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.next_sequence = -1

    def wait_subscribed(self, engine: Connected, *others: "Router") -> None:
        """Waits until events arrive, and discards those so far, also of `others`. The key space
        must be empty."""
        self.wait_heard(engine)
        mark = hashes(1)
        assert store(engine, mark) == {BlockResult.STORED}
        engine.session.flush().result(60)
        for router in (self, *others):
            router.discard_until_flushed(mark[0])

    def wait_heard(self, engine: Connected) -> None:
        """Flushes until an event has arrived; more may follow."""
        deadline_s = time.monotonic() + 60
        while not self.sub.poll(100):
            assert time.monotonic() < deadline_s, "no event came"
            engine.session.flush().result(60)

    def batch(self) -> KVEventBatch:
        name, sequence, payload = self.sub.recv_multipart()
        return self.check(name, sequence, payload)

    def check(self, name: bytes, sequence: bytes, payload: bytes) -> KVEventBatch:
        number = int.from_bytes(sequence, "big")
        assert len(sequence) == 8 and name.decode() == self.topic
        assert self.next_sequence in (-1, number), "a message is missing"
        self.next_sequence = number + 1
        batch = DECODER.decode(payload)
        assert batch.data_parallel_rank == 0 and abs(batch.ts - time.time()) < 60
        assert msgspec.msgpack.Encoder().encode(batch) == payload, (
            "vLLM would have sent other bytes"
        )
        return batch

    def events(self, count: int) -> list[Any]:
        found = self._until(lambda found: len(found) >= count)
        assert len(found) == count
        return found

    def until_stored(self, block: bytes, medium: str = MEDIUM_CPU) -> list[Any]:
        def is_stored(found: list[Any]) -> bool:
            return any(
                isinstance(one, BlockStored)
                and one.medium == medium
                and external(block) in one.block_hashes
                for one in found
            )

        return self._until(is_stored)

    def discard_until_flushed(self, block: bytes) -> None:
        def is_flushed(found: list[Any]) -> bool:
            stored = [
                at
                for at, one in enumerate(found)
                if isinstance(one, BlockStored) and external(block) in one.block_hashes
            ]
            return bool(stored) and AllBlocksCleared() in found[stored[0] :]

        self._until(is_flushed)

    def _until(self, is_enough: Callable[[list[Any]], bool]) -> list[Any]:
        found: list[Any] = []
        while not is_enough(found):
            assert self.sub.poll(WAIT_MS), f"after {found} nothing came"
            found += self.batch().events
        return found

    def close(self) -> None:
        self.sub.close(0)
        self.context.term()


@pytest.fixture(scope="module")
def published() -> Iterator[tuple[Server, Path]]:
    with runtime_folder(64 << 20) as folder:
        flags = [
            "--events.endpoint",
            f"ipc://{folder}/events",
            "--events.replay-endpoint",
            f"ipc://{folder}/replay",
        ]
        with Server(folder, "16MiB", *flags) as running:
            running.wait_ready()
            yield running, folder


@pytest.fixture
def engine(published: tuple[Server, Path]) -> Iterator[Make]:
    with contextlib.ExitStack() as stack:

        def make(model: str, *groups: GroupSpec) -> GroupsEngine:
            made = GroupsEngine(published[0].target, groups or (FULL,), model)
            stack.callback(made.close)
            return made

        yield make
