"""A live session: its secret id, its memory, its transfers, and its outbox of notices.

Always true: the outbox is bounded; a session that does not read is closed, and nobody else waits
for it.
"""

import asyncio
import ctypes
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.keys import MAX_GROUPS, KeySpace
from hotkv_proto.layout import FENCE_HANDLE, FENCE_WORDS
from hotkv_server.cache.values import EvictionNotice, SessionRecord
from hotkv_server.dataplane.engines import CopyJob
from hotkv_server.memory.mapping import FileMapping
from hotkv_server.node.session_memory import SessionMemory
from hotkv_server.security.identity import Peer

OUTBOX_MESSAGES = 4096


def unread() -> HotKVError:
    """The end of a session whose client does not read."""
    return HotKVError(
        Reason.OVERLOADED, "the client does not read what it is sent; the session is closed"
    )


@dataclass(frozen=True, slots=True)
class Drain:
    """Notice to sessions: the server stops in `deadline_s` seconds."""

    deadline_s: float


Notice = EvictionNotice | Drain


@dataclass(slots=True, eq=False)
class LiveSession:
    """See the module. The holder of `secret_id` may make unary calls and use the descriptor socket
    for the session; `on_end` ends the stream, given the reason."""

    record: SessionRecord
    secret_id: str
    key_space: KeySpace
    client_name: str
    peer: Peer | None = None
    """Who has proven to act for its tenant; None if access is open."""
    notices: asyncio.Queue[Notice] = field(default_factory=lambda: asyncio.Queue(OUTBOX_MESSAGES))
    jobs: dict[str, CopyJob] = field(default_factory=dict)
    inflight_bytes: int = 0
    """Bytes of its transfers."""
    num_reads: int = 0
    """Selections and comparisons under way, which read the arena under its leases."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    memory: SessionMemory | None = None
    received_fds: dict[str, int] = field(default_factory=dict)
    fence: FileMapping | None = None
    hears_evictions: bool = True
    closing: bool = False
    maps_arena: bool = True
    maps_table: bool = True
    knows_words: bool = False
    """Whether its link hands out the descriptors of arena and table, and says where the words of
    residencies are."""
    knows_tiers: bool = False
    """Whether its lookups may be answered later, when a shared tier has been asked."""
    close_link: Callable[[], None] | None = None
    heard_s: float = field(default_factory=time.monotonic)
    """When its last message came."""
    on_end: Callable[[HotKVError], None] | None = None
    loaded_bytes: int = 0
    stored_bytes: int = 0
    prefill_tokens_per_s: float = 0.0
    """As its engine has measured; 0 if it has not said."""

    def __repr__(self) -> str:
        return (
            f"LiveSession({self.record.number}, {self.record.engine_id!r}, "
            f"{self.record.role}, {len(self.jobs)} transfers)"
        )

    @property
    def name(self) -> str:
        """Its name in the log."""
        return f"session={self.record.number} engine={self.record.engine_id}"

    @property
    def has_arena(self) -> bool:
        """Whether its link has handed out the arena."""
        return self.maps_arena and self.close_link is not None

    def group_index(self, named: int) -> int:
        """The core's index of a group that this session names: its representations come after the
        key space's groups.

        Raises INVALID_FIELD; the core refuses negative numbers.
        """
        num_groups, kinds = len(self.key_space.groups), self.record.representations
        if named < num_groups:
            return named
        if named - num_groups >= len(kinds):
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"group_index is {named}; this key space has {num_groups} groups and the "
                f"session declares {len(kinds)} representations",
            )
        return kinds[named - num_groups]

    def named(self, group_index: int) -> int:
        """The inverse of `group_index`."""
        if group_index < MAX_GROUPS:
            return group_index
        return len(self.key_space.groups) + self.record.representations.index(group_index)

    def notify(self, notice: Notice) -> None:
        """Queues a notice; ends the session if its outbox is full."""
        try:
            self.notices.put_nowait(notice)
        except asyncio.QueueFull:
            self.end(unread())

    def end(self, why: HotKVError) -> None:
        """Ends its stream, and so the session."""
        if self.on_end is not None:
            self.on_end(why)

    def receive(self, handle_id: str, fd: int) -> None:
        """Takes over a descriptor from the descriptor socket, also if it raises.

        Raises DUPLICATE_ID for a handle that has come before, ValueError for a fence that is too
        short, OSError for one that can't be mapped.
        """
        if handle_id in self.received_fds or (handle_id == FENCE_HANDLE and self.fence is not None):
            os.close(fd)
            raise HotKVError(
                Reason.DUPLICATE_ID,
                f"handle_ids: a descriptor for {handle_id!r} has come before; open another session",
            )
        if handle_id == FENCE_HANDLE:
            self.fence = FileMapping(fd, FENCE_WORDS * 4, handle_id, on_cut=self.cancel_transfers)
        else:
            self.received_fds[handle_id] = fd

    def take_files(self, handle_ids: Sequence[str]) -> dict[str, int]:
        """Gives descriptors that have come to the caller. Raises UNKNOWN_HANDLE, and gives none, if
        one has not."""
        for handle_id in handle_ids:
            if handle_id not in self.received_fds:
                raise HotKVError(
                    Reason.UNKNOWN_HANDLE,
                    f"layout.handles: no descriptor for {handle_id!r} has come over the descriptor "
                    "socket",
                )
        return {handle_id: self.received_fds.pop(handle_id) for handle_id in handle_ids}

    def forget(self, handle_ids: Sequence[str]) -> None:
        """Closes descriptors of a link that has failed, before anything is made of them."""
        for handle_id in handle_ids:
            if handle_id == FENCE_HANDLE and self.fence is not None:
                self.fence.close()
                self.fence = None
            elif handle_id in self.received_fds:
                os.close(self.received_fds.pop(handle_id))

    def cancel_transfers(self) -> None:
        """Asks all of its transfers to end early. From any thread."""
        for job in list(self.jobs.values()):
            job.cancel()

    def check_fence(self, fence_index: int) -> None:
        """Raises INVALID_FIELD unless a store with this fence index can be revoked; 0 stands for a
        store that never is."""
        if not 0 <= fence_index < FENCE_WORDS:
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"fence_index is {fence_index}; allowed are 0 (for none) to {FENCE_WORDS - 1}",
            )
        if fence_index and self.fence is None:
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"fence_index is {fence_index}, but this session has linked no fence, so that the "
                f"store could not be revoked; send the page's descriptor as {FENCE_HANDLE!r} with "
                "the link, or 0 for a store that is never revoked",
            )
        if fence_index and self.fence is not None and not self.fence.is_whole():
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"fence_index is {fence_index}, but the file of the fence is shorter than its "
                f"{FENCE_WORDS * 4} bytes by now; open another session with a whole one",
            )

    def is_revoked(self, fence_index: int) -> bool:
        """True if the engine has taken the store's blocks back, or could not have said so. Asked
        after a copy and before its commit, so that no overwritten bytes are kept.
        """
        if not fence_index:
            return False
        if self.fence is None:
            return True
        return (
            not self.fence.is_whole()
            or ctypes.c_uint32.from_address(self.fence.address + 4 * fence_index).value != 0
        )

    def release_memory(self) -> None:
        """Unmaps its memory, closes descriptors that were never registered, and ends the link."""
        if self.memory is not None:
            self.memory.close()
            self.memory = None
        if self.fence is not None:
            self.fence.close()
            self.fence = None
        for fd in self.received_fds.values():
            os.close(fd)
        self.received_fds.clear()
        if self.close_link is not None:
            self.close_link()
            self.close_link = None
