"""One transfer, from its plan to its answer.

Always true: the answer comes only when nothing touches the transfer's memory any more; a load
copies no block that has not been compared, and has failed if one was condemned meanwhile; the
core's books hear of the end exactly once, also if the plan can't be made. On the event loop; bytes
are moved by the copy engine's threads.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.results import TransferResult, TransferStatus
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.bounds import Account
from hotkv_server.cache.values import SlotRun
from hotkv_server.dataplane.engine import CopyEngine, CopyJob, Outcome
from hotkv_server.dataplane.plan import Plan, Region, block_copies
from hotkv_server.integrity.verifier import Case, Verifier
from hotkv_server.node.deadline import Deadline
from hotkv_server.node.health import Health
from hotkv_server.node.order import MarkGate
from hotkv_server.node.session import LiveSession
from hotkv_server.node.session_memory import SessionMemory
from hotkv_server.node.timings import Timings

log = logging.getLogger(__name__)

CONDEMNED_MESSAGE = "a block's bytes are not those that were stored; it is dropped"

BlockIds = Sequence[NDArray[np.int64]]
"""Block ids in the engine's memory, one array a run."""
Finish = Callable[[Outcome, int], list[NDArray[np.uint8]]]
"""Ends a transfer in the core, given how it went and the bytes moved; returns the results a run."""


@dataclass(frozen=True, slots=True)
class TransferEnd(TransferResult):
    """How a transfer ended. `copy_began_s`, `copy_ended_s`: by the monotonic clock; the former is
    None if no byte was copied."""

    copy_began_s: float | None = None
    copy_ended_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Means:
    """What all transfers of a node use. `kept_bytes`: account of what transfers keep until they
    end; `run_effects` carries out what the core's decisions call for; `timings` counts their
    ends."""

    core: CacheCore
    arena: Region
    copy_engine: CopyEngine
    verifier: Verifier
    health: Health
    kept_bytes: Account
    run_effects: Callable[[], None]
    timings: Timings


@dataclass(frozen=True, slots=True)
class Call:
    """What a call asks for. Nothing moves before `gate` has passed, if there is one. `kept_bytes`:
    about what is kept of the transfer until it ends."""

    session: LiveSession
    transfer_id: str
    memory: SessionMemory
    block_ids: BlockIds
    deadline: Deadline
    gate: MarkGate | None
    kept_bytes: int


class Transfer:
    """See the module. `finish` is called once; `after_copy` in a copy thread, when all has been
    copied: if it raises, the transfer has failed."""

    def __init__(
        self,
        means: Means,
        call: Call,
        finish: Finish,
        after_copy: Callable[[], None] | None = None,
        *,
        to_engine: bool,
    ) -> None:
        self._means = means
        self._call = call
        self._finish = finish
        self._after_copy = after_copy
        self._to_engine = to_engine
        self._began_s = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[TransferEnd] = self._loop.create_future()
        self._owner = means.core.sessions.owner(call.session.record)
        self._slots: Sequence[SlotRun] = ()
        self._job: CopyJob | None = None

    def __repr__(self) -> str:
        word = "load" if self._to_engine else "store"
        return f"Transfer({word} {self._call.transfer_id!r}, {self._job!r})"

    def start(self, slots: Sequence[SlotRun]) -> "asyncio.Future[TransferEnd]":
        """Starts a transfer that the core has begun with these slots. The future is done when
        nothing touches its memory any more."""
        means, call = self._means, self._call
        self._slots = slots
        try:
            plans = self._plans()
        except BaseException:
            # The core has begun the transfer; it must not stay in its books.
            self._finish(Outcome.FAILED, 0)
            raise
        self._job = job = CopyJob(plans, self._copied, call.gate, self._owner)
        call.session.jobs[call.transfer_id] = job
        means.kept_bytes.take(self._owner, call.kept_bytes)
        call.session.inflight_bytes += job.total_bytes
        call.deadline.begin(job, has_mark=call.gate is not None)
        cases = means.verifier.unverified(slots) if self._to_engine else []
        if cases:
            judging = self._loop.run_in_executor(None, means.verifier.judge, cases)
            judging.add_done_callback(lambda done: self._judged(cases, done))
        else:
            means.copy_engine.submit(job)
        return self._future

    def _plans(self) -> list[Plan]:
        call, core = self._call, self._means.core
        record = core.catalog.record(call.session.record.key_space_id)
        return [
            plan
            for run, ids in zip(self._slots, call.block_ids, strict=True)
            for plan in block_copies(
                call.memory.layout.recipes(
                    call.session.named(run.group_index), record.shape(run.group_index)
                ),
                ids[run.positions],
                run.offsets,
                self._means.arena,
                call.memory.regions,
                to_engine=self._to_engine,
            )
        ]

    def _judged(
        self, cases: Sequence[Case], judging: "asyncio.Future[list[NDArray[np.bool_]]]"
    ) -> None:
        """Submits the copy if all blocks agree with their check values."""
        assert self._job is not None, "blocks are judged after the start"
        if (error := judging.exception()) is not None:
            self._ended(Outcome.FAILED, f"{type(error).__name__}: {error}")
        elif len(self._means.verifier.settle(cases, judging.result())):
            self._ended(Outcome.FAILED, CONDEMNED_MESSAGE)
        else:
            self._means.copy_engine.submit(self._job)

    def _copied(self, outcome: Outcome, message: str) -> None:
        """The job has ended. From a copy thread."""
        try:
            if self._after_copy is not None and outcome is Outcome.DONE:
                self._after_copy()
        except Exception as error:  # noqa: BLE001 The edge of the effect executor: what can't be checked is not kept.
            outcome, message = Outcome.FAILED, f"{type(error).__name__}: {error}"
        self._loop.call_soon_threadsafe(self._ended, outcome, message)

    def _ended(self, outcome: Outcome, message: str) -> None:
        """Gives back what the transfer kept, tells the core, and answers."""
        call, job, copy_ended_s = self._call, self._job, time.monotonic()
        assert job is not None, "a transfer ends after its start"
        call.deadline.end()
        del call.session.jobs[call.transfer_id]
        call.session.inflight_bytes -= job.total_bytes
        self._means.kept_bytes.give(self._owner, call.kept_bytes)
        call.session.settled.set()
        outcome, message = self._verdict(outcome, message)
        moved = job.total_bytes if outcome is Outcome.DONE else 0
        self._means.timings.moved(
            outcome, moved, self._began_s, job.waited_s, to_engine=self._to_engine
        )
        results = self._finish(outcome, moved)
        self._means.run_effects()
        if not self._future.cancelled():
            self._future.set_result(
                TransferEnd(
                    call.transfer_id,
                    TransferStatus[outcome.name],
                    moved,
                    tuple(results),
                    message or call.deadline.message,
                    job.begun_s,
                    copy_ended_s,
                )
            )

    def _verdict(self, outcome: Outcome, message: str) -> tuple[Outcome, str]:
        """The outcome and message, FAILED if what was copied can't be relied on."""
        call = self._call
        if self._means.health.breach:
            return Outcome.FAILED, "the server ends: its books can't be trusted"
        if not call.memory.is_whole():
            log.warning("memory cut short %s transfer=%r", call.session.name, call.transfer_id)
            return Outcome.FAILED, "the file of the engine's memory has been truncated"
        is_done = outcome is Outcome.DONE
        if self._to_engine and is_done and self._means.verifier.is_doubtful(self._slots):
            return Outcome.FAILED, CONDEMNED_MESSAGE
        return outcome, message
