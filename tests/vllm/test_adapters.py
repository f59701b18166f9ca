"""LoRA adapters by content: who may share, what workers say of their bytes, and what happens to
plans that rest on other bytes."""

import functools
import hashlib
import itertools
import logging
from collections import OrderedDict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.lora.request import LoRARequest

from hotkv.retention import NO_RETENTION
from hotkv_vllm.adapters import (
    LATER,
    MAX_ADAPTERS,
    NO_WORK,
    UNKNOWN,
    WAIT_S,
    AdapterReport,
    Adapters,
    AdapterWork,
    Standing,
)
from hotkv_vllm.metadata import HotKVWorkerMetadata
from hotkv_vllm.worker.adapter_watch import AdapterWatch, watch_adapters
from tests.vllm.harness import prompt
from tests.vllm.tiny import BLOCK_TOKENS

PROMPT = prompt(1, 200)
HIT = 192


def lora(number: int = 1, name: str = "a", path: str = "/a", **more: Any) -> LoRARequest:
    return LoRARequest(name, number, path, **more)


class Manager:
    """As vLLM's LoRA manager of a worker: reads "files" when an adapter is needed, and keeps
    `capacity` of them."""

    def __init__(self, files: dict[str, int], capacity: int = 2) -> None:
        self.files = files
        self.capacity = capacity
        self.loaded: OrderedDict[int, Any] = OrderedDict()
        self.num_reads = 0

    def _load_adapter(self, request: LoRARequest) -> Any:
        self.num_reads += 1
        weights = {
            "q": SimpleNamespace(
                lora_a=torch.full((2, 2), float(self.files[request.lora_path])), scaling=2.0
            )
        }
        return SimpleNamespace(id=request.lora_int_id, rank=8, loras=weights)

    def list_adapters(self) -> set[int]:
        return set(self.loaded)

    def add_adapter(self, request: LoRARequest) -> int:
        """The content that is used for the adapter."""
        if request.lora_int_id not in self.loaded or request.load_inplace:
            self.loaded[request.lora_int_id] = self._load_adapter(request)
        self.loaded.move_to_end(request.lora_int_id)
        while len(self.loaded) > self.capacity:
            self.loaded.popitem(last=False)
        return int(self.loaded[request.lora_int_id].loras["q"].lora_a[0, 0])


# --------------------------------------------------------------------------------------- the worker


def ask(watch: AdapterWatch, request: LoRARequest, number: int = 1) -> str:
    watch.before_step(AdapterWork(asked=((number, request),)))
    report = watch.take_report()
    assert report is not None
    return report.answers[number][0]


def test_an_identity_is_of_the_bytes_and_of_nothing_else() -> None:
    files = {"/a": 1, "/b": 1, "/c": 2}
    names = [
        ask(AdapterWatch(Manager(files)), lora(number, path[1:], path))
        for number, path in enumerate(files, 1)
    ]
    assert names[0] == names[1] != names[2] != UNKNOWN
    assert ask(AdapterWatch(Manager(files), settings="other"), lora()) != names[0]


@pytest.mark.parametrize("place", ["rank", "scaling", "lora_a", "another"])
def test_whatever_a_read_gives_counts(place: str) -> None:
    class Other(Manager):
        def _load_adapter(self, request: LoRARequest) -> Any:
            model = super()._load_adapter(request)
            if place == "rank":
                model.rank = 4
            elif place == "another":
                model.loras["k"] = model.loras["q"]
            else:
                weights = model.loras["q"]
                setattr(
                    weights, place, 1.0 if place == "scaling" else weights.lora_a.to(torch.bfloat16)
                )
            return model

    assert ask(AdapterWatch(Other({"/a": 1})), lora()) != ask(
        AdapterWatch(Manager({"/a": 1})), lora()
    )


def test_what_was_named_is_what_is_used_although_the_files_change() -> None:
    manager = Manager({"/a": 1})
    watch = AdapterWatch(manager)
    named = ask(watch, lora())
    manager.files["/a"] = 2
    assert manager.add_adapter(lora()) == 1 and manager.num_reads == 1
    assert ask(watch, lora()) == named and watch.is_trusted


def test_what_was_released_is_read_anew() -> None:
    manager = Manager({"/a": 1})
    watch = AdapterWatch(manager)
    named = ask(watch, lora())
    watch.before_step(AdapterWork(released=(1,)))
    assert manager.add_adapter(lora()) == 1 and manager.num_reads == 2
    assert ask(watch, lora()) == named


@pytest.mark.parametrize("how", ["evicted", "in place", "asked"])
def test_other_bytes_under_a_known_id_are_told_until_acknowledged(how: str) -> None:
    manager = Manager({"/a": 1, "/b": 1}, capacity=1)
    watch = AdapterWatch(manager)
    ask(watch, lora())
    manager.add_adapter(lora())
    watch.before_step(AdapterWork(released=(1,)))
    manager.files["/a"] = 2
    if how != "in place":
        manager.add_adapter(lora(2, "b", "/b"))
    assert watch.is_trusted
    if how == "asked":
        assert ask(watch, lora()) == UNKNOWN
    else:
        assert manager.add_adapter(lora(load_inplace=how == "in place")) == 2
    for _ in range(2):
        assert not watch.is_trusted
        report = watch.take_report()
        assert report == AdapterReport({}, frozenset({1}))
    watch.before_step(AdapterWork(acknowledged=frozenset({1})))
    assert watch.is_trusted and watch.take_report() is None
    # It changes back, but its old KV may lie about.
    manager.files["/a"] = 1
    assert manager.add_adapter(lora(load_inplace=True)) == 1 and ask(watch, lora()) == UNKNOWN


def test_a_reload_in_place_reads_the_files_whatever_was_read_ahead() -> None:
    manager = Manager({"/a": 1})
    watch = AdapterWatch(manager)
    ask(watch, lora(load_inplace=True))
    manager.files["/a"] = 2
    assert manager.add_adapter(lora(load_inplace=True)) == 2 and not watch.is_trusted


def test_few_adapters_are_read_ahead_and_the_rest_are_named_as_places_come_free() -> None:
    manager = Manager({f"/{number}": number for number in range(1, 8)})
    watch = AdapterWatch(manager, max_ahead=2)
    requests = [lora(number, str(number), f"/{number}") for number in range(1, 8)]
    watch.before_step(AdapterWork(asked=tuple(enumerate(requests, 1))))
    report = watch.take_report()
    assert report is not None
    assert [number for number, answer in report.answers.items() if answer[0] == LATER] == [
        3,
        4,
        5,
        6,
        7,
    ]
    watch.before_step(NO_WORK)
    assert watch.take_report() is None and manager.num_reads == 2
    manager.add_adapter(requests[0])
    manager.add_adapter(requests[5])
    watch.before_step(AdapterWork(released=(4,)))
    report = watch.take_report()
    assert (
        report is not None
        and set(report.answers) == {3, 6}
        and LATER not in (report.answers[3][0], report.answers[6][0])
    )
    watch.before_step(AdapterWork(released=(2, 3)))
    report = watch.take_report()
    assert report is not None and set(report.answers) == {5, 7}


def test_what_cant_be_read_or_found_is_unknown(caplog: Any) -> None:
    assert ask(AdapterWatch(None), lora()) == UNKNOWN
    with caplog.at_level(logging.ERROR):
        assert ask(AdapterWatch(Manager({})), lora()) == UNKNOWN
    assert "'a' could not be read" in caplog.text
    manager = Manager({"/a": 1})
    manager.add_adapter(lora())
    assert ask(AdapterWatch(manager), lora()) == UNKNOWN


def test_the_manager_of_the_worker_that_registers_its_caches_is_found() -> None:
    class Runner:
        vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(rank=3), lora_config=SimpleNamespace(max_loras=1)
        )
        lora_manager: Any = Manager({"/a": 1})

        def get_model(self) -> None: ...

        def initialize(self) -> AdapterWatch:
            return watch_adapters(self.vllm_config)

    watch = Runner().initialize()
    watch.before_step(AdapterWork(asked=((1, lora()),)))
    report = watch.take_report()
    assert watch.is_watching and report is not None and report.answers[1][3] != UNKNOWN
    Runner.lora_manager = None
    assert not Runner().initialize().is_watching
    assert not watch_adapters(Runner.vllm_config).is_watching


# ------------------------------------------------------------------------------------ the scheduler


_names = itertools.count()


class FakeRequest:
    """A request as far as it is looked at, with `count` block hashes."""

    def __init__(self, adapter: LoRARequest | None, count: int = 4) -> None:
        self.request_id = f"r{next(_names)}"
        self.lora_request = adapter
        self.block_hashes = [hashlib.sha256(bytes([number])).digest() for number in range(count)]


def adapters(num_ranks: int = 1) -> tuple[Adapters, list[str]]:
    said: list[str] = []
    return Adapters(num_ranks, said.append), said


def answer(all_of: Adapters, *identities: str) -> None:
    """Ranks answer all that is asked."""
    for number, _ in all_of.take_work().asked:
        for rank, identity in enumerate(identities):
            all_of.reported(AdapterReport({number: {rank: identity}}))


def arrive(all_of: Adapters, request: LoRARequest, now_s: float = 0.0) -> FakeRequest:
    one = FakeRequest(request)
    all_of.arrived(one, now_s)
    return one


def test_keys_wait_for_all_ranks_and_depend_on_what_each_holds() -> None:
    one, _ = adapters(2)
    request = arrive(one, lora())
    ((number, _),) = one.take_work().asked
    assert one.take_work() is NO_WORK
    one.reported(AdapterReport({number: {0: "x"}}))
    assert one.standing(request, 0.0) is Standing.WAIT and not one.keys(request)
    assert one.standing(request, WAIT_S) is Standing.NOT_YET
    one.reported(AdapterReport({number: {1: "y"}}))
    assert one.standing(request, WAIT_S) is Standing.KNOWN
    keys = one.keys(request)
    assert len(set(keys) | set(request.block_hashes)) == 8 and {len(key) for key in keys} == {32}
    for identities in (("y", "x"), ("x", "x"), ("y", "y")):
        other, _ = adapters(2)
        second = arrive(other, lora())
        answer(other, *identities)
        assert not set(other.keys(second)) & set(keys)
    same, _ = adapters(2)
    third = arrive(same, lora(7))
    answer(same, "x", "y")
    assert same.keys(third) == keys


def test_keys_grow_with_the_request_and_follow_what_vllm_takes_back() -> None:
    one, _ = adapters()
    request = arrive(one, lora())
    answer(one, "x")
    keys = list(one.keys(request))
    request.block_hashes.append(b"five" * 8)
    assert list(one.keys(request)[:4]) == keys and len(one.keys(request)) == 5
    request.block_hashes[3:] = [b"four" * 8]
    again = list(one.keys(request))
    assert again[:3] == keys[:3] and len(again) == 4 and again[3] != keys[3]
    request.block_hashes[3] = b"fore" * 8
    assert one.keys(request)[3] != again[3] and len(one.keys(request)) == 4
    plain = FakeRequest(None)
    assert one.keys(plain) is plain.block_hashes


def test_the_workers_are_asked_once_while_requests_live_and_hold_so_long() -> None:
    one, _ = adapters()
    first, second = arrive(one, lora()), arrive(one, lora())
    assert len(one.take_work().asked) == 1
    one.ended(first.request_id)
    assert one.take_work() is NO_WORK
    one.ended(second.request_id)
    third = arrive(one, lora())
    work = one.take_work()
    assert work.released == (1,) and len(work.asked) == 1
    # The answer to the first question says nothing of now.
    one.reported(AdapterReport({1: {0: "x"}}))
    assert one.standing(third, 0.0) is Standing.WAIT
    one.reported(AdapterReport({work.asked[0][0]: {0: "x"}}))
    assert one.standing(third, 0.0) is Standing.KNOWN


def test_a_put_off_answer_lets_the_request_go_and_may_still_come() -> None:
    one, _ = adapters(2)
    request = arrive(one, lora())
    ((number, _),) = one.take_work().asked
    one.reported(AdapterReport({number: {0: "x", 1: LATER}}))
    assert one.standing(request, 0.0) is Standing.NOT_YET and not one.keys(request)
    one.reported(AdapterReport({number: {1: "x"}}))
    assert one.standing(request, 0.0) is Standing.KNOWN


@pytest.mark.parametrize("how", ["changed", "unknown", "other id", "other id first"])
def test_an_adapter_with_two_identities_is_left_out_for_good_and_it_is_said_once(how: str) -> None:
    one, said = adapters()
    request = arrive(one, lora())
    answer(one, "x")
    assert one.keys(request)
    if how == "changed":
        one.reported(AdapterReport(changed=frozenset({1})))
        assert one.take_work().acknowledged == {1}
    elif how == "unknown":
        one.ended(request.request_id)
        request = arrive(one, lora())
        answer(one, UNKNOWN)
    else:
        other = arrive(one, lora(2))
        # While it is not known what the new id holds, the old one's requests wait too: vLLM's cache
        # names both alike.
        assert one.standing(request, 0.0) is Standing.WAIT and not one.keys(request)
        if how == "other id first":
            one.ended(other.request_id)
            other = arrive(one, lora(2))
        answer(one, "y")
        assert one.standing(other, 0.0) is Standing.NEVER
    assert one.standing(request, 0.0) is Standing.NEVER and not one.keys(request)
    for number in (1, 3):
        assert one.standing(arrive(one, lora(number)), 0.0) is Standing.NEVER
    assert len(said) == 1 and said[0].startswith(
        "requests of LoRA adapter 'a' (/a) do not use the shared cache in this engine: "
    )


def test_an_id_that_changed_is_not_trusted_under_another_name_either() -> None:
    one, said = adapters()
    one.reported(AdapterReport(changed=frozenset({1})))
    assert one.standing(arrive(one, lora(1, "b", "/b")), 0.0) is Standing.NEVER and len(said) == 1


def test_more_adapters_than_are_remembered_are_left_out() -> None:
    one, said = adapters()
    requests = [arrive(one, lora(number, str(number))) for number in range(1, MAX_ADAPTERS + 3)]
    answer(one, "x")
    assert [one.standing(request, 0.0) for request in requests[-3:]] == [
        Standing.KNOWN,
        Standing.NEVER,
        Standing.NEVER,
    ]
    assert not one.keys(requests[-1]) and len(said) == 1
    one.ended(requests[-1].request_id)


def test_what_ranks_report_is_joined() -> None:
    one = HotKVWorkerMetadata(adapters=AdapterReport({1: {0: "x"}}, frozenset({5})))
    two = HotKVWorkerMetadata(adapters=AdapterReport({1: {1: "y"}, 2: {1: "z"}}, frozenset({6})))
    assert one.aggregate(two).adapters == AdapterReport(
        {1: {0: "x", 1: "y"}, 2: {1: "z"}}, frozenset({5, 6})
    )
    assert (
        one.aggregate(HotKVWorkerMetadata()).adapters
        == HotKVWorkerMetadata().aggregate(one).adapters
        == one.adapters
    )
    assert not one.is_empty() and HotKVWorkerMetadata().is_empty()


# Two adapters of two ids each; what happens is a list of these. Files are rewritten, adapters
# evicted, requests come, run and end.
ADAPTERS = [("a", "/a"), ("b", "/b")]
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(1, 3), st.integers(0, 1)),
        st.tuples(st.just("run"), st.integers(0, 2)),
        st.tuples(st.just("reload"), st.integers(1, 2), st.integers(1, 2)),
        st.tuples(st.just("end"), st.integers(0, 5)),
        st.tuples(st.just("rewrite"), st.integers(0, 1), st.integers(1, 2)),
        st.tuples(st.just("evict"), st.integers(1, 3)),
        st.just(("settle",)),
    ),
    min_size=8,
    max_size=24,
)


class Pair:
    """Both sides of an engine, with reports that come a step late, beside what is true: the
    contents that each (name, path) has run on.

    A request that has run holds KV of all contents that its name has run on so far: vLLM's own
    cache may have given it any of them.
    """

    def __init__(self) -> None:
        self.manager = Manager({"/a": 1, "/b": 2}, capacity=3)
        self.watch = AdapterWatch(self.manager)
        self.all, _ = adapters()
        self.late: list[AdapterReport] = []
        self.live: list[FakeRequest] = []
        self.run_on: dict[tuple[str, str], set[int]] = {}
        self.meanings: dict[bytes, int] = {}

    def arrive(self, number: int, place: int) -> None:
        self.live.append(arrive(self.all, lora(number, *ADAPTERS[place])))

    def run(self, place: int) -> None:
        """A request's step: planned, then computed on what the manager holds, then stored unless
        the worker refuses it."""
        if not self.live:
            return
        request = self.live[place % len(self.live)]
        adapter = request.lora_request
        assert adapter is not None
        keys = list(self.all.keys(request))
        self.watch.before_step(self.all.take_work())
        content = self.manager.add_adapter(adapter)
        contents = self.run_on.setdefault((adapter.lora_name, adapter.lora_path), set())
        contents.add(content)
        if keys and self.watch.is_trusted:
            assert len(contents) == 1, "stored KV of mixed contents"
            assert self.meanings.setdefault(keys[0], content) == content, "one key for two contents"
        self.report()

    def step(self) -> None:
        self.watch.before_step(self.all.take_work())
        self.report()

    def settle(self) -> None:
        for _ in range(3):
            self.step()

    def report(self) -> None:
        for one in self.late:
            self.all.reported(one)
        report = self.watch.take_report()
        self.late = [] if report is None else [report]

    def end(self, place: int) -> None:
        if self.live:
            self.all.ended(self.live.pop(place % len(self.live)).request_id)

    def rewrite(self, place: int, content: int) -> None:
        self.manager.files[ADAPTERS[place][1]] = content

    def reload(self, number: int, content: int) -> None:
        """An id's files are rewritten and evicted, so that its next step reads them."""
        self.rewrite(0, content)
        self.evict(number)

    def evict(self, number: int) -> None:
        self.manager.loaded.pop(number, None)


@settings(max_examples=400, deadline=None)
@given(EVENTS)
def test_whatever_happens_a_key_stands_for_one_content(events: list[Any]) -> None:
    pair = Pair()
    for name, *arguments in events:
        getattr(pair, name)(*arguments)
    # Adapters that nothing was done to are usable in the end.
    untouched = arrive(pair.all, lora(9, "c", "/c"))
    pair.manager.files["/c"] = 3
    pair.settle()
    assert pair.all.standing(untouched, 0.0) is Standing.KNOWN and pair.watch.is_trusted


# ------------------------------------------------------------------------------ in vLLM's scheduler


def with_adapters(one: Any, files: dict[str, int], capacity: int = 2) -> Manager:
    """Gives an engine of the harness adapters whose contents show in its KV."""
    manager = Manager(files, capacity)
    one.worker._worker.adapters = AdapterWatch(manager)
    one.content_of = manager.add_adapter
    return manager


def generate(
    one: Any,
    name: str,
    adapter: LoRARequest | None,
    tokens: list[int] = PROMPT,
    max_tokens: int = 2,
) -> int:
    """Tokens that came from hotkv; the harness has checked each value that was read."""
    one.add(name, tokens, max_tokens, lora_request=adapter)
    one.run()
    return int(one.external.get(name, 0))


@pytest.mark.parametrize("pipelined", [False, True])
def test_engines_share_an_adapter_by_its_content(engine: Any, server: Any, pipelined: bool) -> None:
    one, other = engine(pipelined=pipelined), engine(pipelined=pipelined)
    with_adapters(one, {"/a": 1, "/b": 2})
    with_adapters(other, {"/a": 1, "/b": 3})
    cases = ((None, HIT), (lora(), HIT), (lora(2, "b", "/b"), 0), (lora(2, "c", "/a"), 0))
    for number, (adapter, _) in enumerate(cases[:3]):
        assert generate(one, f"cold{number}", adapter) == 0
    one.run()
    for number, (adapter, expected) in enumerate(cases):
        assert generate(other, f"warm{number}", adapter) == expected
    # Reports name blocks as stores did, and no call for plain requests has changed.
    stored = {
        bytes(h)
        for kind, runs in server.calls
        if kind == "store"
        for run in runs
        for h in run.hashes
    }
    reported = [
        report for kind, batch in server.calls if kind == "report_requests" for report in batch
    ]
    assert len(reported) == 7 and all(set(report.hashes) <= stored for report in reported)
    assert set(one.requests["cold0"].block_hashes[: HIT // BLOCK_TOKENS]) <= stored


def test_without_a_manager_adapters_bypass_and_it_is_said_once(
    engine: Any, server: Any, caplog: Any
) -> None:
    one, other = engine(), engine()
    with caplog.at_level(logging.WARNING):
        assert (
            generate(one, "a", lora())
            == generate(one, "b", lora())
            == generate(other, "a", lora())
            == 0
        )
    assert server.count("store") == 0 and one.counters.keys() <= {"reported_requests"}
    assert (
        caplog.text.count(
            "requests of LoRA adapter 'a' (/a) do not use the shared cache in this engine: the "
            "workers can't tell"
        )
        == 2
    )


def test_files_that_change_between_match_and_first_step_change_nothing(engine: Any) -> None:
    one, other = engine(), engine()
    with_adapters(one, {"/a": 1})
    manager = with_adapters(other, {"/a": 1})
    generate(one, "cold", lora())
    one.run()
    other.before_forward = lambda: manager.files.update({"/a": 2} if manager.num_reads else {})
    assert generate(other, "warm", lora()) == HIT and manager.num_reads == 1
    # It was released with its last request, and evicted: from now on its files count.
    generate(other, "between", None, prompt(3, 40))
    assert [meta.adapters.released for meta in other.metas if meta.adapters.released] == [(1,)]
    manager.loaded.clear()
    assert generate(other, "later", lora(), prompt(2, 100)) == 0
    assert other.contents == {"warm": 1, "later": 2}


def test_a_worker_that_is_not_trusted_loads_and_stores_nothing(engine: Any, server: Any) -> None:
    one, other = engine(), engine()
    answer, _ = one.generate("cold", PROMPT, 2)
    one.generate("stores end", prompt(9, 40))
    watch = AdapterWatch(Manager({}))
    watch._unacknowledged, watch.before_step = frozenset({1}), Mock()
    other.worker._worker.adapters = watch
    num_stores, num_loads = server.count("store"), server.count("load")
    other.generate("warm", PROMPT + prompt(2, 50), 2)
    other.generate("stores would end", prompt(8, 40))
    assert other.counters["failed_loads"] == 1 and (
        server.count("store"),
        server.count("load"),
    ) == (num_stores, num_loads)
    assert one.generate("again", PROMPT, 2)[0] == answer


def test_what_was_planned_on_old_bytes_is_dropped_when_the_change_is_told(
    engine: Any, server: Any
) -> None:
    one, other = engine(), engine()
    for each in (one, other):
        with_adapters(each, {"/a": 1})
    generate(one, "cold", lora())
    one.generate("stores end", prompt(9, 40))
    server.hold = {"load"}
    for name, adapter in (("adapter", lora()), ("base", None)):
        other.add(name, PROMPT if adapter else prompt(9, 40), 2, lora_request=adapter)
    for _ in range(10):
        other.step()
    scheduler = other.connector._scheduler
    assert {state.hit.phase.name for state in scheduler.requests.states.values()} == {"LOADING"}
    scheduler.cache.planner._tails.append((NO_RETENTION, ()))
    scheduler._named(scheduler.cache, AdapterReport(changed=frozenset({1})))
    assert not scheduler.cache.planner._tails and (
        scheduler.requests.loads.cancelled == ["adapter"]
    )
    server.hold = set()
    server.settle()
    other.run()


def rewrite_at(count: Iterator[int], step: int, manager: Manager) -> None:
    """Rewrites and evicts an adapter, once."""
    if next(count) == step:
        manager.files["/a"] = 2
        manager.loaded.clear()


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("length", [64, 70, 200])
def test_no_block_of_other_bytes_is_stored_whenever_they_are_loaded(
    engine: Any, pipelined: bool, length: int
) -> None:
    """One request lives, so nobody is asked; a step loads the rewritten files. Fresh engines with
    either content see no wrong KV."""
    settings = {"pipelined": pipelined, "blocks": 96}
    fresh = [engine(**settings) for _ in range(2)]
    for content, one in enumerate(fresh, 1):
        with_adapters(one, {"/a": content})
    for steps in range(6):
        one = engine(**settings)
        manager = with_adapters(one, {"/a": 1})
        one.add("long", prompt(100 + steps, 40), 60, lora_request=lora())
        for _ in range(4):
            one.step()
        one.add("new", prompt(steps, length), 3 + steps, lora_request=lora())
        one.before_forward = functools.partial(rewrite_at, itertools.count(), steps, manager)
        one.run()
        assert manager.num_reads == 2 and one.counters.get("hook_errors", 0) == 0
        for other in fresh:
            generate(other, f"new{steps}", lora(), prompt(steps, length))
            generate(other, f"long{steps}", lora(), prompt(100 + steps, 40))
