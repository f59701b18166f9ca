"""Moves an engine whose weights have changed in place to a new key space. The scheduler and all
ranks agree on it.

Always true:
- From the moment the weights may have changed, the engine neither stores nor loads until every rank
  has reported its weights and all sessions belong to the new key space.
- If the weights are the engine's original weights, the key space stays. So a reset alone costs no
  sharing.
- If any rank reports that weights were written (`were_written`), KV on the device is not trusted,
  even if the weights are the original weights now: they may have differed for a step.

Both sides here only decide: they have no sessions, no models, no clock.
"""

import hashlib
import itertools
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

ASK_AGAIN_S = 5.0
"""A check of the weights is repeated after this time, because a missing answer was lost with a step
that broke."""
PATIENCE_S = 2.0
"""How long requests wait for the ranks' answers. After that they are computed without the shared
cache."""
RECONNECT_S = 1.0
"""Longest time that a step waits for the session of the new key space; usually it takes some ten
milliseconds."""
_questions = itertools.count(1)
"""Numbers of checks. A number is never used twice in a scheduler's process, because ranks may
outlive a `Rekeying`."""


@dataclass(frozen=True, slots=True)
class WeightsOrder:
    """The scheduler's order to the ranks.

    question: number of the check, which every rank answers once.
    identity: identity of the weights with which the ranks go on; empty until the check has ended.
    """

    question: int
    identity: str = ""


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """A rank's report to the scheduler.

    question: number of the check that the report answers; 0 if the rank has noticed a change
        unasked and has no digest yet.
    is_original: True if the rank has the weights that it started with.
    was_written: True if the weights were written since the last check that has ended.
    """

    question: int
    digest: str = ""
    is_original: bool = False
    was_written: bool = False


class Watch(Protocol):
    """The part of `WeightsWatch` that is used here."""

    touched: bool
    original: str

    def digest(self) -> str: ...


class Rekeying:
    """Asks, on the scheduler's side, all ranks which weights they have, and decides whether the key
    space changes. At most one such check is open; a new check voids the answers to the check before
    it."""

    def __init__(self, num_ranks: int, original: str, in_doubt: bool = False) -> None:
        """`original`: the weights' identity at the start.

        `in_doubt`: nothing is stored or loaded before the ranks have reported their weights."""
        self._num_ranks = num_ranks
        self._original = original
        self._question = 0
        self._asked_s = self._since_s = 0.0
        self._answers: dict[int, WeightsReport] = {}
        self._is_due = in_doubt
        self._is_asking = False
        self.identity = original
        """Identity of the weights that the present key space stands for."""
        self.were_written = False
        """True if a rank has reported a write to its weights since the last check that has
        ended."""

    def __repr__(self) -> str:
        return (
            f"Rekeying({'under way' if self.under_way else 'settled'}, {self.identity[:24]}, "
            f"{len(self._answers)} answers)"
        )

    @property
    def under_way(self) -> bool:
        """Returns True while a check of the weights is open, during which stores and loads are
        forbidden."""
        return self._is_due or self._is_asking

    def suspect(self) -> None:
        """Makes a check of the weights due when the engine next runs a request. Called when the
        engine pauses, or its caches were reset."""
        self._is_due = True

    def ask(self, now_s: float) -> None:
        """Begins a check (asks all ranks which weights they have), because the weights may have
        changed."""
        if not self._is_asking:
            self._since_s = now_s
        self._question = next(_questions)
        self._asked_s = now_s
        self._answers.clear()
        self._is_due = False
        self._is_asking = True

    def waits(self, now_s: float) -> bool:
        """Returns True if a request that asks for a hit should wait for the ranks.

        False if no check is under way, or if the ranks are late. Begins a check that is due."""
        if self._is_due:
            self.ask(now_s)
        return self._is_asking and now_s < self._since_s + PATIENCE_S

    def reported(self, reports: Mapping[int, WeightsReport], now_s: float) -> bool:
        """Processes the ranks' reports, by rank. Returns True if a rank has noticed a change."""
        noticed = not self._is_asking and any(report.question == 0 for report in reports.values())
        if noticed:
            self.ask(now_s)
        for rank, report in reports.items():
            self.were_written |= report.was_written
            if self._is_asking and report.question == self._question:
                self._answers[rank] = report
        return noticed

    def step(self, runs_something: bool, now_s: float) -> str | None:
        """Returns the identity of the weights with which the engine goes on, once all ranks have
        answered; None before that.

        Called for every planned step. Begins a check that is due, and repeats a check whose answers
        are late.
        """
        if self._is_due and runs_something:
            self.ask(now_s)
        if not self._is_asking:
            return None
        if len(self._answers) < self._num_ranks:
            if now_s > self._asked_s + ASK_AGAIN_S:
                self.ask(now_s)
            return None
        if all(report.is_original for report in self._answers.values()):
            return self._original
        digests = "\0".join(self._answers[rank].digest for rank in sorted(self._answers))
        return f"updated:{hashlib.sha256(digests.encode()).hexdigest()}"

    def go_on(self, identity: str) -> None:
        """Carries on after the scheduler's side has started anew, over sessions of this identity.

        The ranks have not started anew. So the original identity and the numbers of checks stay,
        and a check that was under way is asked again.
        """
        self.identity = identity
        self._is_due = self.under_way
        self._is_asking = False

    def adopt(self, identity: str) -> None:
        """Ends the check: the sessions belong to this identity from now on."""
        self.identity = identity
        self._is_asking = False
        self.were_written = False

    def order(self) -> WeightsOrder | None:
        """Returns the order about weights that this step carries to the ranks; None until the first
        check.

        Every step carries the order, since a step may be lost."""
        if not self._question:
            return None
        return WeightsOrder(self._question, "" if self._is_asking else self.identity)


class RankWeights:
    """Answers, on a rank's side, the scheduler's checks of the weights."""

    def __init__(self, watch: Watch | None, original: str) -> None:
        """`watch`: None if the models were not found; then every check counts as a change."""
        self._watch = watch
        self._answered = 0
        self._waits = False
        self._was_written = False
        self._report: WeightsReport | None = None
        self.identity = original

    def __repr__(self) -> str:
        return f"RankWeights({'held' if self.held else 'free'}, {self.identity[:24]})"

    @property
    def held(self) -> bool:
        return self._waits or (self._watch is not None and self._watch.touched)

    def obey(self, order: WeightsOrder | None) -> bool:
        """Processes the step's order. Returns True if the session must be opened anew, under
        `identity`."""
        if order is not None and not order.identity and order.question != self._answered:
            self._answer(order.question)
        elif order is not None and order.identity and order.question == self._answered:
            # Every rank's answer has been heard.
            self._waits = self._was_written = False
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
        digest = self._watch.digest()
        is_original = digest == self._watch.original
        self._report = WeightsReport(question, digest, is_original, self._was_written)

    def take_report(self) -> WeightsReport | None:
        """Returns the report about this rank's weights for the scheduler, and clears it; None
        without a report."""
        if self._report is None and self._watch is not None and self._watch.touched:
            return WeightsReport(0, was_written=True)
        report, self._report = self._report, None
        return report
