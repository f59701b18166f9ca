"""Block keys of requests with LoRA adapters. Scheduler thread only; pure.

vLLM's block hashes cover an adapter's name and path. A key also covers its *identity*, a digest of
the bytes that the workers have loaded, which the scheduler side asks for in a step's message
(`AdapterWork`) and ranks report (`AdapterReport`).

- A request has no keys until all ranks have answered for each of vLLM's ids of its adapter.
- An adapter with two identities never has keys again: vLLM's own prefix cache mixes their KV.
- While requests of an adapter run, workers keep the bytes that they have identified.
- A question is repeated until all ranks have answered.
"""

import enum
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

WAIT_S = 2.0
"""Then a request is computed without the shared cache."""
ASK_AGAIN_S = 5.0
MAX_ADAPTERS = 4096
UNKNOWN = ""
"""A rank can't identify the bytes that it has loaded."""
LATER = "later"
"""A rank has read ahead as many adapters as it may. It answers by itself as soon as it can."""
OTHER_BYTES = (
    "other bytes were loaded under its id while the engine ran (its files were changed, or "
    "load_inplace); a successor of an adapter shares blocks if it is loaded from another path, "
    "after the adapter was unloaded"
)

AdapterName = tuple[str, str]


@dataclass(frozen=True, slots=True)
class AdapterWork:
    """The workers carry out `released` before `asked`.

    asked: (number of the question, vLLM's LoRARequest).
    released: adapters without a running request.
    acknowledged: their change of bytes need not be reported any more.
    """

    asked: tuple[tuple[int, Any], ...] = ()
    released: tuple[int, ...] = ()
    acknowledged: frozenset[int] = frozenset()


NO_WORK = AdapterWork()


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """answers: by question, then by rank: an identity, UNKNOWN or LATER.
    changed: adapters, until the scheduler acknowledges it.
    """

    answers: Mapping[int, Mapping[int, str]] = field(default_factory=dict)
    changed: frozenset[int] = frozenset()

    def join(self, other: "AdapterReport") -> "AdapterReport":
        """A rank may have answered a repeated question twice: the worse answer stays."""
        answers = {number: dict(said) for number, said in self.answers.items()}
        for number, said in other.answers.items():
            known = answers.setdefault(number, {})
            for rank, identity in said.items():
                known[rank] = max(known.get(rank, identity), identity, key=_badness)
        return AdapterReport(answers, self.changed | other.changed)


def _badness(identity: str) -> tuple[bool, bool, str]:
    return identity == UNKNOWN, identity == LATER, identity


class Standing(enum.Enum):
    """WAIT: the ranks have not answered.
    NOT_YET: nor in time, or a rank has postponed its answer: computed without hotkv.
    NEVER: its adapter is refused or unknown.
    """

    KNOWN = "known"
    WAIT = "wait"
    NOT_YET = "not yet"
    NEVER = "never"


@dataclass(slots=True)
class _Id:
    """One of vLLM's ids; requests may use it for several adapters, one after the other.

    num_live: unfinished requests with it.
    asked: unanswered question; 0 without.
    answers: to the last question, by rank.
    is_put_off: a rank has postponed its answer.
    """

    names: set[AdapterName] = field(default_factory=set)
    num_live: int = 0
    asked: int = 0
    answers: dict[int, str] = field(default_factory=dict)
    is_put_off: bool = False
    has_changed: bool = False


@dataclass(slots=True)
class _Question:
    """asked_s: when a step last carried it; None if none has."""

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
    """last: vLLM's hash of the last block with a key. If it changes, all keys are computed anew."""

    keys: list[bytes] = field(default_factory=list)
    last: bytes = b""


class Adapters:
    """say: logs; at most once per adapter, and once beyond MAX_ADAPTERS."""

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
        """Registers a request; if it is registered, its wait begins anew. Asks about vLLM's id if
        no other running request uses it, or it is new for this adapter."""
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
        live = self._live.pop(request_id, None)
        if live is None:
            return
        one = self._ids[live[0]]
        one.num_live -= 1
        if not one.num_live:
            self._to_release.add(live[0])

    def standing(self, request: Any, now_s: float) -> Standing:
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
        """One per hash of vLLM; vLLM's own without an adapter; empty before it is identified."""
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
            # vLLM may remove tokens of streamed input. A hash covers all tokens before, so the
            # last one decides.
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
        return bool(self._questions or self._to_release or self._to_acknowledge)

    def take_work(self, now_s: float) -> AdapterWork:
        """Records the result as sent."""
        self._taken = NO_WORK
        if not self.has_work:
            return NO_WORK
        asked = [
            (number, one) for number, one in self._questions.items() if self._is_due(one, now_s)
        ]
        if not asked and not self._to_release and not self._to_acknowledge:
            return NO_WORK
        if any(one.asked_s is not None for _, one in asked):
            # The message that was lost may have carried releases too.
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
        """The last result of `take_work` was not sent."""
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
                        # The workers may have read it after its first release.
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
        """All ranks have answered. Refuses adapters whose bytes a rank can't identify or whose
        identity has changed."""
        self._forget_question(one)
        said = sorted(one.answers.items())
        if any(identity == UNKNOWN for _, identity in said):
            for name in one.names:
                self._refuse(name, "the workers can't tell which bytes they hold for it")
            return
        # Ranks may hold different parts of an adapter.
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
