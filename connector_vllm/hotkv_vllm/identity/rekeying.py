"""Moves an engine to another key space if its weights have changed in place.

In a *check* the scheduler (`Rekeying`) asks all ranks (`RankWeights`) for a digest of their weights
in memory, and computes the engine's identity. Both only decide: no sessions, no models, no clock.

- From the moment the weights may have changed, the engine neither stores nor loads until every rank
  has answered, and all sessions are of the present weights' key space.
- If the weights are the original ones, the key space stays.
- After a reported write (`were_written`) the device's KV is not trusted, even with the original
  weights: they may have differed for a step.
"""

import hashlib
import itertools
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

ASK_AGAIN_S = 5.0
PATIENCE_S = 2.0
"""How long requests wait; then they are computed without the shared cache."""
RECONNECT_S = 1.0
"""How long a step waits for the new session; usually it takes some tens of ms."""
_questions = itertools.count(1)
"""Unique in the process: ranks may still answer an earlier `Rekeying`."""


@dataclass(frozen=True, slots=True)
class WeightsOrder:
    """question: id of the check; a rank answers each once.
    identity: to whose key space the ranks must change; empty until all have answered.
    """

    question: int
    identity: str = ""


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """An answer to a check, or a notice that the weights were written.

    question: 0 for a notice.
    digest: empty in a notice.
    is_original: as at the rank's start.
    was_written: since the last completed check.
    """

    question: int
    digest: str = ""
    is_original: bool = False
    was_written: bool = False


class Watch(Protocol):
    """Part of `weights_watch.WeightsWatch`."""

    touched: bool
    original: str

    def digest(self) -> str: ...
    def forget_original(self) -> None: ...


class Rekeying:
    """The scheduler's part. At most one check is open; a new one discards earlier answers.

    identity: of the present key space's weights.
    were_written: reported since the last completed check.
    media_are_old: vLLM may still use encodings of media by earlier weights, and KV from them must
        not be shared.
    question: of the present or last check; 0 if there was none since `begin`.
    is_fresh: no step has computed since the start or the last pause, so vLLM has no encodings of
        media. The caller of `step` resets it.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        # Empty before `begin`.
        self._original = self.identity = ""
        self.question = 0
        self._asked_s = self._since_s = 0.0
        self._answers: dict[int, WeightsReport] = {}
        self.is_due = self.is_asking = False
        # `is_fresh` when the present check began.
        self._began_fresh = True
        self.is_fresh = True
        self.were_written = self.media_are_old = False

    def __repr__(self) -> str:
        return (
            f"Rekeying({'under way' if self.under_way else 'settled'}, {self.identity[:24]}, "
            f"{len(self._answers)} answers)"
        )

    @property
    def under_way(self) -> bool:
        """The engine must neither store nor load."""
        return self.is_due or self.is_asking

    def suspect(self, has_paused: bool = False) -> None:
        """The check begins when the engine next runs or looks up a request.

        has_paused: vLLM then also drops its encodings of media.
        """
        self.is_due = True
        self.is_fresh |= has_paused
        self.media_are_old &= not has_paused

    def ask(self, now_s: float) -> None:
        if not self.is_asking:
            self._since_s = now_s
        self._began_fresh = self.is_fresh
        self.question = next(_questions)
        self._asked_s = now_s
        self._answers.clear()
        self.is_due = False
        self.is_asking = True

    def waits(self, now_s: float) -> bool:
        """Whether lookups wait. Begins a check that is due."""
        if self.is_due:
            self.ask(now_s)
        return self.is_asking and now_s < self._since_s + PATIENCE_S

    def reported(self, reports: Mapping[int, WeightsReport], now_s: float) -> bool:
        """True if a rank's notice of a write has begun a check. A write after its answer to the
        open one makes another due."""
        noticed = not self.is_asking and any(report.question == 0 for report in reports.values())
        if noticed:
            self.ask(now_s)
        for rank, report in reports.items():
            self.were_written |= report.was_written
            if self.is_asking and report.question == self.question:
                self._answers[rank] = report
            elif report.question == 0:
                self.is_due |= rank in self._answers
        return noticed

    def step(self, runs_something: bool, now_s: float) -> str | None:
        """Begins or repeats a check. The present weights' identity once all have answered, else
        None."""
        if self.is_due and runs_something:
            self.ask(now_s)
        if not self.is_asking:
            return None
        if len(self._answers) < self._num_ranks:
            if now_s > self._asked_s + ASK_AGAIN_S:
                self.ask(now_s)
            return None
        if all(report.is_original for report in self._answers.values()):
            return self._original
        digests = "\0".join(self._answers[rank].digest for rank in sorted(self._answers))
        return f"updated:{hashlib.sha256(digests.encode()).hexdigest()}"

    def begin(self, identity: str, in_doubt: bool) -> None:
        """A session of `identity` is open: at the start, or again, as after a sleep.

        Only the first call sets the original identity. An open check, whose answers may be lost, is
        due again.

        in_doubt: the ranks' weights may differ from it.
        """
        self._original = self._original or identity
        self.identity = identity
        self.is_due = self.under_way or in_doubt
        if self.is_asking:
            self.question = 0
        self.is_asking = False

    def adopt(self, identity: str) -> None:
        if self.were_written or identity != self.identity:
            self.media_are_old = not self._began_fresh
        self.identity = identity
        self.is_asking = False
        self.were_written = False

    def order(self) -> WeightsOrder | None:
        """Repeated in each step. None without a check since `begin`."""
        if not self.question:
            return None
        return WeightsOrder(self.question, "" if self.is_asking else self.identity)


class RankWeights:
    """identity: to whose key space the session must belong; empty until `begin`."""

    def __init__(self, watch: Watch | None) -> None:
        """watch: None if vLLM's models were not found: each check finds other weights."""
        self._watch = watch
        self._answered = 0
        self._waits = False
        self._was_written = False
        # `_settled`: digest in the last completed check; `_digest`: in the last answer.
        self._settled = self._digest = watch.original if watch is not None else ""
        self._report: WeightsReport | None = None
        self.identity = ""

    def begin(self, identity: str, in_doubt: bool) -> None:
        """in_doubt: the weights may be older than the files that `identity` names."""
        self.identity = identity
        if not in_doubt:
            return
        self._waits = True
        if self._watch is not None:
            self._watch.forget_original()
            self._settled = self._digest = ""

    def __repr__(self) -> str:
        return f"RankWeights({'held' if self.held else 'free'}, {self.identity[:24]})"

    @property
    def held(self) -> bool:
        """The rank must not load or store."""
        return self._waits or (self._watch is not None and self._watch.touched)

    def obey(self, order: WeightsOrder | None) -> bool:
        """Answers a check or adopts its result. True if `identity` has changed: the caller opens
        its session."""
        if order is not None and not order.identity and order.question != self._answered:
            self._answer(order.question)
        elif order is not None and order.identity and order.question == self._answered:
            self._waits = self._was_written = False
            self._settled = self._digest
            changed, self.identity = order.identity != self.identity, order.identity
            return changed
        return False

    def _answer(self, question: int) -> None:
        self._answered = question
        self._waits = True
        if self._watch is None:
            self._report = WeightsReport(question, f"unseen:{uuid.uuid4().hex}")
            return
        self._was_written |= self._watch.touched
        self._digest = self._watch.digest()
        # Steps may have run with these weights, even if a later check finds the old ones.
        self._was_written |= self._digest != self._settled
        is_original = self._digest == self._watch.original
        self._report = WeightsReport(question, self._digest, is_original, self._was_written)

    def take_report(self) -> WeightsReport | None:
        """An answer once; a notice of a write until a check begins."""
        if self._report is None and self._watch is not None and self._watch.touched:
            return WeightsReport(0, was_written=True)
        report, self._report = self._report, None
        return report
