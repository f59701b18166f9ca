"""Moves an engine to another key space if its weights have changed in place.

In a *check* of the weights, the scheduler asks all ranks which weights they have. Each rank answers
with a digest of its weights in memory, and the scheduler computes the identity of the engine's
weights from the answers. `Rekeying` is the scheduler's part, `RankWeights` the part of a rank. Both
only decide. They use no sessions (connections to the server for one key space), no models and no
clock.

Always true:
- From the moment the weights may have changed, the engine neither stores nor loads until every rank
  has answered, and all sessions belong to the key space of the present weights.
- If the weights are still the engine's original weights, the key space stays. So if only the caches
  were reset, the engine still shares blocks with the same engines as before.
- If a rank reports that weights were written (`were_written`), KV on the device is not trusted.
  This holds even if the weights are the original weights again, because they may have differed for
  a step.
"""

import hashlib
import itertools
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

ASK_AGAIN_S = 5.0
"""If ranks have not answered a check of the weights after this time, seconds, the check is
repeated, because the question or an answer was lost with a step."""
PATIENCE_S = 2.0
"""Requests wait at most this long for the ranks' answers to a check of the weights, seconds. After
that they are computed without the shared cache."""
RECONNECT_S = 1.0
"""Longest time that a step waits for the session of the new key space. Usually the session opens
within some tens of milliseconds."""
_questions = itertools.count(1)
"""Generates the ids of checks of the weights. No id is used twice in a process, because ranks may
still answer checks of an earlier `Rekeying`."""


@dataclass(frozen=True, slots=True)
class WeightsOrder:
    """The scheduler's order to the ranks in a step's message, for a check of the weights. The order
    first asks for an answer to the check; later it announces the check's result.

    question: id of the check. A rank answers each check once.
    identity: empty until all ranks have answered. Then the result of the check: the identity of the
        engine's present weights. The ranks must open sessions in the key space of these weights.
    """

    question: int
    identity: str = ""


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """A rank's report to the scheduler about its weights: an answer to a check of the weights (in
    which the scheduler asks all ranks which weights they have), or a notice that the weights were
    written.

    question: id of the check that the report answers; 0 for a notice.
    digest: digest of the weights in memory; empty in a notice.
    is_original: True if the rank has the same weights as at its start.
    was_written: True if the rank's weights were written after the last completed check.
    """

    question: int
    digest: str = ""
    is_original: bool = False
    was_written: bool = False


class Watch(Protocol):
    """The part of `weights_watch.WeightsWatch` that `RankWeights` uses."""

    touched: bool
    original: str

    def digest(self) -> str: ...
    def forget_original(self) -> None: ...


class Rekeying:
    """The scheduler's part of checks of the weights: begins a check, collects the ranks' answers,
    and computes the identity of the engine's weights. At most one check is open. A new check
    discards the answers to an earlier check.

    identity: identity of the weights to which the present key space belongs.
    were_written: True if a rank has reported a write to its weights after the last completed check.
    media_are_old: True if vLLM may still use encodings of images, audio or video that were computed
        with earlier weights. KV that depends on them must not be shared.
    question: id of the present or last check; 0 if there was none since `begin`.
    is_due: True if a check is to begin.
    is_asking: True while a check is open.
    is_fresh: True if no step has computed tokens since the start or the last pause. vLLM then has
        no encodings of media yet. The caller of `step` sets it to False if the step computes
        tokens.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        # The identity of the weights with which the engine started; empty before `begin`.
        self._original = self.identity = ""
        self.question = 0
        self._asked_s = self._since_s = 0.0
        self._answers: dict[int, WeightsReport] = {}
        self.is_due = self.is_asking = False
        # The value of `is_fresh` when the present check of the weights began.
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
        """Returns True while it is not known which weights the ranks have: a check of the weights
        is due or open. The engine must not store or load then."""
        return self.is_due or self.is_asking

    def suspect(self, has_paused: bool = False) -> None:
        """Records that the weights may have changed: a check of the weights (a question to all
        ranks which weights they have) is due. It begins when the engine next runs or looks up a
        request. Called when the engine pauses, or when its caches are reset.

        has_paused: True if the engine pauses, so that vLLM also drops its encodings of media.
        """
        self.is_due = True
        self.is_fresh |= has_paused
        self.media_are_old &= not has_paused

    def ask(self, now_s: float) -> None:
        """Begins a check of the weights: the next step asks all ranks which weights they have."""
        if not self.is_asking:
            self._since_s = now_s
        self._began_fresh = self.is_fresh
        self.question = next(_questions)
        self._asked_s = now_s
        self._answers.clear()
        self.is_due = False
        self.is_asking = True

    def waits(self, now_s: float) -> bool:
        """Returns True if a request's lookup should wait until the ranks have answered which
        weights they have (a check of the weights). Returns False if no check is open, or if it has
        been open for PATIENCE_S. Begins a check that is due."""
        if self.is_due:
            self.ask(now_s)
        return self.is_asking and now_s < self._since_s + PATIENCE_S

    def reported(self, reports: Mapping[int, WeightsReport], now_s: float) -> bool:
        """Processes the ranks' reports about weights, by rank. If a rank has noticed a write to its
        weights and no check of the weights (a question to all ranks which weights they have) is
        open, begins a check and returns True. If a rank has noticed a write after its answer to the
        open check, makes another check due."""
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
        """Advances a check of the weights (in which the ranks answer which weights they have) when
        vLLM has planned a step: begins a check that is due, and repeats a check whose answers are
        late. Returns the identity of the engine's present weights once all ranks have answered;
        None before that, or without a check.

        runs_something: True if the step computes tokens.
        """
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
        """Sets `identity` when the scheduler side has opened a session (a connection for one key
        space): at the start, or again, for example after a sleep. The session's key space belongs
        to the weights with this identity.

        Only the first call sets the original identity, because each rank (`RankWeights`) compares
        its weights with the weights that it had at its start. If a check of the weights was due, it
        stays due. If a check was open, answers of ranks may have been lost: the open check is
        discarded, and a new check becomes due.

        in_doubt: True if the ranks' weights may differ from `identity`, so that a check must come
            first.
        """
        self._original = self._original or identity
        self.identity = identity
        self.is_due = self.under_way or in_doubt
        if self.is_asking:
            self.question = 0
        self.is_asking = False

    def adopt(self, identity: str) -> None:
        """Ends the check of the weights, with its result `identity`: the identity of the engine's
        present weights. From then on the key space (a model in a configuration) belongs to these
        weights."""
        if self.were_written or identity != self.identity:
            self.media_are_old = not self._began_fresh
        self.identity = identity
        self.is_asking = False
        self.were_written = False

    def order(self) -> WeightsOrder | None:
        """Returns the order about weights (answer a check of the weights, or adopt its result) for
        a step's message. Each step repeats the order, because the message of a step may be lost.
        Returns None if there was no check, or if `begin` has stopped it."""
        if not self.question:
            return None
        return WeightsOrder(self.question, "" if self.is_asking else self.identity)


class RankWeights:
    """A rank's part of checks of the weights. In a check, the scheduler asks all ranks whether
    their weights have changed. This class answers with a digest of the rank's weights. It then
    stores the check's result, the identity of the engine's present weights, in `identity`.

    identity: identity of the weights to whose key space the rank's session must belong; empty
        until `begin`.
    """

    def __init__(self, watch: Watch | None) -> None:
        """
        watch: notices writes to the rank's weights and computes their digest; None if vLLM's
            models were not found. Without it, the rank can't read its weights, so every check
            counts them as changed.
        """
        self._watch = watch
        self._answered = 0
        self._waits = False
        self._was_written = False
        # `_settled`: digest of the weights in the last completed check of the weights. `_digest`:
        # digest in the rank's last answer to a check.
        self._settled = self._digest = watch.original if watch is not None else ""
        self._report: WeightsReport | None = None
        self.identity = ""

    def begin(self, identity: str, in_doubt: bool) -> None:
        """Sets the identity of the weights with which the engine started.

        in_doubt: True if they may be older than the files that `identity` names, so that a check
            must come first.
        """
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
        """Returns True while the rank must not send loads or stores: its weights were written, or
        it has told the scheduler which weights it has (in a check of the weights) and awaits the
        check's result."""
        return self._waits or (self._watch is not None and self._watch.touched)

    def obey(self, order: WeightsOrder | None) -> bool:
        """Carries out the scheduler's order in a step's message: answers a check of the weights, or
        adopts the check's result. Returns True if `identity` has changed. The caller must then open
        a session in the key space (a model in a configuration) of the new weights."""
        if order is not None and not order.identity and order.question != self._answered:
            self._answer(order.question)
        elif order is not None and order.identity and order.question == self._answered:
            # The order names the new identity. So the scheduler has the answers of all ranks, and
            # this check has ended.
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
        # If the digest has changed, the weights were written, although no write was noticed. This
        # counts as a write even if a later check finds the old weights again: steps may have run
        # with the changed weights in between.
        self._was_written |= self._digest != self._settled
        is_original = self._digest == self._watch.original
        self._report = WeightsReport(question, self._digest, is_original, self._was_written)

    def take_report(self) -> WeightsReport | None:
        """Returns the report about this rank's weights for the scheduler; None if there is no
        report. An answer to a check of the weights is returned once. A notice that the weights were
        written is returned by every call until the scheduler begins a check."""
        if self._report is None and self._watch is not None and self._watch.touched:
            return WeightsReport(0, was_written=True)
        report, self._report = self._report, None
        return report
