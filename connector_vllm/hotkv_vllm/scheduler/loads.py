"""Tracks loads on the scheduler side: which are under way, how they end, and how much of the device
they may occupy. Scheduler thread only.

Five classes, each with a rule:
- `LoadOrders` collects the orders to the workers about loads.
- `Quarantine` withholds blocks from vLLM's pool while a hung server may still write to the blocks.
- `FailedLoads` prevents stalls of vLLM's scheduler after a failed load.
- `LoadRoom` limits how many loads hold device blocks at once.
- `OtherLoads` tracks loads of other connectors: blocks that such a load may have failed to fill
  must not be stored.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hotkv_vllm.compat.residency import ResidentManager
from hotkv_vllm.link import logger
from hotkv_vllm.metadata import LoadJob

# ---------------------------------------------------------------------------- orders to the workers


class LoadOrders:
    """The orders about loads that the next step carries to the workers, and the loads whose end
    vLLM awaits. Scheduler thread only.

    Always true: a load that vLLM awaits is begun, cancelled or abandoned in some step, and the
    load's end is handled once. Ends of other connectors' loads are ignored.

    If a hook (a method that vLLM calls) raises, its fallback reads and writes the plain attributes
    below and calls no methods of this class: a fault in a method must not break the fallback too.

    jobs: loads to begin, by request.
    cancelled: requests whose load the workers are to cancel.
    abandoned: requests whose load the workers are to report as failed.
    awaited: requests whose load's end vLLM awaits.
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

    @property
    def is_empty(self) -> bool:
        """Returns True if the next step has no orders about loads."""
        return not self.jobs and not self.cancelled and not self.abandoned

    def begin(self, job: LoadJob, blocks: Any) -> None:
        """Begins this load with the next step. `blocks` is vLLM's `KVCacheBlocks` of the
        request."""
        self.quarantine.begun(job, blocks)
        self.jobs[job.request_id] = job
        self.awaited.add(job.request_id)

    def cancel(self, request_id: str) -> None:
        """Cancels the request's load with the next step."""
        self.cancelled.append(request_id)

    def abandon(self, request_id: str) -> None:
        """Drops a load that vLLM awaits: the workers report the load as failed."""
        self.jobs.pop(request_id, None)
        self.abandoned.append(request_id)
        self.quarantine.loading.pop(request_id, None)
        self.awaited.add(request_id)

    def ended(self, request_ids: Iterable[str]) -> Iterator[str]:
        """Handles loads that a step reports as ended. Yields the requests with a load of this
        connector, and removes each from `awaited`."""
        for request_id in request_ids:
            if request_id in self.awaited:
                self.awaited.discard(request_id)
                self.quarantine.loading.pop(request_id, None)
                yield request_id

    def take(self) -> tuple[tuple[LoadJob, ...], tuple[str, ...], tuple[str, ...]]:
        """Returns loads to begin, and requests whose load is cancelled or abandoned. Each is
        returned once."""
        taken = tuple(self.jobs.values()), tuple(self.cancelled), tuple(self.abandoned)
        self.jobs = {}
        self.cancelled = []
        self.abandoned = []
        return taken


# ----------------------------------------------------------------------------- blocks of hung loads


@dataclass(frozen=True, slots=True)
class _Load:
    """A load in flight and the block objects of vLLM that it writes."""

    transfer_id: str
    blocks: tuple[Any, ...]


class Quarantine:
    """Keeps blocks of hung loads out of vLLM's pool until the server can't write to the blocks any
    more. Scheduler thread only.

    A hung server may write the blocks of a load at any later time, so no other request may get
    them. The load's own request need not wait, however.

    Always true: before a worker may report such a load as failed (the worker reads `held`), the
    pool counts another user of the load's blocks. So the blocks stay out of the pool when vLLM has
    freed the request's own use. The blocks return to the pool when all ranks report in one step
    that their transfer is over.

    Until then the pool is smaller by these blocks (`num_gpu_blocks`). Otherwise a pause or a sleep
    would fail: vLLM resets its prefix cache only if no block is in use. The two sides send each
    other their states in every step, so a lost message costs only a step.

    pool: vLLM's pool of device blocks. Without a pool no block is held, and requests wait for the
        server.
    loading: by request, loads whose end vLLM has not heard. Whoever reports the end to vLLM removes
        the entry.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.loading: dict[str, _Load] = {}
        self._held: dict[str, tuple[Any, ...]] = {}
        self.pool: Any = None

    def __repr__(self) -> str:
        return (
            f"Quarantine({len(self.loading)} loading, {self.num_blocks} blocks of "
            f"{len(self._held)} loads held)"
        )

    @property
    def held(self) -> tuple[str, ...]:
        """Returns the transfers whose blocks are kept out of vLLM's pool."""
        return tuple(self._held)

    @property
    def num_blocks(self) -> int:
        return sum(len(blocks) for blocks in self._held.values())

    def begun(self, job: LoadJob, blocks: Any) -> None:
        """Records a load that begins. `blocks` is vLLM's `KVCacheBlocks` of the request."""
        written = {block for run in job.runs for block in run.block_ids.tolist()}
        mine = {
            block.block_id: block
            for group in blocks.blocks
            for block in group
            if block.block_id in written
        }
        self.loading[job.request_id] = _Load(job.transfer_id, tuple(mine.values()))

    def overdue(self, transfer_ids: Iterable[str]) -> int:
        """Keeps the blocks of these transfers out of vLLM's pool. Returns how many of the transfers
        were not held before."""
        if self.pool is None:
            return 0
        wanted = set(transfer_ids) - self._held.keys()
        num_new = 0
        for request_id, load in self.loading.items():
            if load.transfer_id in wanted:
                self._held[load.transfer_id] = load.blocks
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

    def settled(self, num_ranks_of: Mapping[str, int]) -> None:
        """Returns to vLLM's pool the blocks of transfers that are over in all ranks.
        `num_ranks_of`: by transfer, the number of ranks in which the server can't write any
        more."""
        for transfer_id, num_ranks in num_ranks_of.items():
            if num_ranks >= self._num_ranks and transfer_id in self._held:
                blocks = self._held.pop(transfer_id)
                self.pool.free_blocks(blocks)
                self.pool.num_gpu_blocks += len(blocks)


# ----------------------------------------------------------------------- requests whose load failed

ADMISSION_PATIENCE_S = 0.25
"""How long a hit may wait for admission while requests whose load failed wait too."""


class FailedLoads:
    """Works around how vLLM's scheduler treats a request whose load failed. Holds the requests
    whose load failed and that vLLM has not scheduled since. Scheduler thread only.

    Source: the scheduler of vLLM 0.32 with `kv_load_failure_policy` `recompute`. Reservations came
    with vllm-project/vllm#44560; #53868 and #57841 describe stalls with the same end. Two things
    can stall a full engine for ever:

    - vLLM keeps reserving blocks for such a request until the request is scheduled. vLLM admits
      asynchronous loads (not plain prefills) only beside all reservations. If nothing else fits, a
      granted hit would wait for ever. So the hit is dropped after ADMISSION_PATIENCE_S, and its
      request is computed.
    - vLLM leaves such a request at the head of its queue of requests that hold blocks, although the
      request no longer holds any. If the request does not fit, the requests behind it never free
      their blocks. If the request is answered 'ask again' once, it moves to the ordinary queue.
    """

    def __init__(self) -> None:
        self._waiting: set[str] = set()
        self._in_the_way: set[str] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __repr__(self) -> str:
        return f"FailedLoads({len(self._waiting)} wait, {len(self._in_the_way)} in the way)"

    @property
    def is_empty(self) -> bool:
        """Returns True if there is no request whose load failed and that vLLM has not scheduled
        since."""
        return not self._waiting and not self._in_the_way

    def add(self, request_id: str) -> None:
        """Adds a request. vLLM has heard, or will hear, that the request's load failed."""
        self._waiting.add(request_id)
        self._in_the_way.add(request_id)

    def steps_aside(self, request_id: str) -> bool:
        """Returns True once per failed load, when vLLM asks for the request's hit: the request must
        then be answered 'ask again'."""
        if request_id not in self._in_the_way:
            return False
        self._in_the_way.discard(request_id)
        return True

    def outwait(self, granted_s: float, now_s: float) -> bool:
        """Returns True if a hit that was granted at `granted_s` should stop waiting."""
        return bool(self._waiting) and now_s > granted_s + ADMISSION_PATIENCE_S

    def scheduled(self, request_ids: Iterable[str]) -> None:
        """Removes requests that a step runs: vLLM has dropped their reservations."""
        if self._waiting:
            self._waiting.difference_update(request_ids)

    def ended(self, request_id: str) -> None:
        """Forgets a request."""
        self._waiting.discard(request_id)
        self._in_the_way.discard(request_id)


# ------------------------------------------------------------------------------- room on the device


@dataclass(slots=True)
class Holder:
    """The blocks of an admitted request: the number that the request holds now, and the largest
    number that it will hold until its prompt is computed."""

    held: int
    need: int


class LoadRoom:
    """Limits how many requests may hold device blocks for a load at once, if vLLM counts too few.

    vLLM lets a load begin if its blocks fit beside the blocks that all requests in their prompts
    still need. vLLM counts too few blocks for a sliding window or a chunk: it subtracts the
    request's whole table, freed blocks included, from the most blocks that the request ever holds
    at once (`SingleTypeKVCacheManager.get_num_blocks_to_allocate`, vLLM 0.32 and 0.33). So loads
    can fill the device, and then each loaded request waits for blocks that other loaded requests
    hold: a deadlock.

    Always true, for the requests that this connector loads, from their admission to their first
    step: either there is only one such request, or the device has room for each of them to end its
    prompt while the others keep their blocks. So the first request in vLLM's queue can run, and
    vLLM can preempt a request that runs. vLLM's own count is right for a request without blocks,
    and is used for such a request.

    A refused request begins next: later requests wait behind it. If vLLM schedules by priority,
    requests that it prefers do not wait. Scheduler thread only.

    holders: the requests that were admitted and have not run since.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._max_tokens = int(vllm_config.model_config.max_model_len)
        drafts = int(vllm_config.num_speculative_tokens)
        self._ahead = drafts and 1 + drafts + int(vllm_config.num_lookahead_tokens)
        # None if vLLM counts right.
        self._manager: Any = None
        self._needs: dict[str, int] = {}
        self._next: Any = None
        self._by_priority = str(vllm_config.scheduler_config.policy) == "priority"
        self.holders: dict[str, Holder] = {}

    def __repr__(self) -> str:
        return f"LoadRoom({self.holders}, next {self._next and self._next.request_id!r})"

    def bind(self, manager: Any) -> None:
        """Sets vLLM's block manager. Models with resident requests need no limit: their own manager
        counts such requests in full."""
        kinds = manager.coordinator.single_type_managers
        if not any(isinstance(one, ResidentManager) for one in kinds) and any(
            one.max_admission_blocks_per_request is not None for one in kinds
        ):
            self._manager = manager

    def comes(self, request: Any) -> None:
        """Computes how many blocks a request needs for which vLLM asks. The request has no blocks:
        it is new, was preempted, or its load has failed."""
        self.ended(request.request_id)
        if self._manager is None:
            return
        coordinator = self._manager.coordinator
        num_tokens = min(request.num_tokens, self._max_tokens)
        self._needs[request.request_id] = coordinator.get_num_blocks_to_allocate(
            request.request_id,
            min(num_tokens + self._ahead, self._max_tokens),
            tuple(() for _ in coordinator.single_type_managers),
            0,
            0,
            0,
            num_tokens,
            apply_admission_cap=True,
        )

    def has_room(self, request: Any) -> bool:
        """Returns True if the request may begin a load beside the other requests. `comes` must have
        been called for it."""
        is_first = self._next is None or (self._by_priority and request < self._next)
        if not is_first and request.request_id != self._next.request_id:
            return False
        others = self.holders.values()
        has_room = not others or (
            sum(one.held for one in others)
            + max(max(0, one.need - one.held) for one in others)
            + self._needs[request.request_id]
            # Does not count blocks of hung loads.
            < self._manager.block_pool.num_gpu_blocks
        )
        self._next = None if has_room else request
        return has_room

    def admitted(self, request_id: str, blocks: Any) -> None:
        """Records that vLLM has allocated blocks to the request, possibly for a load."""
        need = self._needs.pop(request_id, None)
        if need is not None:
            held = sum(not one.is_null for group in blocks.blocks for one in group)
            self.holders[request_id] = Holder(held, need)

    def ran(self, request_ids: Collection[str]) -> None:
        """Removes requests that a step runs: vLLM can preempt such requests if others lack
        blocks."""
        for request_id in self.holders.keys() & request_ids:
            del self.holders[request_id]

    def ended(self, request_id: str) -> None:
        """Forgets a request that has no blocks any more, or has ended."""
        self.holders.pop(request_id, None)
        self._needs.pop(request_id, None)
        if self._next is not None and self._next.request_id == request_id:
            self._next = None


# ------------------------------------------------------------------------ loads of other connectors


class OtherLoads:
    """Tracks loads of other connectors beside hotkv (MultiConnector), as far as storing depends on
    them. Scheduler thread only.

    Always true: no KV is stored that another connector may have failed to load.

    - vLLM counts tokens of an asynchronous load as computed from its start. A request is trusted
      again when a step runs it.
    - A synchronous load runs within the step that uses it, and its failure is known when the step's
      output has arrived. Until then no block is stored of the requests admitted since, because
      these requests may build on the load's blocks. If the load failed, the blocks of these
      requests are never stored.
    """

    def __init__(self) -> None:
        self._admitted: set[str] = set()
        self._unsettled: dict[int, set[str]] = {}
        self._distrusted: set[str] = set()
        self._last_step = 0
        self.held: set[str] = set()
        """Ids of requests that run, but whose blocks must not be stored."""

    def __repr__(self) -> str:
        return (
            f"OtherLoads(admitted={len(self._admitted)}, unsettled={len(self._unsettled)}, "
            f"held={len(self.held)})"
        )

    def admitted(self, request_id: str) -> None:
        """Records that vLLM has allocated blocks to the request. A load may be filling them."""
        self._admitted.add(request_id)

    def ended(self, request_id: str) -> None:
        """Forgets a request."""
        for requests in (self._admitted, self._distrusted, self.held, *self._unsettled.values()):
            requests.discard(request_id)

    def may_store(self, request_id: str) -> bool:
        """Returns True if the request's blocks hold all that vLLM counts as computed."""
        return request_id not in self._admitted and request_id not in self.held

    def step(self, running: Collection[str], has_sync_loads: bool) -> int:
        """Records a planned step. Returns the number under which the step's end must be reported; 0
        if the end does not matter."""
        if not self._admitted and not has_sync_loads and not self._unsettled:
            return 0
        ran = self._admitted.intersection(running)
        self._admitted -= ran
        if not has_sync_loads and not self._unsettled:
            return 0
        self._last_step += 1
        self._unsettled[self._last_step] = ran
        self.held |= ran
        return self._last_step

    def lost(self) -> None:
        """Distrusts all admitted requests: a step's planning raised, so the requests that it runs
        are unknown."""
        self._distrusted |= self._admitted
        self.held |= self._admitted

    def settled(self, step: int, went_well: bool) -> None:
        """Handles the output of a step. Outputs arrive in order, so an earlier step that is still
        unsettled has lost its report."""
        for number in sorted(self._unsettled):
            if number > step and went_well:
                break
            requests = self._unsettled[number] if number > step else self._unsettled.pop(number)
            if not went_well or number < step:
                self._distrusted |= requests
        self.held = self._distrusted.union(*self._unsettled.values())
