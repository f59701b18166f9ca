"""A new key space for an engine whose weights have changed in place, agreed on by its scheduler and
all its ranks.

What is always true: from the moment weights may be others until every rank has said what they are,
and the sessions are those of that key space, nothing is stored and nothing is loaded. Weights that
are what the engine started with keep its key space, so that a reset by itself costs no sharing.
Both sides here are decisions only: no sessions, no models, no clock.
"""

import hashlib
import itertools
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

ASK_AGAIN_S = 5.0
"""An answer that has not come by then was lost with a step that broke."""
PATIENCE_S = 2.0
"""How long requests wait for the ranks' answers. They are computed without the shared cache after
that."""
RECONNECT_S = 1.0
"""How long a step waits at most for the session of another key space; some ten milliseconds are
usual."""
_questions = itertools.count(1)
"""No number comes twice in a scheduler's process: ranks may outlive a `Rekeying`."""


@dataclass(frozen=True, slots=True)
class WeightsOrder:
    """From the scheduler. `question`: number of the check that every rank answers once; `identity`:
    of the weights, once it is settled, for ranks to go on under; empty before.
    """

    question: int
    identity: str = ""


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """From a rank. `question`: which check it answers; 0 for a rank that has noticed a change
    unasked, and has no digest yet."""

    question: int
    digest: str = ""
    is_original: bool = False


class Watch(Protocol):
    """`WeightsWatch`, as far as it is needed here."""

    touched: bool
    original: str

    def digest(self) -> str: ...


class Rekeying:
    """The scheduler's side. One check at a time; a new one makes the answers to the one before
    void."""

    def __init__(self, num_ranks: int, original: str, in_doubt: bool = False) -> None:
        """`original`: the weights' identity at the start. `in_doubt`: nothing is stored or loaded
        before ranks have said what they have."""
        self._num_ranks = num_ranks
        self._original = original
        self._question = 0
        self._asked_s = self._since_s = 0.0
        self._answers: dict[int, WeightsReport] = {}
        self._is_due = in_doubt
        self._is_asking = False
        self.identity = original
        """Of the weights that the present key space stands for."""

    def __repr__(self) -> str:
        return (
            f"Rekeying({'under way' if self.under_way else 'settled'}, {self.identity[:24]}, "
            f"{len(self._answers)} answers)"
        )

    @property
    def under_way(self) -> bool:
        """Nothing is to be stored or loaded."""
        return self._is_due or self._is_asking

    def suspect(self) -> None:
        """The engine pauses, or its caches were reset: weights may be others when it next runs
        something, and not before."""
        self._is_due = True

    def ask(self, now_s: float) -> None:
        """Weights may be others from now on."""
        if not self._is_asking:
            self._since_s = now_s
        self._question = next(_questions)
        self._asked_s = now_s
        self._answers.clear()
        self._is_due, self._is_asking = False, True

    def waits(self, now_s: float) -> bool:
        """A request asks for a hit. Returns True if it should wait for the ranks, False if nothing
        is asked or they are late."""
        if self._is_due:
            self.ask(now_s)
        return self._is_asking and now_s < self._since_s + PATIENCE_S

    def reported(self, reports: Mapping[int, WeightsReport], now_s: float) -> bool:
        """What ranks say, by rank. Returns True if a change was noticed."""
        noticed = not self._is_asking and any(report.question == 0 for report in reports.values())
        if noticed:
            self.ask(now_s)
        for rank, report in reports.items():
            if self._is_asking and report.question == self._question:
                self._answers[rank] = report
        return noticed

    def step(self, runs_something: bool, now_s: float) -> str | None:
        """A step is planned. Returns the identity of the weights to go on with, once all ranks have
        said what they are; None before."""
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
        """The scheduler's side starts anew, over sessions of this identity, and ranks have not:
        what were the original weights, and the numbers of checks, stay. What was being asked is
        asked again.
        """
        self.identity, self._is_due, self._is_asking = identity, self.under_way, False

    def adopt(self, identity: str) -> None:
        """The sessions are those of this identity from here on."""
        self.identity, self._is_asking = identity, False

    def order(self) -> WeightsOrder | None:
        """What the ranks are to do in this step; None until the first check. It is said in every
        step, since one may break."""
        if not self._question:
            return None
        return WeightsOrder(self._question, "" if self._is_asking else self.identity)


class RankWeights:
    """A rank's side. `held`: nothing may be stored or loaded."""

    def __init__(self, watch: Watch | None, original: str) -> None:
        """`watch`: None where the models can't be seen; then weights count as others after every
        check."""
        self._watch = watch
        self._answered = 0
        self._waits = False
        self._report: WeightsReport | None = None
        self.identity = original

    def __repr__(self) -> str:
        return f"RankWeights({'held' if self.held else 'free'}, {self.identity[:24]})"

    @property
    def held(self) -> bool:
        return self._waits or (self._watch is not None and self._watch.touched)

    def obey(self, order: WeightsOrder | None) -> bool:
        """Takes in the step's order. True where the session is to be opened anew, under
        `identity`."""
        if order is not None and not order.identity and order.question != self._answered:
            self._answer(order.question)
        elif order is not None and order.identity and order.question == self._answered:
            self._waits = False
            changed, self.identity = order.identity != self.identity, order.identity
            return changed
        return False

    def _answer(self, question: int) -> None:
        self._answered, self._waits = question, True
        if self._watch is None:
            self._report = WeightsReport(question, f"unseen:{uuid.uuid4().hex}")
            return
        digest = self._watch.digest()
        self._report = WeightsReport(question, digest, digest == self._watch.original)

    def take_report(self) -> WeightsReport | None:
        """What to tell the scheduler with this step; None for nothing."""
        if self._report is None and self._watch is not None and self._watch.touched:
            return WeightsReport(0)
        report, self._report = self._report, None
        return report
