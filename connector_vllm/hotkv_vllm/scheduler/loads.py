"""Loads as vLLM's scheduler has to see them: which are under way, how they end, and what they may
take of the device meanwhile. Scheduler thread only.

Five books, each with its own rule: `LoadOrders` (what the workers are told of loads), `Quarantine`
(blocks that a hung server may still write), `FailedLoads` (requests that vLLM treats badly after a
failure), `LoadRoom` (how many loads fit) and `OtherLoads` (those of connectors beside this one).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hotkv_vllm.compat.residency import ResidentManager
from hotkv_vllm.link import logger
from hotkv_vllm.metadata import LoadJob

# ----------------------------------------------------------------------- what the workers are to do


class LoadOrders:
    """What the workers are to do about loads with the next step, and whose ends vLLM waits for.
    Scheduler thread only.

    What is always true: a load that vLLM waits for is begun, cancelled or named as abandoned in
    some step, and its end is taken in once. Ends of other connectors' loads pass by.

    Fallbacks of broken hooks read and write the plain attributes, and call none of the methods: a
    fault in one of these must not break both.
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
        """Returns True if the next step has nothing to say of loads."""
        return not self.jobs and not self.cancelled and not self.abandoned

    def begin(self, job: LoadJob, blocks: Any) -> None:
        """The next step begins this load. `blocks`: vLLM's `KVCacheBlocks` of the request."""
        self.quarantine.begun(job, blocks)
        self.jobs[job.request_id] = job
        self.awaited.add(job.request_id)

    def cancel(self, request_id: str) -> None:
        """The next step asks to end the request's load."""
        self.cancelled.append(request_id)

    def abandon(self, request_id: str) -> None:
        """vLLM waits for a load that will not be: the workers report it as failed."""
        self.jobs.pop(request_id, None)
        self.abandoned.append(request_id)
        self.quarantine.loading.pop(request_id, None)
        self.awaited.add(request_id)

    def ended(self, request_ids: Iterable[str]) -> Iterator[str]:
        """Loads that a step reports as ended. Yields those of this connector, and strikes each off
        as it does."""
        for request_id in request_ids:
            if request_id in self.awaited:
                self.awaited.discard(request_id)
                self.quarantine.loading.pop(request_id, None)
                yield request_id

    def take(self) -> tuple[tuple[LoadJob, ...], tuple[str, ...], tuple[str, ...]]:
        """Loads to begin, and requests whose load is cancelled or abandoned. They are told once."""
        taken = tuple(self.jobs.values()), tuple(self.cancelled), tuple(self.abandoned)
        self.jobs = {}
        self.cancelled = []
        self.abandoned = []
        return taken


# ----------------------------------------------------------------------------- blocks of hung loads


@dataclass(frozen=True, slots=True)
class _Load:
    """A load in flight and vLLM's block objects that it writes."""

    transfer_id: str
    blocks: tuple[Any, ...]


class Quarantine:
    """Blocks of hung loads, kept out of vLLM's pool until the server can't write them any more.
    Scheduler thread only.

    A hung server may write the blocks of a load at any later time, so nobody else may get them; but
    the request need not wait. What is always true: when a worker may report such a load as failed
    (it reads of it in `held`), the pool counts one more user of its blocks. So they stay out of the
    pool after vLLM has freed the request's own, and return to it when all ranks say, in one step,
    that their transfer is over. Meanwhile the pool is smaller by them: vLLM resets its prefix cache
    only if no block is in use, and a pause or a sleep would fail. The sides send each other states,
    anew in each step, so that a lost message costs a step and nothing else.

    `pool` is vLLM's; without one nothing is kept back, and requests wait for the server.

    `loading`, by request: loads that vLLM has not heard the end of; whoever tells it of an end
    takes them out.
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
        """Transfers whose blocks are held back."""
        return tuple(self._held)

    @property
    def num_blocks(self) -> int:
        return sum(len(blocks) for blocks in self._held.values())

    def begun(self, job: LoadJob, blocks: Any) -> None:
        """`blocks`: vLLM's `KVCacheBlocks` of the request."""
        written = {block for run in job.runs for block in run.block_ids.tolist()}
        mine = {
            block.block_id: block
            for group in blocks.blocks
            for block in group
            if block.block_id in written
        }
        self.loading[job.request_id] = _Load(job.transfer_id, tuple(mine.values()))

    def overdue(self, transfer_ids: Iterable[str]) -> int:
        """Holds the blocks of these transfers; returns how many transfers are new among them."""
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
        """How many ranks can't be written any more, by transfer."""
        for transfer_id, num_ranks in num_ranks_of.items():
            if num_ranks >= self._num_ranks and transfer_id in self._held:
                blocks = self._held.pop(transfer_id)
                self.pool.free_blocks(blocks)
                self.pool.num_gpu_blocks += len(blocks)


# ----------------------------------------------------------------------- requests whose load failed

ADMISSION_PATIENCE_S = 0.25
"""How long a hit may wait for admission while requests whose load failed wait too."""


class FailedLoads:
    """Works round what vLLM's scheduler does with a request whose load failed.

    Source: the scheduler of vLLM 0.32 with `kv_load_failure_policy` `recompute`. Reservations came
    with vllm-project/vllm#44560; #53868 and #57841 describe stalls with the same end. Two things
    can stall a full engine for ever:

    - vLLM goes on reserving blocks for such a request until it is scheduled, and admits
      asynchronous loads (not plain prefills) only beside all reservations. If nothing else fits, a
      granted hit would wait for ever. So it is given up after ADMISSION_PATIENCE_S, and its request
      is computed.
    - vLLM leaves such a request at the head of its queue of requests that hold blocks, although it
      holds none any more. If it does not fit, those behind it never give theirs back. Answered 'ask
      again' once, it moves to the ordinary queue.

    Requests whose load failed and that vLLM has not scheduled since. Scheduler thread only.
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
        """Returns True if nothing is known of any request."""
        return not self._waiting and not self._in_the_way

    def add(self, request_id: str) -> None:
        """vLLM was told, or will be, that the request's load failed."""
        self._waiting.add(request_id)
        self._in_the_way.add(request_id)

    def steps_aside(self, request_id: str) -> bool:
        """vLLM asks for the request's hit. Returns True once, if it must be told 'ask again'."""
        if request_id not in self._in_the_way:
            return False
        self._in_the_way.discard(request_id)
        return True

    def outwait(self, granted_s: float, now_s: float) -> bool:
        """Returns True if a hit that was granted at `granted_s` should wait no longer."""
        return bool(self._waiting) and now_s > granted_s + ADMISSION_PATIENCE_S

    def scheduled(self, request_ids: Iterable[str]) -> None:
        """A step runs these requests: vLLM reserves nothing for them any more."""
        if self._waiting:
            self._waiting.difference_update(request_ids)

    def ended(self, request_id: str) -> None:
        """Forgets a request."""
        self._waiting.discard(request_id)
        self._in_the_way.discard(request_id)


# ------------------------------------------------------------------------------- room on the device


@dataclass(slots=True)
class Holder:
    """Blocks of a request that was admitted: those it holds, and the most it will hold until its
    prompt is through."""

    held: int
    need: int


class LoadRoom:
    """How many requests may hold blocks of the device for a load at once, where vLLM counts too
    few.

    vLLM lets a load begin if its blocks fit beside those that all requests in their prompts still
    need. Of a sliding window or a chunk it counts too few: it takes the request's whole table,
    freed blocks among them, off the most blocks that the request ever holds at once
    (`SingleTypeKVCacheManager.get_num_blocks_to_allocate`, vLLM 0.32 and 0.33). So loads can fill
    the device, and then each loaded request waits for blocks that the others hold: nothing runs any
    more.

    Always true, of the requests that this connector loads, from their admission to their first
    step: either there is only one, or the device has room for each of them to end its prompt while
    the others keep their blocks. So the first in vLLM's queue can run, and vLLM can take back the
    blocks of a request that runs. vLLM's own count is right for a request without blocks, and is
    used for it.

    A request that was refused begins next: requests that came later wait behind it. Scheduler
    thread only.

    `holders`: the requests that were admitted and have not run since.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._max_tokens = int(vllm_config.model_config.max_model_len)
        drafts = int(vllm_config.num_speculative_tokens)
        self._ahead = drafts and 1 + drafts + int(vllm_config.num_lookahead_tokens)
        # None where vLLM counts right.
        self._manager: Any = None
        self._needs: dict[str, int] = {}
        self._next = ""
        self.holders: dict[str, Holder] = {}

    def __repr__(self) -> str:
        return f"LoadRoom({self.holders}, next {self._next!r})"

    def bind(self, manager: Any) -> None:
        """Takes vLLM's manager of blocks. A resident request is counted in full by its own."""
        kinds = manager.coordinator.single_type_managers
        if not any(isinstance(one, ResidentManager) for one in kinds) and any(
            one.max_admission_blocks_per_request is not None for one in kinds
        ):
            self._manager = manager

    def comes(self, request: Any) -> None:
        """vLLM asks for a request, which has no blocks: it is new, was preempted, or its load has
        failed."""
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

    def has_room(self, request_id: str) -> bool:
        """Whether the request that has come may begin a load beside the others."""
        if self._next not in ("", request_id):
            return False
        others = self.holders.values()
        has_room = not others or (
            sum(one.held for one in others)
            + max(max(0, one.need - one.held) for one in others)
            + self._needs[request_id]
            # Blocks of loads that hang are not among them.
            < self._manager.block_pool.num_gpu_blocks
        )
        self._next = "" if has_room else request_id
        return has_room

    def admitted(self, request_id: str, blocks: Any) -> None:
        """vLLM has given the request blocks; it may be for a load."""
        need = self._needs.pop(request_id, None)
        if need is not None:
            held = sum(not one.is_null for group in blocks.blocks for one in group)
            self.holders[request_id] = Holder(held, need)

    def ran(self, request_ids: Collection[str]) -> None:
        """A step runs these requests. vLLM takes blocks from those that run if others lack them."""
        for request_id in self.holders.keys() & request_ids:
            del self.holders[request_id]

    def ended(self, request_id: str) -> None:
        """The request has no blocks any more, or is gone."""
        self.holders.pop(request_id, None)
        self._needs.pop(request_id, None)
        if self._next == request_id:
            self._next = ""


# ------------------------------------------------------------------------ loads of other connectors


class OtherLoads:
    """Loads of other connectors beside hotkv (MultiConnector), as far as storing must know of them.
    Scheduler thread only.

    What is always true: no KV is stored that another connector may have failed to load.

    - vLLM counts tokens of an asynchronous load as computed from its start. A request is trusted
      again when a step runs it.
    - A synchronous load runs within the step that uses it, and its failure is known when the step's
      output has come. Until then nothing is stored of the requests that were admitted since, as
      they may build on its blocks. If it failed, nothing is ever stored of them.

    Requests of which nothing may be stored now.
    """

    def __init__(self) -> None:
        self._admitted: set[str] = set()
        self._unsettled: dict[int, set[str]] = {}
        self._distrusted: set[str] = set()
        self._last_step = 0
        self.held: set[str] = set()
        """Requests that run and of which nothing may be stored."""

    def __repr__(self) -> str:
        return (
            f"OtherLoads(admitted={len(self._admitted)}, unsettled={len(self._unsettled)}, "
            f"held={len(self.held)})"
        )

    def admitted(self, request_id: str) -> None:
        """vLLM has given the request blocks; a load may be filling them."""
        self._admitted.add(request_id)

    def ended(self, request_id: str) -> None:
        """Forgets a request."""
        for requests in (self._admitted, self._distrusted, self.held, *self._unsettled.values()):
            requests.discard(request_id)

    def may_store(self, request_id: str) -> bool:
        """Returns True if all that vLLM counts as computed of the request is there."""
        return request_id not in self._admitted and request_id not in self.held

    def step(self, running: Collection[str], has_sync_loads: bool) -> int:
        """A step is planned. Returns the number under which its end is to be reported; 0 if nobody
        needs to know."""
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
        """The planning of a step broke: what it runs is not known."""
        self._distrusted |= self._admitted
        self.held |= self._admitted

    def settled(self, step: int, went_well: bool) -> None:
        """The output of a step has come. Outputs come in order, so an earlier step that was not
        reported has lost its report."""
        for number in sorted(self._unsettled):
            if number > step and went_well:
                break
            requests = self._unsettled[number] if number > step else self._unsettled.pop(number)
            if not went_well or number < step:
                self._distrusted |= requests
        self.held = self._distrusted.union(*self._unsettled.values())
