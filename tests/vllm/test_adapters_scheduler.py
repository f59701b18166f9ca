"""Adapters in the scheduler side: block hashes, and adapters that may not use the server."""

import hashlib
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.lora.request import LoRARequest

from hotkv_vllm.identity.adapter_watch import AdapterWatch
from hotkv_vllm.identity.adapters import (
    ASK_AGAIN_S,
    MAX_ADAPTERS,
    NO_WORK,
    UNKNOWN,
    WAIT_S,
    AdapterReport,
    Adapters,
    Standing,
)
from tests.vllm.lora_manager import Manager, lora

# ------------------------------------------------------------------------------------ the scheduler


_names = itertools.count()


class FakeRequest:
    def __init__(self, adapter: LoRARequest | None, count: int = 4) -> None:
        self.request_id = f"r{next(_names)}"
        self.lora_request = adapter
        self.block_hashes = [hashlib.sha256(bytes([number])).digest() for number in range(count)]


def adapters(num_ranks: int = 1) -> tuple[Adapters, list[str]]:
    said: list[str] = []
    return Adapters(num_ranks, said.append), said


def answer(all_of: Adapters, *identities: str) -> None:
    """identities: by rank."""
    for number, _ in all_of.take_work(0.0).asked:
        for rank, identity in enumerate(identities):
            all_of.reported(AdapterReport({number: {rank: identity}}))


def arrive(all_of: Adapters, request: LoRARequest, now_s: float = 0.0) -> FakeRequest:
    one = FakeRequest(request)
    all_of.arrived(one, now_s)
    return one


def test_keys_wait_for_all_ranks_adapters() -> None:
    one, _ = adapters(2)
    request = arrive(one, lora())
    ((number, _),) = one.take_work(0.0).asked
    assert one.take_work(0.0) is NO_WORK
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


def test_keys_follow_the_request_and_vllm() -> None:
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


def test_workers_are_asked_once_per_living_requests() -> None:
    one, _ = adapters()
    first, second = arrive(one, lora()), arrive(one, lora())
    assert len(one.take_work(0.0).asked) == 1
    one.ended(first.request_id)
    assert one.take_work(0.0) is NO_WORK
    one.ended(second.request_id)
    third = arrive(one, lora())
    work = one.take_work(0.0)
    assert work.released == (1,) and len(work.asked) == 1
    # The first question's late answer must change nothing.
    one.reported(AdapterReport({1: {0: "x"}}))
    assert one.standing(third, 0.0) is Standing.WAIT
    one.reported(AdapterReport({work.asked[0][0]: {0: "x"}}))
    assert one.standing(third, 0.0) is Standing.KNOWN


@pytest.mark.parametrize("how", ["changed", "unknown", "other id", "other id first"])
def test_adapter_with_two_identities_is_excluded_once(how: str) -> None:
    one, said = adapters()
    request = arrive(one, lora())
    answer(one, "x")
    assert one.keys(request)
    if how == "changed":
        one.reported(AdapterReport(changed=frozenset({1})))
        assert one.take_work(0.0).acknowledged == {1}
        # With this option vLLM may have loaded another path's files.
        assert "load_inplace" in said[0]
    elif how == "unknown":
        one.ended(request.request_id)
        request = arrive(one, lora())
        answer(one, UNKNOWN)
    else:
        other = arrive(one, lora(2))
        # vLLM's own cache does not tell the two ids apart, so both wait.
        assert one.standing(request, 0.0) is Standing.WAIT and not one.keys(request)
        if how == "other id first":
            one.ended(other.request_id)
            other = arrive(one, lora(2))
        answer(one, "y")
        assert one.standing(other, 0.0) is Standing.NEVER
    assert one.standing(request, 0.0) is Standing.NEVER and not one.keys(request)
    for number in (1, 3):
        assert one.standing(arrive(one, lora(number)), 0.0) is Standing.NEVER
    assert len(said) == 1
    assert said[0].startswith(
        "requests of LoRA adapter 'a' (/a) do not use the shared cache in this engine: "
    )


def test_more_adapters_than_are_remembered_are_left_out() -> None:
    one, said = adapters()
    requests = [arrive(one, lora(number, str(number))) for number in range(1, MAX_ADAPTERS + 3)]
    answer(one, "x")
    known, *never = (one.standing(request, 0.0) for request in requests[-3:])
    assert known is Standing.KNOWN and never == [Standing.NEVER] * 2
    assert not one.keys(requests[-1]) and len(said) == 1
    one.ended(requests[-1].request_id)


# Two adapters with two ids each, and what happens to them.
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
        st.just(("lose_plan",)),
        st.just(("lose_step",)),
        st.just(("lose_report",)),
    ),
    min_size=8,
    max_size=24,
)


class Pair:
    """Both sides of an engine; reports come a step late.

    run_on: contents by (name, path), which vLLM's prefix cache mixes.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
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
        """Stored blocks must be of one content."""
        if not self.live:
            return
        request = self.live[place % len(self.live)]
        adapter = request.lora_request
        assert adapter is not None
        keys = list(self.all.keys(request))
        self.watch.before_step(self.all.take_work(self.now_s))
        content = self.manager.add_adapter(adapter)
        contents = self.run_on.setdefault((adapter.lora_name, adapter.lora_path), set())
        contents.add(content)
        if keys and self.watch.is_trusted:
            assert len(contents) == 1, "stored KV of mixed contents"
            assert self.meanings.setdefault(keys[0], content) == content, "one key for two contents"
        self.report()

    def step(self) -> None:
        self.watch.before_step(self.all.take_work(self.now_s))
        self.report()

    def settle(self) -> None:
        self.now_s += ASK_AGAIN_S
        for _ in range(3):
            self.step()

    def lose_plan(self) -> None:
        self.all.take_work(self.now_s)
        self.all.give_back()

    def lose_step(self) -> None:
        self.all.take_work(self.now_s)

    def lose_report(self) -> None:
        """Later reports repeat what changed, not the answers."""
        self.watch.before_step(self.all.take_work(self.now_s))
        self.watch.take_report()

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
    # One that was never rewritten must be usable.
    untouched = arrive(pair.all, lora(9, "c", "/c"))
    pair.manager.files["/c"] = 3
    pair.settle()
    assert pair.all.standing(untouched, 0.0) is Standing.KNOWN and pair.watch.is_trusted


@pytest.mark.parametrize("lost", ["plan", "step", "report"])
def test_a_question_is_asked_until_it_is_answered(lost: str) -> None:
    """Else requests with the adapter would never use the server."""
    pair = Pair()
    request = arrive(pair.all, lora())
    getattr(pair, f"lose_{lost}")()
    for _ in range(3):
        pair.step()
    is_told_at_once = lost == "plan"
    assert (pair.all.standing(request, WAIT_S) is Standing.KNOWN) == is_told_at_once
    pair.settle()
    assert pair.all.standing(request, WAIT_S) is Standing.KNOWN
    assert pair.all.take_work(pair.now_s + ASK_AGAIN_S) is NO_WORK
