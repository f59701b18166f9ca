"""An engine whose KV cache groups a test chooses."""

import mmap
import os
import re

import numpy as np

from demo.processes import Server
from hotkv_client import BlockRun, EngineMemory, Role, Session, SessionConfig, TransferResult
from hotkv_client.admin import AdminClient
from hotkv_client.types import Int32s
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor
from hotkv_proto.order import NO_ORDER, DeviceOrder

PAGE_BYTES = 4096
NUM_BLOCKS = 64
FULL = GroupSpec(GroupKind.FULL_ATTENTION, 16, (PAGE_BYTES,))
WINDOW = GroupSpec(GroupKind.SLIDING_WINDOW, 16, (PAGE_BYTES,), 24)
WIDE = GroupSpec(GroupKind.FULL_ATTENTION, 32, (PAGE_BYTES,))

PATIENT = ("--tiers.lookup-wait-ms", "20000")
"""Requests wait long for tiers, as machines may be busy."""


class GroupsEngine:
    """A connected session with a page for each block of each group. Must be closed. `num_flags`:
    counters in its memory, for which transfers can wait."""

    def __init__(
        self, target: str, groups: tuple[GroupSpec, ...], model: str, num_flags: int = 0
    ) -> None:
        pages = [group.slot_bytes for group in groups]
        num_bytes = NUM_BLOCKS * sum(pages)
        self.fd = os.memfd_create("groups-engine")
        os.posix_fallocate(self.fd, 0, num_bytes)
        self.memory = mmap.mmap(self.fd, num_bytes)
        tensors = tuple(
            PageTensor(g, "kv", NUM_BLOCKS * sum(pages[:g]), page, page, 0)
            for g, page in enumerate(pages)
        )
        handles, fds, order = [MemoryHandle("kv", num_bytes)], {"kv": self.fd}, NO_ORDER
        if num_flags:
            handles.append(MemoryHandle("flags", PAGE_BYTES))
            fds["flags"] = os.memfd_create("flags")
            os.posix_fallocate(fds["flags"], 0, PAGE_BYTES)
            order = DeviceOrder(flags_handle_id="flags", num_flags=num_flags)
        self.fds = fds
        layout = Layout(0, NUM_BLOCKS, tuple(handles), tensors, "LBHNC")
        self.key_space = KeySpace(model, model, "bfloat16", groups, 16)
        config = SessionConfig(
            target, os.urandom(8).hex(), Role.WORKER, self.key_space, reconnect_max_s=0.5
        )
        self.session = Session(config, EngineMemory(layout, fds, order))
        self.session.start()
        assert self.session.wait_connected(20)

    def store(self, *runs: BlockRun) -> TransferResult:
        name = os.urandom(8).hex()
        return self.session.store(name, name, runs, 20).result(60)

    def close(self) -> None:
        self.session.close()
        for fd in self.fds.values():
            os.close(fd)


def hashes(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def block_ids(count: int, first: int = 0) -> Int32s:
    return np.arange(first, first + count, dtype=np.int32)


def number_of(admin: AdminClient, model: str) -> int:
    """The model must have only one key space."""
    (row,) = [row for row in admin.key_spaces() if row["key_space"]["model"] == model]
    return int(row["key_space_id"])


def http_port(server: Server) -> int:
    found = re.search(r"http_port=(\d+)", server.log.read_text())
    assert found is not None
    return int(found[1])
