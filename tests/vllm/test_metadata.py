"""Reports of ranks: joining two reports, and empty reports."""

import copy
import dataclasses
from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotkv_vllm.identity.adapters import LATER, UNKNOWN, AdapterReport
from hotkv_vllm.identity.rekeying import WeightsReport
from hotkv_vllm.metadata import JOINS, HotKVHandshake, HotKVWorkerMetadata, StoreReport
from hotkv_vllm.sparse.reporter import SparseReport

FIRST, SECOND = HotKVHandshake(None, "first"), HotKVHandshake(None, "second")
EXAMPLES: dict[str, tuple[Any, Any, Any]] = {
    "stores": (
        {1: StoreReport([b"a"]), 2: StoreReport([b"b"])},
        {2: StoreReport([b"c", b"d"])},
        {1: StoreReport([b"a"]), 2: StoreReport([b"b", b"c", b"d"])},
    ),
    "counters": ({"a": 1.0, "b": 2.0}, {"a": 5.0, "c": 7.0}, {"a": 6.0, "b": 2.0, "c": 7.0}),
    "sparse": tuple(SparseReport(layers={0: {"x": value}}) for value in (1.0, 2.0, 3.0)),
    "handshakes": ((FIRST,), (SECOND,), (FIRST, SECOND)),
    "settled_step": (3, 2, 3),
    "overdue_loads": (("a", "b"), ("b", "c"), ("a", "b", "c")),
    "settled_loads": ({"a": 1}, {"a": 1, "b": 1}, {"a": 2, "b": 1}),
    "links": ({0: "gone"}, {1: ""}, {0: "gone", 1: ""}),
    "adapters": (
        AdapterReport({1: {0: "x"}}),
        AdapterReport({1: {1: "y"}}, frozenset({5})),
        AdapterReport({1: {0: "x", 1: "y"}}, frozenset({5})),
    ),
    "weights": tuple({n: WeightsReport(n) for n in ranks} for ranks in ((0,), (1,), (0, 1))),
}
"""For each field: the values of two ranks, and the joined value."""


def test_reports_are_joined_field_by_field() -> None:
    one, two, both = (
        HotKVWorkerMetadata(**{name: values[at] for name, values in EXAMPLES.items()})
        for at in range(3)
    )
    before = copy.deepcopy((one, two))
    assert one.aggregate(two) == both
    assert (one, two) == before
    # Other connectors' reports are ignored.
    assert one.aggregate(object()) is one  # type: ignore[arg-type]


NAMES, RANKS = st.sampled_from("ab"), st.integers(0, 2)
WHOLE = st.integers(0, 9).map(float)
"""Sums of whole numbers are the same in any order."""


def positions() -> st.SearchStrategy[Any]:
    return st.lists(st.integers(0, 9), unique=True).map(lambda p: np.array(sorted(p), np.int32))


SAID: dict[str, st.SearchStrategy[Any]] = {
    "stores": st.dictionaries(
        st.integers(1, 2), st.binary(max_size=2).map(lambda one: StoreReport([one]))
    ),
    "counters": st.dictionaries(NAMES, WHOLE),
    "sparse": st.none()
    | st.builds(
        SparseReport,
        st.dictionaries(NAMES, positions()),
        st.dictionaries(st.integers(0, 1), st.dictionaries(NAMES, WHOLE)),
        st.frozensets(NAMES),
    ),
    "handshakes": st.lists(st.builds(HotKVHandshake, st.none(), NAMES, rank=RANKS), max_size=2).map(
        tuple
    ),
    "settled_step": st.integers(0, 3),
    "timed_step": st.integers(0, 3),
    "overdue_loads": st.lists(NAMES, max_size=2).map(tuple),
    "settled_loads": st.dictionaries(NAMES, st.just(1)),
    "load_seconds": st.dictionaries(NAMES, st.sampled_from([-0.5, -0.3, 0.3, 0.5])),
    "links": st.dictionaries(RANKS, st.sampled_from(["", "gone", "refused"])),
    "adapters": st.none()
    | st.builds(
        AdapterReport,
        st.dictionaries(
            st.integers(1, 2),
            st.dictionaries(RANKS, st.sampled_from([UNKNOWN, LATER, "x", "y"])),
        ),
        st.frozensets(st.integers(1, 2)),
    ),
    "weights": st.dictionaries(
        RANKS, st.builds(WeightsReport, st.integers(0, 2), NAMES, st.booleans(), st.booleans())
    ),
}
"""For each field: the possible values in a rank's report."""
SUMMED = {"stores", "counters", "settled_loads", "handshakes", "sparse"}
"""These fields are summed over ranks, so no report may be joined twice."""


def plain(value: Any) -> Any:
    """Returns the value in a form that `==` compares, arrays too."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def joined(reports: list[HotKVWorkerMetadata]) -> HotKVWorkerMetadata:
    return reduce(HotKVWorkerMetadata.aggregate, reports, HotKVWorkerMetadata())


def test_each_field_names_its_join_and_is_tried_here() -> None:
    names = {one.name for one in dataclasses.fields(HotKVWorkerMetadata)}
    assert JOINS.keys() == names == SAID.keys()


@pytest.mark.parametrize("name", SAID)
def test_reports_join_to_the_same_in_any_order_and_grouping(name: str) -> None:
    @given(st.data(), st.lists(SAID[name], min_size=2, max_size=4))
    def in_any_order(data: st.DataObject, said: list[Any]) -> None:
        reports = [HotKVWorkerMetadata(**{name: one}) for one in said]
        before = copy.deepcopy(plain(reports))
        expected = plain(joined(reports))
        shuffled = data.draw(st.permutations(reports))
        while len(shuffled) > 1:
            # Joins any two neighbours, as a tree of aggregators may.
            at = data.draw(st.integers(0, len(shuffled) - 2))
            shuffled[at : at + 2] = [shuffled[at].aggregate(shuffled[at + 1])]
        assert plain(shuffled[0]) == expected
        assert plain(reports) == before, "a report was changed by being joined"
        if name not in SUMMED:
            assert plain(joined([*reports, *reports])) == expected

    in_any_order()


@given(st.lists(st.tuples(SAID["load_seconds"], SAID["links"]), min_size=1, max_size=3))
def test_the_worst_that_a_rank_says_is_kept(said: list[tuple[Any, Any]]) -> None:
    both = joined([HotKVWorkerMetadata(load_seconds=load, links=links) for load, links in said])
    seconds = [load.get("a", 0.0) for load, _ in said]
    found = both.load_seconds.get("a", 0.0)
    assert (found < 0) == (min(seconds) < 0) and abs(found) == max(map(abs, seconds))
    assert bool(both.links.get(1)) == any(links.get(1) for _, links in said)


@given(st.lists(SAID["sparse"], min_size=1, max_size=4))
def test_what_ranks_say_of_sparse_decode_is_summed_up(said: list[SparseReport | None]) -> None:
    both, reports = joined([HotKVWorkerMetadata(sparse=one) for one in said]), [*filter(None, said)]
    found = both.sparse or SparseReport()
    assert both.is_empty() == (not reports)
    assert found.ended == frozenset().union(*(one.ended for one in reports))
    for name in "ab":
        at = [one.positions[name].tolist() for one in reports if name in one.positions]
        assert found.positions.get(name, np.array(())).tolist() == sorted(set[int]().union(*at))
        for layer in (0, 1):
            counters = [one.layers.get(layer, {}).get(name, 0) for one in (*reports, found)]
            assert sum(counters[:-1]) == counters[-1]
