"""The scheduler side's state of a resident request (a request whose old blocks may be only in the
server's memory): which of its blocks the server has pinned and where, the blocks' names, and what
was sent to the workers. A block's *name* is the hash under which the server stores the block.

Always true:
- `Resident.places` says where the server holds the request's first `Resident.kept` blocks, in order
  and without gaps.
- The name of a block does not change as long as the server has pinned the block for the request.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hotkv_client.types import Int64s, ResidencyOpened, ResidentBlocks
from hotkv_proto.errors import HotKVError
from hotkv_vllm.compat.residency import DevicePool
from hotkv_vllm.residency.step import FileId, KeptBlocks, ResidentRow
from hotkv_vllm.scheduler.request import RequestState
from hotkv_vllm.sparse.rows import RowNames

ENDLESS = 1 << 40


# ---------------------------------------------------------------------------------------- a request


@dataclass(slots=True, eq=False)
class Resident:
    """The state of a resident request (a request whose old blocks may be only in the server's
    memory). A position is the index of a block in the request's context. A block's name is the hash
    under which the server stores it.

    most_blocks: the largest number of blocks that the request can ever have.
    residency_id: id of the request's residency, the server's record of its reserved room and pinned
        blocks.

    Blocks:
    computed: the largest number of complete blocks that the request has ever had.
    kept: number of leading blocks that the server has pinned.
    places: where the server holds these blocks, in order.
    sent: number of `places` that were sent to the workers.
    sent_pin, sent_hot: the pin and the hot slots (device blocks for copies of selected blocks) that
        were last sent to the workers.
    asked: the call in flight that asks the server to pin more blocks, and the positions of these
        blocks; None without a call in flight.
    asks_again: True if the server was asked to pin the blocks of the request's hit, and
        `ResidentRequests.usable_tokens` has not yet decided how much of this hit is used.
    storing: by id of a store in flight, the position of the first block that it stores.
    names: the names of the first blocks, in order, as far as names were needed.
    named: the largest length that `names` has had since `residency_id` was chosen. At each position
        below this number the server may have pinned a block, even at a position from `kept` on.
    private_from: from this position on, blocks have private names, which no other request has.
        Private names are hashed with `salt`, a secret of this engine.

    Reservation:
    opening: the reservation call in flight; None without a call in flight.
    wanted: number of blocks for which the request should have room now.
    asks_ahead: False once the server has refused a reservation as too large for its arena. The
        request then asks for no more room than its present blocks need.
    room: number of blocks for which the server has reserved room; 0 before the reservation.
    opening_s, asked_s: time of the last step before the calls `opening` and `asked` were sent.
    asked_room, asked_stream: the number of blocks in the last reservation call, and the number of
        the connection (stream) that the call used.
    stream: number of the connection on which the residency is open.
    is_held: True if the request is left out of steps because its next block would have no room in
        the server.
    opened: the server's answer to the last successful reservation call; None before the answer.
    pin: the value of `opened` that the workers have: with it they test whether the kept blocks are
        still pinned. After a reconnect it stays the old answer until the server has confirmed that
        it has pinned the blocks at their old offsets.
    refusal: the server's error if the server will never reserve room; None otherwise.
    was_refused: True once a refusal was logged and counted.
    has_lost_room: True if the request had room before a reconnect, and the server has none for it
        now.
    ask_at_s: earliest time of the next reservation call.

    Waiting and losses:
    waited_s: number of seconds for which the server has made no progress for the request: it
        neither reserved room nor pinned a block. Counted until `seen_s`, the time of the last step.
        The request fails if the wait becomes too long.
    must_be_whole: True once the request has waited too long for the server. It then begins wholly
        on the device, if it fits there.
    was_whole: True if all blocks of the request could stay on the device in the last step. When
        they no longer can, `waited_s` begins anew.
    is_lost: True from the time the server has lost blocks of the request until `begin_anew`; vLLM
        must compute the request anew.
    has_failed: True once vLLM was made to end the request with an error.
    num_losses: number of losses of blocks in succession, without a new token in between.
    tokens_at_loss: length of the request at the last loss.
    """

    state: RequestState
    most_blocks: int
    residency_id: str
    salt: bytes = b""
    opening: "Future[ResidencyOpened] | None" = None
    opened: ResidencyOpened | None = None
    pin: ResidencyOpened | None = None
    refusal: HotKVError | None = None
    stream: int = 0
    wanted: int = 0
    asks_ahead: bool = True
    room: int = 0
    opening_s: float = 0.0
    asked_s: float = 0.0
    asked_room: int = 0
    asked_stream: int = 0
    is_held: bool = False
    arrived_s: float = 0.0
    ask_at_s: float = 0.0
    was_refused: bool = False
    has_lost_room: bool = False
    computed: int = 0
    kept: int = 0
    places: list[KeptBlocks] = field(default_factory=list)
    sent: int = 0
    sent_pin: ResidencyOpened | None = None
    sent_hot: tuple[int, ...] = ()
    asked: "tuple[Future[ResidentBlocks], range] | None" = None
    asks_again: bool = False
    storing: dict[int, int] = field(default_factory=dict)
    names: list[bytes] = field(default_factory=list)
    named: int = 0
    private_from: int = ENDLESS
    seen_s: float = 0.0
    waited_s: float = 0.0
    must_be_whole: bool = False
    was_whole: bool = False
    is_lost: bool = False
    has_failed: bool = False
    num_losses: int = 0
    tokens_at_loss: int = 0

    @property
    def request_id(self) -> str:
        request_id: str = self.state.request.request_id
        return request_id

    def is_unanswered(self, since_s: float) -> bool:
        """Returns True if a call that was sent before `since_s` has no answer."""
        pin = None if self.asked is None else self.asked[0]
        calls = (self.opening, self.opening_s), (pin, self.asked_s)
        return any(call and not call.done() and sent_s < since_s for call, sent_s in calls)

    @property
    def offsets(self) -> Int64s:
        """Returns the arena offsets of the blocks that the server has pinned, int64 [kept]."""
        nothing = np.empty(0, np.int64)
        return np.concatenate([nothing, *(place.offsets for place in self.places)])

    def name(self, hashes: Sequence[bytes], until: int, num_shared: int) -> Sequence[bytes]:
        """Determines the names of the first `until` blocks (the hashes under which the server
        stores them), as far as `hashes` reaches, and returns all names. Names that a block already
        has do not change.

        hashes: the hashes of the request's blocks, from the first block on (shared names or vLLM's
            hashes, see `CachedGroups`).
        num_shared: number of leading blocks that other requests may use. The name of such a block
            is its hash. Later blocks get private names, which no other request has.
        """
        shared = min(num_shared, self.private_from)
        for place in range(len(self.names), min(until, len(hashes))):
            name = bytes(hashes[place])
            if place >= shared:
                self.private_from = min(self.private_from, place)
                secret = b"hotkv-private;" + self.salt + self.residency_id.encode() + name
                name = hashlib.sha256(secret).digest()[: len(name)]
            self.names.append(name)
        self.named = max(self.named, len(self.names))
        return self.names

    def keep(self, first: int, found: ResidentBlocks, file_id: FileId) -> int:
        """Records where the server has pinned blocks, up to the first block that the server lacks.
        Returns the number of recorded blocks. If a block is missing, this block and all later
        blocks must be stored again.

        first: index in the request of the first block that `found` describes.
        found: the server's answer: an arena offset per block, negative for a missing block.
        file_id: identifies the arena in which these offsets are.
        """
        missing = np.flatnonzero(found.offsets < 0)
        count = int(missing[0]) if len(missing) else len(found.offsets)
        if count:
            offsets, sketches = found.offsets[:count], found.sketches[:count]
            self.places.append(KeptBlocks(first, offsets, sketches, file_id))
            self.kept = first + count
        if len(missing):
            self.store_from(first + count)
        return count

    def store_from(self, block: int) -> None:
        """Makes the next step consider all blocks from position `block` on for storing again."""
        mine = self.state.store
        mine.stored_blocks[0] = min(mine.stored_blocks[0], block)
        mine.due_tokens = 0

    def news(
        self,
        written_block: int,
        first_block: int,
        num_freed: int,
        hot: tuple[int, ...],
        context_tokens: int,
        new_tokens: int,
    ) -> ResidentRow:
        """Returns the request's entry in a step's message to the workers. Of the pinned blocks, the
        hot slots and the pin, the entry contains only what was not sent to the workers before.
        Records it as sent.

        written_block: id of the last device block that the step writes for the request.
        first_block: id of the device block with the context's first tokens.
        num_freed: the blocks between the sinks (first blocks) and this position are not on the
            device.
        hot: ids of all hot slots (device blocks for copies of selected blocks) of the request.
        context_tokens: length of the context, including the step's `new_tokens`.
        """
        row = ResidentRow(
            self.request_id,
            written_block,
            first_block,
            True,
            num_freed,
            hot if hot != self.sent_hot else (),
            tuple(self.places[self.sent :]),
            self.pin if self.pin is not self.sent_pin else None,
            context_tokens,
            new_tokens,
        )
        self.sent_hot, self.sent, self.sent_pin = hot, len(self.places), self.pin
        return row

    def begin_anew(self, kept: int) -> None:
        """Resets the state after vLLM has freed the request's device blocks, or after the server
        has lost blocks. Only blocks with shared names count as pinned from now on: blocks with
        private names (which no other request has) are computed and stored again. The next message
        to the workers has all kept blocks, hot slots and the pin again.

        kept: number of leading blocks that the server still has pinned for the request.
        """
        self.kept = min(kept, self.private_from)
        self.sent, self.sent_pin, self.sent_hot = 0, None, ()
        self.places = [place.up_to(self.kept) for place in self.places if place.first < self.kept]
        self.asked, self.asks_again, self.storing = None, False, {}
        del self.names[self.kept :]
        self.private_from = ENDLESS
        self.store_from(self.kept)


# ------------------------------------------------------------------------------------ a step's rows


class ResidentRows:
    """Builds the entries (`ResidentRow`) of a step's message to the workers, one for each request
    of the step. The entries say where the blocks are that are not on the device.

    residents: the resident requests (requests whose old blocks may be only in the server's memory),
        by id.
    """

    def __init__(
        self, residents: Mapping[str, Resident], pool: DevicePool, block_tokens: int
    ) -> None:
        self._residents = residents
        self._pool = pool
        self._block_tokens = block_tokens

    def __repr__(self) -> str:
        return f"ResidentRows({len(self._residents)} requests)"

    def fresh_hot_blocks(self, request_ids: Iterable[str]) -> list[int]:
        """Returns the ids of the hot slots (device blocks for copies of selected blocks) that were
        not sent to the workers yet. They count as blocks that the coming step writes, so stores
        that still read them from their earlier use are ended or revoked first.

        request_ids: the requests whose hot slots are considered.
        """
        fresh: list[int] = []
        for request_id in request_ids:
            one = self._residents.get(request_id)
            if one is not None and not one.sent_hot:
                fresh += self._pool.hot_blocks(request_id)
        return fresh

    def of_step(self, scheduler_output: Any, names: RowNames) -> tuple[ResidentRow, ...]:
        """Returns the step's message to the workers: an entry for each request of the planned step.
        Must be called before vLLM adds the step's tokens to the requests' `num_computed_tokens`.

        names: holds vLLM's `Request` of each running request.
        """
        block_state = scheduler_output.kv_connector_block_state
        told = []
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            tables = block_state.get_block_ids(request_id)
            request = names.request(request_id)
            if tables is not None and request is not None:
                context_tokens = request.num_computed_tokens + num_tokens
                told.append(self._row(request_id, tables[0], context_tokens, num_tokens))
        return tuple(told)

    def _row(
        self, request_id: str, table: Sequence[int], context_tokens: int, new_tokens: int
    ) -> ResidentRow:
        written = int(table[(context_tokens - 1) // self._block_tokens])
        one = self._residents.get(request_id)
        num_freed = self._pool.num_freed(request_id)
        if one is None:
            # The request always fits on the device, or it was admitted with other weights. In the
            # second case its blocks in the server are not known, and the workers report it as lost
            # if its device blocks were freed.
            return ResidentRow(request_id, written, int(table[0]), num_freed > 0, num_freed)
        hot = self._pool.hot_blocks(request_id)
        return one.news(written, int(table[0]), num_freed, hot, context_tokens, new_tokens)
