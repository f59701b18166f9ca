"""A client written from docs/wire.md alone. `python foreign_client.py RUNTIME_DIRECTORY` prints
its observations as JSON; gRPC stubs from proto/hotkv/v1 must be on the path."""

import contextlib
import hashlib
import json
import mmap
import os
import queue
import random
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from hotkv_proto.v1 import cache_pb2, errors_pb2, layout_pb2, session_pb2, session_pb2_grpc

BLOCK_BYTES = 8192
NUM_BLOCKS = 64
MODEL = "a model of another make"
MASK_64 = (1 << 64) - 1
MULTIPLIER = 0x9E37_79B9_7F4A_7C15
HEADER_BYTES, BUCKET_BYTES, RECORD_BYTES = 4096, 64, 72
RESERVED_FLAG = 1 << 31
MAX_BUCKETS, MAX_ATTEMPTS = 64, 1000
PACKET_BYTES = 65536
WORD_OF_STORE = 7


class Refused(Exception): ...


class Table:
    """The block table, mapped read-only."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self._map = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        magic, version, _, self._num_buckets, capacity, self.epoch, self.arena_bytes = (
            struct.unpack_from("<8sIIqqqq", self._map)
        )
        assert (magic, version) == (b"HOTKVTB1", 1), (magic, version)
        self._records = HEADER_BYTES + BUCKET_BYTES * self._num_buckets
        assert self._records + RECORD_BYTES * (capacity + 1) <= num_bytes

    def word(self, block_hash: bytes, salt: int) -> int:
        prefix = int.from_bytes(block_hash[:8], "little")
        mixed = (prefix ^ salt) * MULTIPLIER & MASK_64
        tag, bucket = mixed & 0xFFFF_FFFF, (mixed >> 32) * self._num_buckets >> 32
        for _ in range(MAX_BUCKETS):
            overflow, tags, entries = self._bucket(bucket)
            found = max((e for t, e in zip(tags, entries, strict=True) if t == tag), default=0)
            if found or not overflow:
                return found
            bucket = (bucket + 1) % self._num_buckets
        return 0

    def is_ready(self, block_hash: bytes, salt: int) -> bool:
        """Only a hint: the block may be evicted before a load."""
        return 0 < self.word(block_hash, salt) < RESERVED_FLAG

    def record(self, word: int) -> tuple[int, ...]:
        """The record's 18 words. `word`: from a bucket."""
        at = self._records + RECORD_BYTES * (word & ~RESERVED_FLAG)
        return struct.unpack_from("<18I", self._map, at)

    def _bucket(self, number: int) -> tuple[int, Sequence[int], Sequence[int]]:
        """(Number of keys in later buckets, tags, entry words). The last two are empty if the
        bucket does not come to rest."""
        at = HEADER_BYTES + BUCKET_BYTES * number
        for _ in range(MAX_ATTEMPTS):
            before = struct.unpack_from("<I", self._map, at)[0]
            words = struct.unpack_from("<16I", self._map, at)
            if before % 2 == 0 and struct.unpack_from("<I", self._map, at)[0] == before:
                return words[1], words[2:9], words[9:16]
        return 0, (), ()


class Stream:
    """Each request is answered before the next is sent."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._next_id = 1
        self._answers = session_pb2_grpc.SessionServiceStub(channel).Connect(
            iter(self._outbox.get, None)
        )

    def ask(self, **body: Message) -> Any:
        request = session_pb2.ConnectRequest(request_id=self._next_id, **body)
        self._next_id += 1
        self._outbox.put(request)
        for answer in self._answers:
            if answer.request_id == request.request_id:
                if answer.WhichOneof("body") == "error":
                    raise Refused(answer.error)
                return getattr(answer, answer.WhichOneof("body"))
        raise ConnectionError("the server ended the stream")

    def close(self) -> None:
        self._outbox.put(None)
        for _ in self._answers:
            pass


def talk(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(10)
    connection.connect(str(path))
    return connection


def ticket(path: Path) -> bytes:
    """A ticket, which proves this process's user once."""
    with talk(path) as connection:
        connection.send(session_pb2.LinkRequest(wants_ticket=True).SerializeToString())
        answer = session_pb2.LinkResponse.FromString(connection.recv(PACKET_BYTES))
        assert not answer.HasField("error"), answer
        return bytes(answer.ticket)


def link(path: Path, session_id: str, handles: dict[str, int]) -> tuple[socket.socket, Table]:
    """(Connection, block table that the server sends back)."""
    connection = talk(path)
    request = session_pb2.LinkRequest(session_id=session_id, handle_ids=list(handles))
    socket.send_fds(connection, [request.SerializeToString()], list(handles.values()))
    packet, fds, _, _ = socket.recv_fds(connection, PACKET_BYTES, 2)
    answer = session_pb2.LinkResponse.FromString(packet)
    assert answer.linked, answer
    assert len(fds) == bool(answer.arena_byte_count) + bool(answer.table_byte_count)
    table = Table(fds[-1], answer.table_byte_count)
    for fd in fds:
        os.close(fd)
    connection.settimeout(None)
    return connection, table


def opening(proof: bytes) -> session_pb2.OpenSession:
    """Opens a key space with one group. `proof`: the ticket."""
    full = layout_pb2.KV_GROUP_KIND_FULL_ATTENTION
    group = layout_pb2.KvGroup(kind=full, block_token_count=16, shard_byte_counts=[BLOCK_BYTES])
    space = layout_pb2.KeySpace(
        model=MODEL,
        weights_identity="1",
        dtype="bfloat16",
        kv_dtype="auto",
        hash_algorithm="sha256 of its own",
        hash_byte_count=32,
        hash_block_token_count=16,
        groups=[group],
    )
    return session_pb2.OpenSession(
        protocol_version=1,
        engine_id="foreign",
        role=session_pb2.SESSION_ROLE_TOOL,
        key_space=space,
        client_name="foreign 1",
        ticket=proof,
        without_eviction_notices=True,
    )


def layout() -> layout_pb2.Layout:
    """The memory is one file, in which blocks follow each other."""
    mapping, num_bytes = layout_pb2.FileMapping(), NUM_BLOCKS * BLOCK_BYTES
    handle = layout_pb2.MemoryHandle(handle_id="memory", byte_count=num_bytes, file_mapping=mapping)
    tensor = layout_pb2.PageTensor(
        handle_id="memory", block_stride_byte_count=BLOCK_BYTES, run_byte_count=BLOCK_BYTES
    )
    return layout_pb2.Layout(block_count=NUM_BLOCKS, handles=[handle], tensors=[tensor])


def int32s(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


@contextlib.contextmanager
def shared_memory(num_bytes: int) -> Iterator[tuple[int, mmap.mmap]]:
    fd = os.memfd_create("foreign")
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        yield fd, mmap.mmap(fd, num_bytes)
    finally:
        os.close(fd)


def failed_call(channel: grpc.Channel) -> dict[str, Any]:
    lookup = channel.unary_unary(
        "/hotkv.v1.CacheService/Lookup",
        cache_pb2.LookupRequest.SerializeToString,
        cache_pb2.LookupResponse.FromString,
    )
    try:
        lookup(cache_pb2.LookupRequest(session_id="nobody's"))
    except grpc.RpcError as error:
        packed = dict(error.trailing_metadata())["grpc-status-details-bin"]
        status = errors_pb2.Status.FromString(packed)
        info = errors_pb2.ErrorInfo.FromString(status.details[0].value)
        code = error.code().name
        return {"code": code, "reason": info.reason, "domain": info.domain, **info.metadata}
    raise AssertionError("the lookup was not refused")


def main(folder: Path) -> dict[str, Any]:
    saw: dict[str, Any] = {}
    with (
        grpc.insecure_channel(f"unix:{folder / 'grpc.sock'}") as channel,
        shared_memory(NUM_BLOCKS * BLOCK_BYTES) as (memory_fd, memory),
        shared_memory(4096) as (fence_fd, fence),
    ):
        stream = Stream(channel)
        opened = stream.ask(open_session=opening(ticket(folder / "fd.sock")))
        saw["version"], salt = opened.protocol_version, opened.salts[0] & MASK_64
        handles = {"memory": memory_fd, "hotkv-fence": fence_fd}
        connection, table = link(folder / "fd.sock", opened.session_id, handles)
        assert table.epoch == opened.epoch
        stream.ask(register_memory=session_pb2.RegisterMemory(layout=layout()))

        memory[: 8 * BLOCK_BYTES] = random.randbytes(8 * BLOCK_BYTES)
        hashes = [hashlib.sha256(os.urandom(16)).digest() for _ in range(8)]
        saw["ready before"] = sum(table.is_ready(h, salt) for h in hashes)
        run = cache_pb2.BlockRun(hashes=b"".join(hashes), block_ids=int32s(range(8)))
        names = {"transfer_id": "s", "lease_id": "s"}
        store = cache_pb2.StoreRequest(**names, runs=[run], fence_index=WORD_OF_STORE)
        stored = stream.ask(store=store)
        saw["stored"] = list(stored.runs[0].results)
        saw["ready after"] = sum(table.is_ready(h, salt) for h in hashes)
        record = table.record(table.word(hashes[3], salt))
        saw["record"] = [
            struct.pack("<8I", *record[:8]) == hashes[3],
            record[10] == opened.key_space_id,
            record[11] == 2 << 16,
        ]

        groups = [cache_pb2.GroupHashes(hashes=b"".join(hashes))]
        lease = cache_pb2.AcquireLeaseRequest(lease_id="l", groups=groups)
        saw["pinned"] = list(stream.ask(acquire_lease=lease).groups[0].flags)
        to = cache_pb2.LoadRun(lease_positions=int32s(range(8)), block_ids=int32s(range(20, 28)))
        loaded = stream.ask(load=cache_pb2.LoadRequest(transfer_id="t", lease_id="l", runs=[to]))
        saw["loaded"] = cache_pb2.TransferStatus.Name(loaded.status)
        saw["equal"] = memory[: 8 * BLOCK_BYTES] == memory[20 * BLOCK_BYTES : 28 * BLOCK_BYTES]
        stream.ask(release_lease=cache_pb2.ReleaseLeaseRequest(lease_id="l"))

        struct.pack_into("<I", fence, 4 * WORD_OF_STORE, 1)
        run.hashes, run.block_ids = hashlib.sha256(b"revoked").digest(), int32s([0])
        names = {"transfer_id": "r", "lease_id": "r"}
        store = cache_pb2.StoreRequest(**names, runs=[run], fence_index=WORD_OF_STORE)
        revoked = stream.ask(store=store)
        saw["revoked"] = [*revoked.runs[0].results, table.is_ready(run.hashes, salt)]
        try:
            stream.ask(load=cache_pb2.LoadRequest(transfer_id="u", lease_id="none's", runs=[to]))
        except Refused as refused:
            error = refused.args[0]
            saw["refused"] = [error.reason, error.field, error.retryable]
        saw["failed call"] = failed_call(channel)
        stream.close()
        saw["link ended"] = connection.recv(1) == b""
    saw["modules"] = sorted(m for m in sys.modules if m.startswith(("hotkv", "numpy")))
    return saw


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
