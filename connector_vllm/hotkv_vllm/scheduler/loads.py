"""Tracks loads on the scheduler side: which loads are in progress, and how they end. Scheduler
thread only.

Five classes:
- `LoadOrders` collects the orders about loads (begin, cancel, report as failed) for the workers.
- `Quarantine` withholds blocks from vLLM's pool while a hung server may still write to the blocks.
- `FailedLoads` prevents stalls of vLLM's scheduler after a failed load.
- `CommonLoads` lets a request wait while another request loads the same blocks.
- `OtherLoads` tracks loads of other connectors in a MultiConnector. Such a load may fail to fill a
  block, and then the block must not be stored.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hotkv_vllm.link import logger
from hotkv_vllm.metadata import LoadJob

# ---------------------------------------------------------------------------- orders to the workers


class LoadOrders:
    """Collects the orders about loads that the next step carries to the workers, and tracks the
    loads whose end vLLM awaits. Scheduler thread only.

    Always true: for each load whose end vLLM awaits, the workers get an order to begin it or to
    report it as failed. The end of each load is handled once. Ends of other connectors' loads are
    ignored.

    If a callback (a method that vLLM calls) raises, its fallback uses the attributes below
    directly. It calls no method of this class, because the callback may have raised in such a
    method.

    jobs: loads to begin, by request id.
    cancelled: ids of the requests whose load the workers are to cancel.
    abandoned: ids of the requests whose load was never begun. The workers are to report it as
        failed.
    awaited: ids of the requests that wait in vLLM for the end of their load.
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
        """Orders the workers to begin a load, with the next step.

        blocks: vLLM's `KVCacheBlocks` of the request.
        """
        self.quarantine.begun(job, blocks)
        self.jobs[job.request_id] = job
        self.awaited.add(job.request_id)

    def cancel(self, request_id: str) -> None:
        """Orders the workers to cancel the request's load, with the next step."""
        self.cancelled.append(request_id)

    def abandon(self, request_id: str) -> None:
        """Gives up the request's load before the workers begin it. With the next step the workers
        report the load to vLLM as failed."""
        self.jobs.pop(request_id, None)
        self.abandoned.append(request_id)
        self.quarantine.loading.pop(request_id, None)
        self.awaited.add(request_id)

    def ended(self, request_ids: Iterable[str]) -> Iterator[str]:
        """Handles the ends of loads that the workers report. Yields each request that is in
        `awaited`, and removes it from there. Ignores all other requests, whose loads belong to
        other connectors."""
        for request_id in request_ids:
            if request_id in self.awaited:
                self.awaited.discard(request_id)
                self.quarantine.loading.pop(request_id, None)
                yield request_id

    def take(self) -> tuple[tuple[LoadJob, ...], tuple[str, ...], tuple[str, ...]]:
        """Returns the orders for the next step, and forgets them. The result has three parts: the
        loads to begin; the ids of the requests whose load is to be cancelled; and the ids of the
        requests whose load is to be reported as failed."""
        taken = tuple(self.jobs.values()), tuple(self.cancelled), tuple(self.abandoned)
        self.jobs = {}
        self.cancelled = []
        self.abandoned = []
        return taken


# ----------------------------------------------------------------------------- blocks of hung loads


@dataclass(frozen=True, slots=True)
class _Load:
    """A load in flight, with vLLM's objects for the device blocks that it writes."""

    transfer_id: str
    blocks: tuple[Any, ...]


class Quarantine:
    """Keeps the device blocks of hung loads out of vLLM's pool until the server can't write to them
    any more. A load is hung if the server has not ended it although it was cancelled. Scheduler
    thread only.

    A hung server may write the blocks of a load at any later time, so no other request may get
    them. The load's own request need not wait, however: it is computed in other blocks.

    Always true: the scheduler takes its own reference to the load's blocks before a worker may
    report the load as failed. (A worker waits until the step's message lists the load in `held`.)
    So the blocks stay out of the pool when vLLM frees them for the request. They return to the pool
    when all ranks report in one step that the server can't write to them any more.

    Meanwhile `num_gpu_blocks` of the pool is reduced by the number of these blocks. Otherwise a
    pause or a sleep would fail: vLLM resets its prefix cache only if no block is in use. The
    scheduler repeats `held`, and the workers repeat their answer, in every step. So a lost message
    delays the blocks' return by a step only.

    pool: vLLM's pool of device blocks. While it is None, no block is held, and a request whose load
        hangs waits for the server.
    loading: by request, the loads whose end has not been reported to vLLM.
    kept: by transfer id, vLLM's objects for the blocks that are kept out of the pool.
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
        """Returns the ids of the transfers whose blocks are kept out of vLLM's pool."""
        return tuple(self.kept)

    @property
    def num_blocks(self) -> int:
        return sum(len(blocks) for blocks in self.kept.values())

    def begun(self, job: LoadJob, blocks: Any) -> None:
        """Records a load that begins, and the device blocks that it writes.

        blocks: vLLM's `KVCacheBlocks` of the request.
        """
        written = {block for run in job.runs for block in run.block_ids.tolist()}
        mine = {
            block.block_id: block
            for group in blocks.blocks
            for block in group
            if block.block_id in written
        }
        self.loading[job.request_id] = _Load(job.transfer_id, tuple(mine.values()))

    def overdue(self, transfer_ids: Iterable[str]) -> int:
        """Begins to keep the blocks of hung loads out of vLLM's pool. Returns the number of loads
        whose blocks were not kept out before. Does nothing and returns 0 while `pool` is None.

        transfer_ids: ids of the hung loads' transfers, as the workers report them.
        """
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
        """Returns the blocks of a hung load to vLLM's pool once the load is over in all ranks.

        ranks_of: by transfer id, the ranks that report that this transfer can't write to their
            memory any more; each rank once.
        """
        for transfer_id, ranks in ranks_of.items():
            if len(ranks) >= self._num_ranks and transfer_id in self.kept:
                blocks = self.kept.pop(transfer_id)
                self.pool.free_blocks(blocks)
                self.pool.num_gpu_blocks += len(blocks)


# ----------------------------------------------------------------------- requests whose load failed

ADMISSION_PATIENCE_S = 0.25
"""While requests whose load failed wait to be scheduled, a request with a granted hit waits at most
this long for admission, seconds. Then its hit is dropped."""


class FailedLoads:
    """Prevents stalls of vLLM's scheduler after failed loads. Holds the requests whose load failed
    and that vLLM has not scheduled since. Scheduler thread only.

    Source: the scheduler of vLLM 0.32 with `kv_load_failure_policy` `recompute`. The reservations
    described below came with vllm-project/vllm#44560; #53868 and #57841 describe similar stalls.

    Without this class, a failed load could stall a full engine for ever in two ways:

    - vLLM keeps blocks reserved for a request whose load failed until it schedules the request.
      vLLM admits an asynchronous load only if its blocks fit beside all such reservations. So a
      request that is to load its hit could wait for ever. A request that is to be computed is
      admitted regardless of the reservations. Therefore `outwait` drops the hit after
      ADMISSION_PATIENCE_S, and the request is computed.
    - vLLM has a queue of waiting requests that hold blocks. It leaves a request whose load failed
      at the head of this queue, although the request holds no blocks any more. If the device has no
      room for this request, the requests behind it never run, and never free their blocks.
      Therefore `steps_aside` makes the connector answer 'ask again' once, and vLLM moves the
      request to its ordinary queue.

    waiting: ids of the requests that vLLM has not scheduled since their load failed.
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
        """Adds a request whose load failed. The failure has been reported to vLLM, or will be."""
        self.waiting.add(request_id)
        self._in_the_way.add(request_id)

    def steps_aside(self, request_id: str) -> bool:
        """Returns True if vLLM must now be answered 'ask again' for the request, so that vLLM moves
        it to its ordinary queue. Returns True once per failed load."""
        if request_id not in self._in_the_way:
            return False
        self._in_the_way.discard(request_id)
        return True

    def outwait(self, granted_s: float, now_s: float) -> bool:
        """Returns True if a granted hit must be dropped: its request has waited for admission
        longer than ADMISSION_PATIENCE_S, while a request with a failed load waits to be scheduled.

        granted_s: time at which the hit's lease was granted.
        """
        return bool(self.waiting) and now_s > granted_s + ADMISSION_PATIENCE_S

    def scheduled(self, request_ids: Iterable[str]) -> None:
        """Removes the requests that a step runs, because vLLM holds no blocks reserved for these
        requests any more."""
        if self.waiting:
            self.waiting.difference_update(request_ids)

    def ended(self, request_id: str) -> None:
        """Forgets a request that has ended."""
        self.waiting.discard(request_id)
        self._in_the_way.discard(request_id)


# ------------------------------------------------------------------------- loads of the same blocks


REPORTED_S = 5.0
"""The workers report the end of a load within this time after its time limit, seconds, even if the
server hangs."""


@dataclass(frozen=True, slots=True)
class _Brings:
    """A load in progress, described by the end of the hit that it loads to the device.

    end_tokens: length of the hit that is being loaded.
    name: hash of the hit's last block in the first group. The hash covers all tokens of the hit.
    until_s: no request waits for the load after this time.
    """

    end_tokens: int
    name: bytes
    until_s: float


class CommonLoads:
    """Lets a request wait while another request loads the same blocks: finds the load in progress
    for which the request should wait. Scheduler thread only.

    vLLM puts loaded blocks into its prefix cache when their load has ended. Without waiting,
    requests that arrive together with a common prefix would each load a copy of its blocks, and the
    device would hold all copies until the requests end. A request that has waited hits the blocks
    on the device.

    A request should wait for a load if two conditions hold: the whole hit that is being loaded is a
    part of the request's own hit; and it is at least half of what the request would load.

    loads: the loads in progress, by request id.
    """

    def __init__(self) -> None:
        self.loads: dict[str, _Brings] = {}

    def __repr__(self) -> str:
        return f"CommonLoads({len(self.loads)})"

    def begin(self, request_id: str, end_tokens: int, name: bytes, until_s: float) -> None:
        """Records a load that begins.

        end_tokens: length of the hit that is loaded.
        name: hash of the hit's last block in the first group.
        until_s: no request waits for the load after this time.
        """
        self.loads[request_id] = _Brings(end_tokens, name, until_s)

    def ended(self, request_id: str) -> None:
        """Forgets the request's load, because it has ended or is cancelled."""
        self.loads.pop(request_id, None)

    def awaited(
        self,
        computed_tokens: int,
        hit_tokens: int,
        name_at: Callable[[int], bytes],
        now_s: float,
    ) -> str:
        """Returns the id of the request for whose load the *asking* request should wait; empty if
        it should not wait. The parameters describe the asking request.

        computed_tokens: length of its hit in vLLM's own prefix cache.
        hit_tokens: length of its whole hit.
        name_at: takes a number of tokens, and returns the hash of its block in the first group that
            ends there.
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
    """Decides which requests' blocks must not be stored because of loads by other connectors beside
    hotkv (MultiConnector). Scheduler thread only.

    Always true: hotkv stores no KV that another connector may have failed to load.

    - Asynchronous load: vLLM counts the loaded tokens as computed as soon as the load begins. So
      blocks of a request are not stored from its admission until a step runs the request.
    - Synchronous load: it runs within the step that uses the loaded blocks. Whether it failed is
      known only when the output of that step arrives. Requests that are admitted for that step, or
      for a later step before this output arrives, may use the loaded blocks. So their blocks are
      not stored before the output has arrived. If the load failed, their blocks are never stored.

    held: ids of requests that run, but whose blocks must not be stored now.
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
        """Records that vLLM has allocated blocks to the request. Another connector's load may be
        filling them."""
        self._admitted.add(request_id)

    def ended(self, request_id: str) -> None:
        """Forgets a request that has ended."""
        for requests in (self._admitted, self._distrusted, self.held, *self._unsettled.values()):
            requests.discard(request_id)

    def may_store(self, request_id: str) -> bool:
        """Returns True if the request's blocks surely hold the KV of all tokens that vLLM counts as
        computed."""
        return request_id not in self._admitted and request_id not in self.held

    def step(self, running: Collection[str], has_sync_loads: bool) -> int:
        """Records a planned step. Returns a number for the step. The workers must report this
        number when the step has ended, and the report is passed to `settled`. Returns 0 if the
        step's end need not be reported.

        running: the requests that the step runs.
        has_sync_loads: True if the step includes synchronous loads of another connector.
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
        """Excludes from storing all requests that were admitted and are not known to have run.
        Called if the planning of a step raised, because it is not known which requests that step
        runs."""
        self._distrusted |= self._admitted
        self.held |= self._admitted

    def settled(self, step: int, went_well: bool) -> None:
        """Handles the workers' report that a step has ended. A step is *open* from its planning
        until this report. Reports arrive in the order of the steps. So if an earlier step is still
        open, its report was lost. It is then not known whether the loads in that step failed, so
        the blocks of the requests that were admitted for it are never stored.

        step: the number that `step` returned for the reported step.
        went_well: False if a synchronous load failed in the step. Then the blocks of requests that
            were admitted for this step, or for a later step that is already planned, are never
            stored.
        """
        for number in sorted(self._unsettled):
            if number > step and went_well:
                break
            requests = self._unsettled[number] if number > step else self._unsettled.pop(number)
            if not went_well or number < step:
                self._distrusted |= requests
        self.held = self._distrusted.union(*self._unsettled.values())
