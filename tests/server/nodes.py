"""Nodes in the test process, without gRPC; sessions' memory is a file."""

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.policies.lru import LRU
from hotkv_proto.blocks import TransferStatus
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace
from hotkv_proto.layout import FENCE_HANDLE, Layout, MemoryHandle, PageTensor
from hotkv_proto.table import hash_words
from hotkv_proto.v1 import session_pb2
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import CoreConfig, Run
from hotkv_server.dataplane.host import HostCopyEngine
from hotkv_server.memory.arena import NodeMemory
from hotkv_server.node.live_session import LiveSession
from hotkv_server.node.node import Node

PAGE = 4096
SPACE = KeySpace("m", "w", "bf16", (GroupSpec(GroupKind.FULL_ATTENTION, 16, (PAGE,)),), 16)


@contextlib.contextmanager
def local_node(
    folder: Path, *, copies: Any = None, config: Any = None, **more: Any
) -> Iterator[Node]:
    """copies: by default a host copy engine.
    config: settings of the core, except its sizes.
    more: settings of the node.
    """
    memory = NodeMemory.open(folder / "arena", 1 << 20, 1 << 16, 64, 1, prefault=False)
    core = CacheCore(CoreConfig(1 << 20, 1 << 16, 64, **(config or {})), memory.table, LRU(64))
    own = HostCopyEngine(1) if copies is None else copies
    node = Node(core, memory, own, **more)
    yield node
    if copies is None:
        own.close()
    memory.remove()


@contextlib.asynccontextmanager
async def live_node(folder: Path, **settings: Any) -> AsyncIterator[Node]:
    with local_node(folder, **settings) as node:
        yield node
        await node.close()


def memory_file(num_bytes: int) -> int:
    fd = os.memfd_create("test")
    if num_bytes:
        os.posix_fallocate(fd, 0, num_bytes)
    return fd


async def worker(node: Node, num_blocks: int = 1, fence_fd: int | None = None) -> LiveSession:
    session = await node.sessions.open("e", "worker", SPACE, "test")
    session.receive("kv", memory_file(num_blocks * PAGE))
    if fence_fd is not None:
        session.receive(FENCE_HANDLE, fence_fd)
    handles = (MemoryHandle("kv", num_blocks * PAGE),)
    tensors = (PageTensor(0, "kv", 0, PAGE, PAGE, 0),)
    await node.sessions.register_memory(session, Layout(0, num_blocks, handles, tensors))
    return session


async def store_in(node: Node, session: LiveSession, hashes: list[bytes], **more: Any) -> list[int]:
    """Stores blocks 0, 1, … of the engine under these hashes; a result for each."""
    name, run = os.urandom(4).hex(), Run(0, hash_words(b"".join(hashes), 32))
    ids = [np.arange(len(hashes))]
    end = await (await node.transfers.store(session, name, name, [run], ids, 5.0, **more))
    assert end.status is TransferStatus.DONE
    return list(end.results[0].tolist())


def told(
    sent: list[session_pb2.ConnectResponse],
) -> Callable[[session_pb2.ConnectResponse, bool], None]:
    """For `SessionCalls`."""
    return lambda message, may_wait: sent.append(message)
