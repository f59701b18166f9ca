"""Which loads are in progress, and how they end."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hotkv_vllm.link import logger
from hotkv_vllm.metadata import LoadJob

# ---------------------------------------------------------------------------- orders to the workers


class LoadOrders:
    """Orders for the next step, and the loads whose end vLLM awaits.

    The workers get an order to begin each of these or to report it as failed; its end is handled
    once. Fallbacks use the attributes directly, because a method of this class may be what raised.

    jobs: to begin, by request id.
    abandoned: requests whose load was never begun, to report as failed.
    awaited: requests that wait in vLLM for their load's end.
    """

    def __init__(self, num_ranks: int) -> None:
        self.quarantine = Quarantine(num_ranks)
        self.jobs: dict[str, LoadJob] = {}
        self.cancelled: list[str] = []
        self.abandoned: list[str] = []
        self.awaited: set[str] = set()

    def __repr__(self) -> str:
        return (
            f"LoadOrders({len(self.jobs)} to begin, {len(self.cancelled)} to cancel, "
            f"{len(self.awaited)} awaited, {self.quarantine})"
        )

    def begin(self, job: LoadJob, blocks: Any) -> None:
        self.quarantine.begun(job, blocks)
        self.jobs[job.request_id] = job
        self.awaited.add(job.request_id)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def abandon(self, request_id: str) -> None:
        """Before the workers begin the load."""
        self.jobs.pop(request_id, None)
        self.abandoned.append(request_id)
        self.quarantine.loading.pop(request_id, None)
        self.awaited.add(request_id)

    def ended(self, request_ids: Iterable[str]) -> Iterator[str]:
        for request_id in request_ids:
            if request_id in self.awaited:
                self.awaited.discard(request_id)
                self.quarantine.loading.pop(request_id, None)
                yield request_id

    def take(self) -> tuple[tuple[LoadJob, ...], tuple[str, ...], tuple[str, ...]]:
        """The loads to begin, and the request ids to cancel and to report as failed."""
        taken = tuple(self.jobs.values()), tuple(self.cancelled), tuple(self.abandoned)
        self.jobs = {}
        self.cancelled = []
        self.abandoned = []
        return taken


# ----------------------------------------------------------------------------- blocks of hung loads


@dataclass(frozen=True, slots=True)
class _Load:
    transfer_id: str
    blocks: tuple[Any, ...]


class Quarantine:
    """Keeps the blocks of hung loads out of vLLM's pool; the load's own request goes on in others.

    The scheduler takes a reference to the blocks before a worker may report the load as failed:
    workers wait until a message lists it in `held`. The blocks return when all ranks report in one
    step that the server can't write to them. Both are repeated in every step, so a lost message
    costs one.

    Meanwhile the pool's `num_gpu_blocks` is smaller by them: vLLM resets its prefix cache, as a
    pause or a sleep needs, only if no block is in use.

    pool: None: no block is held, and a request whose load hangs waits for the server.
    loading: by request, the loads whose end vLLM does not know.
    kept: vLLM's objects for the withheld blocks, by transfer id.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.loading: dict[str, _Load] = {}
        self.kept: dict[str, tuple[Any, ...]] = {}
        self.pool: Any = None

    def __repr__(self) -> str:
        return (
            f"Quarantine({len(self.loading)} loading, {self.num_blocks} blocks of "
            f"{len(self.kept)} loads held)"
        )

    @property
    def held(self) -> tuple[str, ...]:
        return tuple(self.kept)

    @property
    def num_blocks(self) -> int:
        return sum(len(blocks) for blocks in self.kept.values())

    def begun(self, job: LoadJob, blocks: Any) -> None:
        """blocks: vLLM's `KVCacheBlocks`."""
        written = {block for run in job.runs for block in run.block_ids.tolist()}
        mine = {
            block.block_id: block
            for group in blocks.blocks
            for block in group
            if block.block_id in written
        }
        self.loading[job.request_id] = _Load(job.transfer_id, tuple(mine.values()))

    def overdue(self, transfer_ids: Iterable[str]) -> int:
        """Withholds the blocks of hung loads. Number of loads not withheld before."""
        if self.pool is None:
            return 0
        wanted = set(transfer_ids) - self.kept.keys()
        num_new = 0
        for request_id, load in self.loading.items():
            if load.transfer_id in wanted:
                self.kept[load.transfer_id] = load.blocks
                self.pool.touch(load.blocks)
                self.pool.num_gpu_blocks -= len(load.blocks)
                num_new += 1
                logger.warning(
                    "hotkv: the server does not end the load of request %s; the request goes on "
                    "without it, and %d blocks are out of use "
                    "until the server answers or is stopped",
                    request_id,
                    len(load.blocks),
                )
        return num_new

    def settled(self, ranks_of: Mapping[str, Collection[int]]) -> None:
        """ranks_of: by transfer id, the ranks to whose memory it can't write any more."""
        for transfer_id, ranks in ranks_of.items():
            if len(ranks) >= self._num_ranks and transfer_id in self.kept:
                blocks = self.kept.pop(transfer_id)
                self.pool.free_blocks(blocks)
                self.pool.num_gpu_blocks += len(blocks)


# ----------------------------------------------------------------------- requests whose load failed

ADMISSION_PATIENCE_S = 0.25
"""While failed requests wait to be scheduled, a granted hit waits no longer for admission."""


class FailedLoads:
    """Requests whose load failed and that vLLM has not scheduled since.

    With vLLM 0.32's `kv_load_failure_policy` `recompute`, they could stall a full engine for ever
    in two ways (vllm-project/vllm#44560; similar: #53868, #57841):

    - vLLM keeps blocks reserved for a failed request until it schedules it, and admits loads, but
      not computations, only beside all reservations. So `outwait` drops hits.
    - vLLM leaves a failed request at the head of its queue of requests that hold blocks. Without
      room for it, those behind never run. So `steps_aside` answers 'ask again' once, and vLLM
      moves it to its ordinary queue.
    """

    def __init__(self) -> None:
        self.waiting: set[str] = set()
        self._in_the_way: set[str] = set()

    def __len__(self) -> int:
        return len(self.waiting | self._in_the_way)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.waiting

    def __repr__(self) -> str:
        return f"FailedLoads({len(self.waiting)} wait, {len(self._in_the_way)} in the way)"

    def add(self, request_id: str) -> None:
        self.waiting.add(request_id)
        self._in_the_way.add(request_id)

    def steps_aside(self, request_id: str) -> bool:
        """True once per failed load: vLLM must be answered 'ask again'."""
        if request_id not in self._in_the_way:
            return False
        self._in_the_way.discard(request_id)
        return True

    def outwait(self, granted_s: float, now_s: float) -> bool:
        return bool(self.waiting) and now_s > granted_s + ADMISSION_PATIENCE_S

    def scheduled(self, request_ids: Iterable[str]) -> None:
        """vLLM drops the reservations of requests that run."""
        if self.waiting:
            self.waiting.difference_update(request_ids)

    def ended(self, request_id: str) -> None:
        self.waiting.discard(request_id)
        self._in_the_way.discard(request_id)


# ------------------------------------------------------------------------- loads of the same blocks


REPORTED_S = 5.0
"""Workers report a load's end within this time after its limit, even if the server hangs."""


@dataclass(frozen=True, slots=True)
class _Brings:
    """end_tokens: length of the hit that is loaded.
    name: hash of its last block in the first group, over all its tokens.
    """

    end_tokens: int
    name: bytes
    until_s: float


class CommonLoads:
    """Finds the load for which a request should wait: the loaded hit is a part of its own, and at
    least half of what it would load.

    vLLM puts loaded blocks into its prefix cache only at the load's end, so requests that arrive
    together would each load and hold a copy.
    """

    def __init__(self) -> None:
        self.loads: dict[str, _Brings] = {}

    def __repr__(self) -> str:
        return f"CommonLoads({len(self.loads)})"

    def begin(self, request_id: str, end_tokens: int, name: bytes, until_s: float) -> None:
        self.loads[request_id] = _Brings(end_tokens, name, until_s)

    def ended(self, request_id: str) -> None:
        self.loads.pop(request_id, None)

    def awaited(
        self,
        computed_tokens: int,
        hit_tokens: int,
        name_at: Callable[[int], bytes],
        now_s: float,
    ) -> str:
        """Empty if the asking request should not wait.

        computed_tokens: its hit in vLLM's own prefix cache.
        hit_tokens: its whole hit.
        name_at: hash of its block in the first group that ends at a number of tokens.
        """
        least = (computed_tokens + hit_tokens) / 2
        return next(
            (
                request_id
                for request_id, one in self.loads.items()
                if least <= one.end_tokens <= hit_tokens
                and now_s < one.until_s
                and name_at(one.end_tokens) == one.name
            ),
            "",
        )


# ------------------------------------------------------------------------ loads of other connectors


class OtherLoads:
    """hotkv stores no KV that another connector of a MultiConnector may have failed to load.

    - Asynchronous: vLLM counts the tokens as computed at once, so the request is not stored until a
      step runs it.
    - Synchronous: requests admitted for the step, or for later ones before its output, are not
      stored until that output; if the load failed, never.

    held: requests that run, but must not be stored now.
    """

    def __init__(self) -> None:
        self._admitted: set[str] = set()
        self._unsettled: dict[int, set[str]] = {}
        self._distrusted: set[str] = set()
        self._last_step = 0
        self.held: set[str] = set()

    def __repr__(self) -> str:
        return (
            f"OtherLoads(admitted={len(self._admitted)}, unsettled={len(self._unsettled)}, "
            f"held={len(self.held)})"
        )

    def admitted(self, request_id: str) -> None:
        self._admitted.add(request_id)

    def ended(self, request_id: str) -> None:
        for requests in (self._admitted, self._distrusted, self.held, *self._unsettled.values()):
            requests.discard(request_id)

    def may_store(self, request_id: str) -> bool:
        """Whether the blocks surely hold all tokens that vLLM counts as computed."""
        return request_id not in self._admitted and request_id not in self.held

    def step(self, running: Collection[str], has_sync_loads: bool) -> int:
        """Number for workers to report at the step's end; 0: no report needed.

        has_sync_loads: of another connector.
        """
        ran = {request_id for request_id in self._admitted if request_id in running}
        self._admitted -= ran
        if not has_sync_loads and not self._unsettled:
            return 0
        self._last_step += 1
        self._unsettled[self._last_step] = ran
        self.held |= ran
        return self._last_step

    def lost(self) -> None:
        """The planning of a step raised, so which requests it runs is unknown."""
        self._distrusted |= self._admitted
        self.held |= self._admitted

    def settled(self, step: int, went_well: bool) -> None:
        """Reports come in order: an earlier open step has lost its report, and its admitted
        requests are never stored.

        went_well: False if a synchronous load failed.
        """
        for number in sorted(self._unsettled):
            if number > step and went_well:
                break
            requests = self._unsettled[number] if number > step else self._unsettled.pop(number)
            if not went_well or number < step:
                self._distrusted |= requests
        self.held = self._distrusted.union(*self._unsettled.values())
