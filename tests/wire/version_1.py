"""Version 1 of the protocol, as it was: an engine and a server that know nothing newer.

`version_1.binpb` has the descriptors of that time (`buf build --as-file-descriptor-set
--exclude-source-info`); messages are made of them, so a field that came later is unknown here.
"""

import mmap
import os
import queue
import socket
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.unknown_fields import UnknownFieldSet

DESCRIPTORS = Path(__file__).with_name("version_1.binpb")
CONNECT = "/hotkv.v1.SessionService/Connect"
PAGE_BYTES, NUM_BLOCKS = 4096, 64
WAIT_S = 60.0


def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    files = descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTORS.read_bytes())
    for file in files.file:
        pool.Add(file)
    return pool


POOL = _pool()


def message(name: str, **fields: Any) -> Any:
    """A message of version 1."""
    return kind(name)(**fields)


def kind(name: str) -> Any:
    """Its class."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"hotkv.v1.{name}"))


def has_unknown_fields(value: Any) -> bool:
    """Whether a message has fields of its own that version 1 does not know."""
    return len(UnknownFieldSet(value)) > 0


def key_space(model: str) -> Any:
    """One group of full attention."""
    group = message("KvGroup", kind=1, block_token_count=16, shard_byte_counts=[PAGE_BYTES])
    return message(
        "KeySpace",
        model=model,
        weights_identity=model,
        dtype="bfloat16",
        kv_dtype="auto",
        hash_algorithm="sha256",
        hash_byte_count=32,
        hash_block_token_count=16,
        groups=[group],
        parallel_shape="tp=1,pp=1",
    )


class OldEngine:
    """An engine of version 1 with memory of its own. It opens its session anew as often as it
    must."""

    def __init__(self, target: str, model: str = "old-engine") -> None:
        self._target = target
        self._model = model
        self._fd = os.memfd_create("old-engine")
        os.posix_fallocate(self._fd, 0, NUM_BLOCKS * PAGE_BYTES)
        self.kv = np.frombuffer(mmap.mmap(self._fd, NUM_BLOCKS * PAGE_BYTES), np.uint8).reshape(
            NUM_BLOCKS, PAGE_BYTES
        )
        self._next_id = 1
        self.opened: Any = None

    def open(self) -> "OldEngine":
        """Opens a session, links, registers memory; tries again until a server answers."""
        end_s = time.monotonic() + WAIT_S
        while True:
            try:
                self._open()
                return self
            except (grpc.RpcError, OSError):
                if time.monotonic() > end_s:
                    raise
                time.sleep(0.1)

    def _open(self) -> None:
        self._channel = grpc.insecure_channel(
            self._target, (("grpc.use_local_subchannel_pool", 1),)
        )
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        connect = self._channel.stream_stream(
            CONNECT, kind("ConnectRequest").SerializeToString, kind("ConnectResponse").FromString
        )
        self._answers = connect(iter(self._outbox.get, None))
        opening = message(
            "OpenSession",
            protocol_version=1,
            engine_id="old",
            role=2,
            key_space=key_space(self._model),
            client_name="hotkv-client 0.1.0",
            without_eviction_notices=True,
        )
        self.opened = self.ask(open_session=opening).session_opened
        folder = Path(self._target.removeprefix("unix:")).parent
        self._link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.connect(str(folder / "fd.sock"))
        link = message("LinkRequest", session_id=self.opened.session_id, handle_ids=["kv"])
        socket.send_fds(self._link, [link.SerializeToString()], [self._fd])
        packet, fds, _, _ = socket.recv_fds(self._link, 65536, 2)
        for fd in fds:
            os.close(fd)
        answer = kind("LinkResponse").FromString(packet)
        assert answer.linked and not has_unknown_fields(answer)
        handle = message("MemoryHandle", handle_id="kv", byte_count=NUM_BLOCKS * PAGE_BYTES)
        handle.file_mapping.SetInParent()
        tensor = message(
            "PageTensor",
            handle_id="kv",
            block_stride_byte_count=PAGE_BYTES,
            run_byte_count=PAGE_BYTES,
        )
        layout = message("Layout", block_count=NUM_BLOCKS, handles=[handle], tensors=[tensor])
        self.ask(register_memory=message("RegisterMemory", layout=layout))

    def ask(self, **body: Any) -> Any:
        """The answer to a request, which may be a refusal."""
        request = message("ConnectRequest", request_id=self._next_id, **body)
        self._next_id += 1
        self._outbox.put(request)
        for answer in self._answers:
            if answer.request_id == request.request_id:
                return answer
        raise ConnectionError("the stream has ended")

    def store(self, blocks: list[bytes]) -> list[int]:
        """Stores blocks 0 and on under these hashes; BlockResult values."""
        run = message(
            "BlockRun",
            hashes=b"".join(blocks),
            block_ids=np.arange(len(blocks), dtype="<i4").tobytes(),
        )
        name = os.urandom(8).hex()
        store = message("StoreRequest", transfer_id=name, lease_id=name, runs=[run])
        return list(self.ask(store=store).store.runs[0].results)

    def load(self, blocks: list[bytes], first: int) -> int:
        """Loads them into blocks `first` and on; the TransferStatus."""
        name = os.urandom(8).hex()
        groups = [message("GroupHashes", hashes=b"".join(blocks))]
        lease = message("AcquireLeaseRequest", lease_id=name, groups=groups)
        pinned = self.ask(acquire_lease=lease).acquire_lease.groups[0].flags
        assert pinned == b"\x01" * len(blocks)
        positions = np.arange(len(blocks), dtype="<i4")
        run = message(
            "LoadRun",
            lease_positions=positions.tobytes(),
            block_ids=(positions + first).astype("<i4").tobytes(),
        )
        load = message("LoadRequest", transfer_id=name, lease_id=name, runs=[run])
        return int(self.ask(load=load).load.status)

    def ended(self) -> bool:
        """Waits until the server has ended the stream and the link."""
        self._link.settimeout(WAIT_S)
        try:
            return self._link.recv(1) == b""
        finally:
            self._disconnect()

    def _disconnect(self) -> None:
        self._outbox.put(None)
        self._link.close()
        self._channel.close()

    def close(self) -> None:
        """Ends the session."""
        self._disconnect()
        os.close(self._fd)


class OldServer:
    """What a server of version 1 answers, without a cache: opens sessions of version 1 alone, finds
    each block, refuses leases on the stream and lookups by a call. Use in a `with` block."""

    def __init__(self, target: str) -> None:
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        connect = grpc.stream_stream_rpc_method_handler(
            self._connect,
            kind("ConnectRequest").FromString,
            kind("ConnectResponse").SerializeToString,
        )
        info = grpc.unary_unary_rpc_method_handler(
            self._refuse,
            kind("GetInfoRequest").FromString,
            kind("GetInfoResponse").SerializeToString,
        )
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    "hotkv.v1.SessionService", {"Connect": connect}
                ),
                grpc.method_handlers_generic_handler("hotkv.v1.AdminService", {"GetInfo": info}),
            )
        )
        self._server.add_insecure_port(target)

    def __enter__(self) -> "OldServer":
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait()

    def _connect(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        for request in requests:
            answer = kind("ConnectResponse")(request_id=request.request_id)
            match request.WhichOneof("body"):
                case "open_session":
                    if request.open_session.protocol_version != 1:
                        self._abort(context, grpc.StatusCode.FAILED_PRECONDITION, 14, "version")
                    answer.session_opened.protocol_version = 1
                    answer.session_opened.session_id = "old"
                    answer.session_opened.epoch = 7
                case "lookup":
                    for group in request.lookup.groups:
                        found = answer.lookup.groups.add(group_index=group.group_index)
                        found.flags = b"\x01" * (len(group.hashes) // 32)
                case _:
                    answer.error.reason, answer.error.message = 6, "lease_id is unknown"
            yield answer

    def _refuse(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._abort(context, grpc.StatusCode.PERMISSION_DENIED, 11, "not you")

    def _abort(
        self, context: grpc.ServicerContext, code: grpc.StatusCode, reason: int, text: str
    ) -> None:
        detail = message("ErrorDetail", reason=reason, message=text)
        context.set_trailing_metadata((("hotkv-error-bin", detail.SerializeToString()),))
        context.abort(code, text)
