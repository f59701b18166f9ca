"""Tests how the reports of several ranks (`HotKVWorkerMetadata`, from the connector's workers to
its scheduler side) are joined into one report."""

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

POSITIONS = (
    {"a": np.array([1, 3]), "b": np.array([2])},
    {"a": np.array([0, 3])},
    {"a": np.array([0, 1, 3]), "b": np.array([2])},
)
FIRST, SECOND = HotKVHandshake(None, "first"), HotKVHandshake(None, "second")
EXAMPLES: dict[str, tuple[Any, Any, Any]] = {
    "stores": (
        {1: StoreReport([b"a"]), 2: StoreReport([b"b"])},
        {2: StoreReport([b"c", b"d"])},
        {1: StoreReport([b"a"]), 2: StoreReport([b"b", b"c", b"d"])},
    ),
    "counters": ({"a": 1.0, "b": 2.0}, {"a": 5.0, "c": 7.0}, {"a": 6.0, "b": 2.0, "c": 7.0}),
    "sparse": (
        SparseReport(POSITIONS[0], {0: {"x": 1.0}, 1: {"y": 5.0}}, frozenset("a")),
        SparseReport(POSITIONS[1], {0: {"x": 2.0, "z": 4.0}}, frozenset("b")),
        SparseReport(POSITIONS[2], {0: {"x": 3.0, "z": 4.0}, 1: {"y": 5.0}}, frozenset("ab")),
    ),
    "handshakes": ((FIRST,), (SECOND,), (FIRST, SECOND)),
    "settled_step": (3, 2, 3),
    "timed_step": (2, 3, 3),
    "overdue_loads": (("a", "b"), ("b", "c"), ("a", "b", "c")),
    "settled_loads": ({"a": 1}, {"a": 1, "b": 1}, {"a": 2, "b": 1}),
    # How long a load took in each rank. The longest time counts. A negative number says that the
    # load was late in that rank; then the joined number must be negative too.
    "load_seconds": (
        {"a": 0.5, "b": -0.3, "c": -0.5},
        {"a": 0.3, "b": 0.5, "c": 0.3, "d": 0.3},
        {"a": 0.5, "b": -0.5, "c": -0.5, "d": 0.3},
    ),
    "links": ({0: "gone", 2: "gone"}, {1: "", 2: ""}, {0: "gone", 1: "", 2: "gone"}),
    "adapters": (
        AdapterReport({1: {0: "x"}}),
        AdapterReport({1: {1: "y"}}, frozenset({5})),
        AdapterReport({1: {0: "x", 1: "y"}}, frozenset({5})),
    ),
    "weights": tuple({n: WeightsReport(n) for n in ranks} for ranks in ((0,), (1,), (0, 1))),
}
"""For each field of the report: the values of two ranks, and the joined value."""


NAMES, RANKS = st.sampled_from("ab"), st.integers(0, 2)
WHOLE = st.integers(0, 9).map(float)
"""Whole numbers, because their floating-point sums are the same in any order."""


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
"""For each field of the report: the possible values in a rank's report."""
SUMMED = {"stores", "counters", "settled_loads", "handshakes", "sparse"}
"""These fields are summed over ranks. So aggregators must not join the same report twice."""


def plain(value: Any) -> Any:
    """Returns the value in a form that `==` can compare: arrays become lists with their dtype,
    dataclasses become dicts."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def joined(reports: list[HotKVWorkerMetadata]) -> HotKVWorkerMetadata:
    return reduce(HotKVWorkerMetadata.aggregate, reports, HotKVWorkerMetadata())


def test_reports_are_joined_field_by_field() -> None:
    one, two, both = (
        HotKVWorkerMetadata(**{name: values[at] for name, values in EXAMPLES.items()})
        for at in range(3)
    )
    before = copy.deepcopy(plain([one, two]))
    assert plain(one.aggregate(two)) == plain(both)
    assert plain([one, two]) == before and not one.is_empty()
    # Joining with another connector's report must change nothing.
    assert one.aggregate(object()) is one  # type: ignore[arg-type]


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
            # Joins neighbouring reports in any order, as aggregators in a tree may.
            at = data.draw(st.integers(0, len(shuffled) - 2))
            shuffled[at : at + 2] = [shuffled[at].aggregate(shuffled[at + 1])]
        assert plain(shuffled[0]) == expected
        assert plain(reports) == before, "a report was changed by being joined"
        if name not in SUMMED:
            assert plain(joined([*reports, *reports])) == expected

    in_any_order()
