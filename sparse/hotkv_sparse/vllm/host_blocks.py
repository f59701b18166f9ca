"""Numbers the blocks of requests in the server's arena (*host blocks*), stores them there from the
registered KV cache, and says where they lie. Used by one thread.

Always true:
- A host block belongs to one request, whose residency holds it until `release`.
- It is ready only when the server has pinned it there.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hotkv_client import BlockRun, ResidencyOpened, Session
from hotkv_client.types import GroupHashes
from hotkv_proto.blocks import StoreOptions, TransferResult, TransferStatus
from hotkv_proto.errors import HotKVError, Reason, invalid

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
NOT_READY, NOT_HELD = -1, -1


@dataclass(slots=True)
class _Request:
    """blocks: by block hash, in the order of their positions in the residency."""

    opened: ResidencyOpened | None = None
    blocks: dict[bytes, int] = field(default_factory=dict)


class HostBlocks:
    """session: its registered memory is the KV cache, of one group.
    num_blocks: most at the same time.
    timeout_s: for an answer.
    """

    def __init__(self, session: Session, num_blocks: int, timeout_s: float = 30.0) -> None:
        arena = session.arena()
        if arena is None:
            raise invalid("session has no arena; connect it to a hotkv-server of this node")
        self.num_blocks = num_blocks
        self._session, self._arena, self._timeout_s = session, arena, timeout_s
        self._requests: dict[str, _Request] = {}
        # Of each host block: residency, position in it, block hash.
        self._names: dict[int, tuple[str, int, bytes]] = {}
        self._offsets = np.full(num_blocks, NOT_READY, np.int64)
        # Id and answer of each running store.
        self._stores: dict[int, tuple[str, Future[TransferResult]]] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_stores = 0

    def __repr__(self) -> str:
        return (
            f"HostBlocks({len(self._names)} of {self.num_blocks}, ready "
            f"{int((self._offsets >= 0).sum())}, being stored {len(self._stores)})"
        )

    # ----------------------------------------------------------------------------------- requests

    @property
    def request_ids(self) -> list[str]:
        return list(self._requests)

    def of(self, request_id: str, hashes: Iterable[bytes]) -> I32:
        """Host blocks, int32; NOT_HELD where the request has none."""
        held = self._requests.get(request_id, _Request()).blocks
        return np.array([held.get(one, NOT_HELD) for one in hashes], np.int32)

    def hold(self, request_id: str, hashes: Iterable[bytes]) -> I32:
        """The same, with new ones where it had none. Those that the server has are ready.

        Raises OVERLOADED, NO_ROOM_FOR_RESIDENCY or RESIDENCY_TOO_LARGE without room; nothing has
        changed.
        """
        hashes = list(hashes)
        request = self._requests.get(request_id, _Request())
        new = [one for one in dict.fromkeys(hashes) if one not in request.blocks]
        if len(new) > len(self._free):
            raise HotKVError(
                Reason.OVERLOADED,
                f"{len(new)} new blocks, {len(self._free)} free host blocks; finish a request, or "
                "raise num_blocks",
            )
        if new:
            residency, num_held = f"offloading:{request_id}", len(request.blocks)
            opened = self._session.open_residency(residency, {0: num_held + len(new)})
            request.opened = opened.result(self._timeout_s)
            self._requests[request_id] = request
            for position, block_hash in enumerate(new, num_held):
                block = request.blocks[block_hash] = self._free.pop()
                self._names[block] = residency, position, block_hash
            self._pin(request.blocks[one] for one in new)
        return self.of(request_id, hashes)

    def release(self, request_id: str) -> I32:
        """Ends a request, and returns its host blocks, which are free."""
        blocks = np.array(list(self._requests[request_id].blocks.values()), np.int32)
        self.finish(blocks)
        del self._requests[request_id]
        self._session.close_residency(f"offloading:{request_id}")
        self._offsets[blocks] = NOT_READY
        for block in blocks.tolist():
            del self._names[block]
            self._free.append(block)
        return blocks

    # -------------------------------------------------------------------------------------- states

    def is_in_server(self, hashes: Sequence[bytes]) -> Mask:
        """Whether the server has these blocks, held or not."""
        if not hashes:
            return np.zeros(0, np.bool_)
        found = self._session.probe(0, hashes)
        if found is None:
            (found,) = self._session.lookup([GroupHashes(0, hashes)]).result(self._timeout_s)
        return found

    def is_ready(self, blocks: I32) -> Mask:
        self._settle(blocks)
        ready: Mask = self._offsets[blocks] >= 0
        return ready

    def is_lacking(self, blocks: I32) -> Mask:
        """Neither ready nor being stored."""
        is_ready = self.is_ready(blocks)
        is_stored = np.array([block in self._stores for block in blocks.tolist()], np.bool_)
        lacking: Mask = ~(is_ready | is_stored)
        return lacking

    def check_ready(self, blocks: I32) -> None:
        """Raises INVALID_FIELD if a block is not ready."""
        is_ready = self.is_ready(blocks)
        if not is_ready.all():
            raise invalid(
                f"host blocks {blocks[~is_ready].tolist()} are not stored; prepare_store, swap out "
                "in every layer, then complete_store"
            )

    # ------------------------------------------------------------------------- reading and storing

    def addresses(self, blocks: I32) -> I64:
        """Of slots, int64; `check` after reading. Raises INVALID_FIELD if a block is not ready."""
        self.check_ready(blocks)
        addresses: I64 = self._arena.memory.ctypes.data + self._offsets[blocks]
        return addresses

    def check(self) -> None:
        """After reading: raises UNKNOWN_RESIDENCY if the bytes may be wrong."""
        opened = [one.opened for one in self._requests.values() if one.opened is not None]
        if not all(self._arena.holds(one) for one in opened):
            raise HotKVError(
                Reason.UNKNOWN_RESIDENCY,
                "the server no longer keeps the requests' blocks; compute them anew",
            )

    def store(self, blocks: I32, device_blocks: I32) -> "list[Future[TransferResult]]":
        """Begins to store those that are neither ready nor being stored."""
        lacks, begun = self.is_lacking(blocks), list[Future[TransferResult]]()
        device_of = dict(zip(blocks[lacks].tolist(), device_blocks[lacks].tolist(), strict=True))
        for run in self._runs(device_of):
            residency, depth, _ = self._names[run[0]]
            self._num_stores += 1
            hashes, places = [self._names[one][2] for one in run], [device_of[one] for one in run]
            call = f"{residency}-{self._num_stores}"
            runs = [BlockRun(0, hashes, np.array(places, np.int32), depth=depth)]
            options = StoreOptions(residency_id=residency)
            begun.append(self._session.store(call, call, runs, self._timeout_s, options))
            self._stores |= dict.fromkeys(run, (call, begun[-1]))
        return begun

    def finish(self, blocks: I32) -> None:
        """Returns when no store reads the device's pages of these blocks."""
        running = {self._stores[one] for one in blocks.tolist() if one in self._stores}
        wait_futures([store for _, store in running], self._timeout_s)
        for call, store in running:
            if not store.done():
                self._session.cancel(call)
        self._settle(blocks)

    def _settle(self, blocks: I32) -> None:
        """Makes blocks ready whose store has ended well; the others may be stored again."""
        if not self._stores:
            return
        mine = [block for block in dict.fromkeys(blocks.tolist()) if block in self._stores]
        ended = [block for block in mine if self._stores[block][1].done()]
        stores = {block: self._stores.pop(block)[1] for block in ended}
        self._pin(block for block, store in stores.items() if ended_well(store))

    def _pin(self, blocks: Iterable[int]) -> None:
        for run in self._runs(blocks):
            residency, first, _ = self._names[run[0]]
            hashes = [self._names[block][2] for block in run]
            answer = self._session.extend_residency(residency, 0, first, hashes)
            self._offsets[run] = answer.result(self._timeout_s).offsets

    def _runs(self, blocks: Iterable[int]) -> Iterator[list[int]]:
        """In runs of consecutive positions of a residency."""
        ordered = sorted((self._names[block], block) for block in blocks)
        numbered = enumerate((*name[:2], block) for name, block in ordered)
        for _, run in itertools.groupby(numbered, lambda one: (one[1][0], one[1][1] - one[0])):
            yield [block for _, (_, _, block) in run]


def ended_well(store: "Future[TransferResult]") -> bool:
    is_done = store.done() and not store.cancelled() and store.exception() is None
    return is_done and store.result().status is TransferStatus.DONE
