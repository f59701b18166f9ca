"""Computes the block keys of requests with LoRA adapters, so that they depend on the adapters'
contents. Scheduler thread only; pure.

vLLM's block hashes cover an adapter's name and path, but not its bytes. Here a block's key is a
hash over vLLM's hash and the adapter's *identity*: a digest of the bytes that this engine's workers
have loaded. So engines share KV of an adapter only if their adapters are equal.

The scheduler side learns identities by *questions*: in the message of a step (`AdapterWork`) it
asks all ranks which bytes they hold for vLLM's id of an adapter. The ranks answer in their reports
(`AdapterReport`). Each question has an id, its *number*.

Always true:
- A request with an adapter has no keys (so neither hits nor stores) until all ranks have answered
  for each id of that adapter. (vLLM may load the same adapter again under another id.)
- If an adapter was seen with two identities, its requests have no keys for the rest of the engine's
  life. The reason: vLLM's own prefix cache does not distinguish the two and mixes their KV.
- As long as requests of an adapter run, workers retain the bytes that they have identified.
- A question is repeated until all ranks have answered, even if steps or reports are lost.
"""

import enum
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

WAIT_S = 2.0
"""A request with an adapter waits at most this long for the ranks to identify the adapter, seconds.
After that it is computed without the shared cache."""
ASK_AGAIN_S = 5.0
"""If ranks have not answered a question about an adapter within this time, in seconds, the question
is repeated, because it or an answer was lost."""
MAX_ADAPTERS = 4096
"""Most adapters that are remembered. Requests of further adapters do not use the shared cache."""
UNKNOWN = ""
"""A rank's answer if it can't identify the bytes that it has loaded for an adapter."""
LATER = "later"
"""A rank's answer if it must postpone the identification of an adapter, because it has already read
the allowed number of adapters that vLLM has not loaded yet. The rank sends its final answer by
itself as soon as it can."""
OTHER_BYTES = (
    "other bytes were loaded under its id while the engine ran (its files were changed, or "
    "load_inplace); a successor of an adapter shares blocks if it is loaded from another path, "
    "after the adapter was unloaded"
)
"""Text for the log: why requests of an adapter do not use the shared cache after other bytes were
loaded under its id."""

AdapterName = tuple[str, str]
"""An adapter's name and path, by which vLLM's block hashes identify the adapter."""


@dataclass(frozen=True, slots=True)
class AdapterWork:
    """The part of a step's message that tells the workers what to do about adapters. The workers
    carry out `released` before `asked`.

    asked: the adapters that each rank must identify, each as (number of the question, vLLM's
        LoRARequest of the adapter). The answer refers to the question by its number.
    released: ids of adapters without a running request. The workers need not retain the bytes of
        these adapters.
    acknowledged: ids of adapters whose change of bytes has reached the scheduler. The workers stop
        reporting these changes.
    """

    asked: tuple[tuple[int, Any], ...] = ()
    released: tuple[int, ...] = ()
    acknowledged: frozenset[int] = frozenset()


NO_WORK = AdapterWork()


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """The workers' report about adapters.

    answers: the answers to the scheduler's questions: by number of the question, then by rank. An
        answer is the adapter's identity (digest of its bytes), UNKNOWN (the rank can't identify
        the bytes) or LATER (the rank has postponed its answer).
    changed: ids of adapters whose bytes have changed. They are reported until the scheduler
        acknowledges the change.
    """

    answers: Mapping[int, Mapping[int, str]] = field(default_factory=dict)
    changed: frozenset[int] = frozenset()

    def join(self, other: "AdapterReport") -> "AdapterReport":
        """Returns one report with the contents of both reports, for example of two ranks. A rank
        may have answered a question twice, if the question was repeated. If its answers differ, the
        result contains the less favourable answer: UNKNOWN, otherwise LATER (`_badness`)."""
        answers = {number: dict(said) for number, said in self.answers.items()}
        for number, said in other.answers.items():
            known = answers.setdefault(number, {})
            for rank, identity in said.items():
                known[rank] = max(known.get(rank, identity), identity, key=_badness)
        return AdapterReport(answers, self.changed | other.changed)


def _badness(identity: str) -> tuple[bool, bool, str]:
    """Returns a sort key for a rank's answers, greatest for the least favourable answer: UNKNOWN
    (bytes can't be identified) is worse than LATER (postponed), and LATER is worse than an
    identity."""
    return identity == UNKNOWN, identity == LATER, identity


class Standing(enum.Enum):
    """The answer to the question whether a request with an adapter may use hotkv.

    KNOWN: the request may use hotkv, because the identity of its adapter is known.
    WAIT: the ranks have not answered yet which bytes they hold; the request should wait.
    NOT_YET: the ranks have not answered, but the request has waited long enough, or a rank has
        postponed its answer. The request is computed without hotkv.
    NEVER: the request may not use hotkv.
    """

    KNOWN = "known"
    WAIT = "wait"
    NOT_YET = "not yet"
    NEVER = "never"


@dataclass(slots=True)
class _Id:
    """The scheduler's record of one of the ids that vLLM gives to adapters. Requests may use the
    same id for several adapters, one after the other.

    names: the adapters (name and path) that requests have used with this id.
    num_live: number of unfinished requests with this id.
    asked: number (id) of the unanswered question that asks the ranks which bytes they hold for this
        adapter id; 0 if there is no such question.
    answers: the ranks' answers to the last question, by rank.
    is_put_off: True if a rank has postponed its answer.
    has_changed: True if a rank has reported that other bytes were loaded under this id.
    """

    names: set[AdapterName] = field(default_factory=set)
    num_live: int = 0
    asked: int = 0
    answers: dict[int, str] = field(default_factory=dict)
    is_put_off: bool = False
    has_changed: bool = False


@dataclass(slots=True)
class _Question:
    """A question to the ranks: which bytes do they hold for the adapter with this id?

    lora: vLLM's LoRARequest of the adapter.
    asked_s: time at which a step last carried the question to the workers; None if no step has.
    """

    adapter_id: int
    lora: Any
    asked_s: float | None = None


@dataclass(slots=True)
class _Adapter:
    ids: set[int] = field(default_factory=set)
    identity: str = ""
    is_refused: bool = False


@dataclass(slots=True)
class _Keys:
    """The block keys of a request that were computed so far.

    last: vLLM's hash of the last block for which there is a key. If vLLM now has another hash for
        this block, it has removed tokens of the request, and all keys are computed anew.
    """

    keys: list[bytes] = field(default_factory=list)
    last: bytes = b""


class Adapters:
    """Tracks adapters, their ids in vLLM, and the running requests that use them. Computes the
    block keys of these requests.

    num_ranks: number of the engine's ranks.
    say: takes a message and logs it. Called at most once per adapter, and once if there are more
        than MAX_ADAPTERS.
    is_used: True once a request had an adapter, or the workers have reported one.
    """

    def __init__(self, num_ranks: int, say: Callable[[str], None]) -> None:
        self._num_ranks = num_ranks
        self._say = say
        self.is_used = False
        self._ids: dict[int, _Id] = {}
        self._adapters: dict[AdapterName, _Adapter] = {}
        self._live: dict[str, tuple[int, AdapterName, float]] = {}
        self._questions: dict[int, _Question] = {}
        self._numbers = itertools.count(1)
        self._logged_many = False
        self._keys: WeakKeyDictionary[Any, _Keys] = WeakKeyDictionary()
        self._to_release: set[int] = set()
        self._to_acknowledge: frozenset[int] = frozenset()
        self._taken = NO_WORK

    def __repr__(self) -> str:
        refused = sum(adapter.is_refused for adapter in self._adapters.values())
        return (
            f"Adapters({len(self._adapters)}, {refused} refused, {len(self._questions)} asked "
            f"about, {len(self._live)} requests)"
        )

    # ------------------------------------------------------------------------------------- requests

    def arrived(self, request: Any, now_s: float) -> None:
        """Registers a request with an adapter; if it is registered, its wait begins anew. The next
        step's message asks the ranks which bytes they hold for vLLM's id of the adapter, if no
        other running request uses the id, or if the id was not used for this adapter before."""
        self.is_used = True
        lora = request.lora_request
        name = (lora.lora_name, lora.lora_path)
        if request.request_id in self._live:
            self._live[request.request_id] = (lora.lora_int_id, name, now_s)
            return
        if name not in self._adapters and len(self._adapters) >= MAX_ADAPTERS:
            if not self._logged_many:
                self._logged_many = True
                self._say(
                    f"requests of more than {MAX_ADAPTERS} LoRA adapters do not use the shared "
                    "cache in this engine"
                )
            return
        adapter = self._adapters.setdefault(name, _Adapter())
        one = self._ids.setdefault(lora.lora_int_id, _Id())
        is_new = name not in one.names
        one.names.add(name)
        adapter.ids.add(lora.lora_int_id)
        one.num_live += 1
        self._live[request.request_id] = (lora.lora_int_id, name, now_s)
        if one.has_changed:
            self._refuse(name, OTHER_BYTES)
        elif not adapter.is_refused and (one.num_live == 1 or is_new):
            self._ask(one, lora)

    def ended(self, request_id: str) -> None:
        """Forgets a request that has ended. Ignores a request without an adapter."""
        live = self._live.pop(request_id, None)
        if live is None:
            return
        one = self._ids[live[0]]
        one.num_live -= 1
        if not one.num_live:
            self._to_release.add(live[0])

    def standing(self, request: Any, now_s: float) -> Standing:
        """Returns whether a request with an adapter may use hotkv now, or should wait (see
        `Standing`). Returns NEVER if `arrived` did not register the request, or if the adapter's
        bytes have changed or can't be identified."""
        live = self._live.get(request.request_id)
        if live is None or self._adapters[live[1]].is_refused:
            return Standing.NEVER
        if self._is_known(self._adapters[live[1]]):
            return Standing.KNOWN
        return (
            Standing.WAIT
            if now_s < live[2] + WAIT_S and not self._ids[live[0]].is_put_off
            else Standing.NOT_YET
        )

    def keys(self, request: Any) -> Sequence[bytes]:
        """Returns the keys (hashes) by which the server identifies a request's complete blocks, one
        for each of vLLM's hashes. For a request without an adapter these are vLLM's hashes. Returns
        an empty sequence while the identity of the request's adapter is not known."""
        hashes: Sequence[bytes] = request.block_hashes
        lora = request.lora_request
        if lora is None:
            return hashes
        adapter = self._adapters.get((lora.lora_name, lora.lora_path))
        if adapter is None or not self._is_known(adapter):
            return ()
        mine = self._keys.setdefault(request, _Keys())
        count = len(mine.keys)
        if count > len(hashes) or (count and hashes[count - 1] != mine.last):
            # vLLM may have removed tokens of a request with streamed input. Each hash covers all
            # earlier tokens, so it is enough to compare the last hash.
            mine.keys, count = [], 0
        if count < len(hashes):
            salted = hashlib.sha256(b"hotkv-adapter-1\0" + adapter.identity.encode() + b"\0")
            for block_hash in hashes[count:]:
                salted_hash = salted.copy()
                salted_hash.update(block_hash)
                mine.keys.append(salted_hash.digest()[: len(block_hash)])
            mine.last = hashes[-1]
        return mine.keys

    # ---------------------------------------------------------------------------------------- steps

    @property
    def has_work(self) -> bool:
        """Returns True if the next step's message may have an adapters' part."""
        return bool(self._questions or self._to_release or self._to_acknowledge)

    def take_work(self, now_s: float) -> AdapterWork:
        """Returns the adapters' part of the next step's message, and records it as sent."""
        self._taken = NO_WORK
        if not self.has_work:
            return NO_WORK
        asked = [
            (number, one) for number, one in self._questions.items() if self._is_due(one, now_s)
        ]
        if not asked and not self._to_release and not self._to_acknowledge:
            return NO_WORK
        if any(one.asked_s is not None for _, one in asked):
            # A question that is asked again shows that an earlier message to the workers may have
            # been lost. That message may also have carried releases of adapters, so all releases
            # are repeated too.
            self._to_release |= {number for number, one in self._ids.items() if not one.num_live}
        for _, one in asked:
            one.asked_s = now_s
        self._taken = AdapterWork(
            tuple((number, one.lora) for number, one in asked),
            tuple(sorted(self._to_release)),
            self._to_acknowledge,
        )
        self._to_release = set()
        self._to_acknowledge = frozenset()
        return self._taken

    def give_back(self) -> None:
        """Undoes the last call of `take_work`, because its result was not sent to the workers. The
        next call returns the same questions, releases and acknowledgements again."""
        for number, _ in self._taken.asked:
            if number in self._questions:
                self._questions[number].asked_s = None
        self._to_release |= {one for one in self._taken.released if not self._ids[one].num_live}
        self._to_acknowledge |= self._taken.acknowledged
        self._taken = NO_WORK

    def _is_due(self, question: _Question, now_s: float) -> bool:
        if question.asked_s is None:
            return True
        is_late = now_s >= question.asked_s + ASK_AGAIN_S
        adapters = (self._adapters[name] for name in self._ids[question.adapter_id].names)
        return is_late and any(self._ids[one].num_live for of in adapters for one in of.ids)

    def reported(self, report: AdapterReport) -> None:
        """Processes the workers' report about adapters: their answers, and changes of bytes."""
        self.is_used = True
        self._to_acknowledge |= report.changed
        for adapter_id in report.changed:
            one = self._ids.setdefault(adapter_id, _Id())
            one.has_changed = True
            for name in one.names:
                self._refuse(name, OTHER_BYTES)
        for number, answers in report.answers.items():
            question = self._questions.get(number)
            if question is not None:
                known = self._ids[question.adapter_id]
                known.answers.update(answers)
                known.is_put_off = LATER in known.answers.values()
                if len(known.answers) >= self._num_ranks and not known.is_put_off:
                    self._settle(known)
                    if not known.num_live:
                        # Releases the adapter again: the workers may have read it after they had
                        # received its first release.
                        self._to_release.add(question.adapter_id)

    def _ask(self, one: _Id, lora: Any) -> None:
        self._forget_question(one)
        one.asked = next(self._numbers)
        one.answers = {}
        self._questions[one.asked] = _Question(lora.lora_int_id, lora)

    def _forget_question(self, one: _Id) -> None:
        self._questions.pop(one.asked, None)
        one.asked = 0
        one.is_put_off = False

    def _settle(self, one: _Id) -> None:
        """Ends the question about an adapter id, because all ranks have answered. Sets the identity
        of the adapters that have this id. Excludes these adapters from hotkv if a rank can't
        identify the bytes, or if the new identity differs from an earlier one."""
        self._forget_question(one)
        said = sorted(one.answers.items())
        if any(identity == UNKNOWN for _, identity in said):
            for name in one.names:
                self._refuse(name, "the workers can't tell which bytes they hold for it")
            return
        # Ranks may hold different parts of an adapter, so the identity covers all ranks' answers in
        # order.
        identity = hashlib.sha256(
            "\0".join(f"{rank}={held}" for rank, held in said).encode()
        ).hexdigest()
        for name in one.names:
            adapter = self._adapters[name]
            if adapter.identity not in ("", identity):
                self._refuse(
                    name, "other files were loaded under its name and path while the engine ran"
                )
            adapter.identity = adapter.identity or identity

    def _refuse(self, name: AdapterName, why: str) -> None:
        adapter = self._adapters[name]
        if not adapter.is_refused:
            adapter.is_refused = True
            self._say(
                f"requests of LoRA adapter {name[0]!r} ({name[1]}) do not use the shared cache "
                f"in this engine: {why}"
            )

    def _is_known(self, adapter: _Adapter) -> bool:
        return (
            bool(adapter.identity)
            and not adapter.is_refused
            and not any(self._ids[one].asked for one in adapter.ids)
        )
