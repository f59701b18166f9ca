"""The scheduler side's state of a resident request. A block's *name* is the hash under which the
server stores it; a *private* name is one that no other request has.

Always true:
- `Resident.places` says where the server holds the first `Resident.kept` blocks, in order and
  without gaps.
- A block's name does not change while the server has pinned it for the request.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hotkv_client.types import Int64s, ResidencyOpened, ResidentBlocks
from hotkv_proto.errors import HotKVError
from hotkv_sparse.vllm.device_pool import DevicePool
from hotkv_sparse.vllm.scheduler.rows import RowNames
from hotkv_sparse.vllm.step import FileId, KeptBlocks, ResidentRow
from hotkv_vllm.scheduler.request import RequestState

ENDLESS = 1 << 40


# ---------------------------------------------------------------------------------------- a request


@dataclass(slots=True, eq=False)
class Resident:
    """The fields of a request. A position is the index of a block in the context.

    most_blocks: that the request can ever have.
    group: of the session; all block numbers are of it.

    Blocks:
    computed: the most complete blocks ever.
    kept: leading blocks that are pinned, at `places`, of which workers have `sent`.
    sent_pin, sent_hot: what the workers have.
    asked: the pin call in flight, and its positions.
    asks_again: a hit was asked to be pinned; `ResidentRequests.usable_tokens` has not decided yet.
    storing: first position of each store in flight, by store id.
    named: the most `names` under this `residency_id`: even from `kept` on the server may have
        pinned these.
    private_from: names from here on are private, hashed with `salt`, a secret of this engine.

    Reservation:
    opening: the call in flight, for `asked_room` blocks on connection `asked_stream`.
    wanted: blocks for which the request should have room now.
    asks_ahead: False once the arena was too small: then only for present blocks.
    opening_s, asked_s: time of the last step before the calls.
    stream: connection on which the residency is open.
    is_held: left out of steps because its next block has no room.
    opened: the last successful answer.
    pin: the `opened` that the workers have; the old one until all blocks are at their old offsets.
    refusal: the server will never reserve room.
    was_refused: was logged and counted.
    has_lost_room: had room before a reconnect, and has none now.

    Waiting and losses:
    waited_s: without any progress of the server, until the last step at `seen_s`. Too long fails
        the request.
    must_be_whole: has waited too long, and not moved since: begins wholly on the device, if it fits
        there.
    was_whole: could stay on the device in the last step; when it no longer can, `waited_s` begins
        anew.
    is_lost: blocks were lost; until `begin_anew`.
    has_failed: vLLM was made to end it with an error.
    num_losses: without a new token in between; the last at `tokens_at_loss`.
    """

    state: RequestState
    most_blocks: int
    residency_id: str
    salt: bytes = b""
    group: int = 0
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
        pin = None if self.asked is None else self.asked[0]
        calls = (self.opening, self.opening_s), (pin, self.asked_s)
        return any(call and not call.done() and sent_s < since_s for call, sent_s in calls)

    @property
    def offsets(self) -> Int64s:
        """int64 [kept]."""
        nothing = np.empty(0, np.int64)
        return np.concatenate([nothing, *(place.offsets for place in self.places)])

    def name(self, hashes: Sequence[bytes], until: int, num_shared: int) -> Sequence[bytes]:
        """Names blocks up to `until`, as far as `hashes` reaches, and returns all names.

        hashes: from the first block on (shared or vLLM's, see `CachedGroups`).
        num_shared: leading blocks that are named by their hash; others get private names.
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
        """Records pinned blocks up to the first that the server lacks, from which on all are stored
        again. Returns their number.

        first: position of the first block in `found`.
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

    @property
    def stored_blocks(self) -> int:
        """Leading blocks that were considered for a store."""
        return self.state.store.stored_blocks[self.group]

    def store_from(self, block: int) -> None:
        mine = self.state.store
        mine.stored_blocks[self.group] = min(mine.stored_blocks[self.group], block)
        mine.due_tokens = 0

    def store_beside(self, *, is_wanted: bool) -> None:
        """Whether blocks of other groups are stored, from the first on."""
        mine = self.state.store
        for index in range(len(mine.stored_blocks)):
            if index != self.group:
                mine.stored_blocks[index] = 0 if is_wanted else ENDLESS

    def news(
        self,
        written_block: int,
        first_block: int,
        num_freed: int,
        hot: tuple[int, ...],
        context_tokens: int,
        new_tokens: int,
    ) -> ResidentRow:
        """The request's row in a step's message, with what workers lack, which then counts as
        sent."""
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
        """Begins anew after vLLM has freed the device blocks, or the server has lost some.
        Privately named blocks are stored again, and workers get all again.

        kept: leading blocks that are still pinned.
        """
        self.kept = min(kept, self.private_from)
        self.sent, self.sent_pin, self.sent_hot = 0, None, ()
        self.places = [place.up_to(self.kept) for place in self.places if place.first < self.kept]
        self.asked, self.asks_again, self.storing = None, False, {}
        del self.names[self.kept :]
        self.private_from = ENDLESS
        self.store_from(self.kept)
        self.store_beside(is_wanted=True)


# ------------------------------------------------------------------------------------ a step's rows


class ResidentRows:
    """tells_whole: workers follow requests that are wholly on the device too. Not on CUDA, where
    only moved ones attend sparsely.
    """

    def __init__(
        self,
        residents: Mapping[str, Resident],
        pool: DevicePool,
        block_tokens: int,
        tells_whole: bool,
    ) -> None:
        self._residents = residents
        self._pool = pool
        self._block_tokens = block_tokens
        self._tells_whole = tells_whole

    def __repr__(self) -> str:
        return f"ResidentRows({len(self._residents)} requests)"

    def fresh_hot_blocks(self, request_ids: Iterable[str]) -> list[int]:
        """Hot slots that workers do not know yet. The step counts as writing them: stores that
        still read them from their earlier use end first."""
        fresh: list[int] = []
        for request_id in request_ids:
            one = self._residents.get(request_id)
            if one is not None and not one.sent_hot:
                fresh += self._pool.hot_blocks(request_id)
        return fresh

    def of_step(self, scheduler_output: Any, names: RowNames) -> tuple[ResidentRow, ...]:
        """Must be called before vLLM adds the step's tokens to `num_computed_tokens`."""
        block_state = scheduler_output.kv_connector_block_state
        told = []
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            tables = block_state.get_block_ids(request_id)
            request = names.request(request_id)
            if tables is not None and request is not None:
                context_tokens = request.num_computed_tokens + num_tokens
                table = tables[self._pool.group]
                told.append(self._row(request_id, table, context_tokens, num_tokens))
        return tuple(told)

    def _row(
        self, request_id: str, table: Sequence[int], context_tokens: int, new_tokens: int
    ) -> ResidentRow:
        written = int(table[(context_tokens - 1) // self._block_tokens])
        one = self._residents.get(request_id)
        num_freed = self._pool.num_freed(request_id)
        if one is None:
            # Always fits on the device, or was admitted with other weights: then the server's
            # blocks are unknown, and it is lost if its device blocks were freed.
            return ResidentRow(request_id, written, int(table[0]), num_freed > 0, num_freed)
        if not self._tells_whole and not self._pool.is_moved(request_id):
            return ResidentRow(request_id, written, int(table[0]), False, 0)
        hot = self._pool.hot_blocks(request_id)
        return one.news(written, int(table[0]), num_freed, hot, context_tokens, new_tokens)
