"""Reports of ranks: how two are joined, and when there is nothing to report."""

import copy
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from hotkv_vllm.adapters import AdapterReport
from hotkv_vllm.metadata import HotKVHandshake, HotKVWorkerMetadata, StoreReport
from hotkv_vllm.rekeying import WeightsReport
from hotkv_vllm.sparse.reporter import SparseReport

FIRST, SECOND = HotKVHandshake(None, "first"), HotKVHandshake(None, "second")


def sparse(**counters: float) -> SparseReport:
    return SparseReport(layers={0: dict(counters)})


FULL: dict[str, Any] = {
    "stores": {1: StoreReport([b"a"]), 2: StoreReport([b"b"])},
    "counters": {"stores": 1.0, "loads": 2.0},
    "sparse": sparse(x=1.0),
    "handshakes": (FIRST,),
    "settled_step": 3,
    "overdue_loads": ("a", "b"),
    "settled_loads": {"a": 1},
    "links": {0: "gone"},
    "adapters": AdapterReport({1: {0: "x"}}),
    "weights": {0: WeightsReport(1)},
}
"""A report that has everything."""


def test_two_reports_are_joined_and_stay_as_they_are() -> None:
    one = HotKVWorkerMetadata(**copy.deepcopy(FULL))
    two = HotKVWorkerMetadata(
        stores={2: StoreReport([b"c", b"d"]), 3: StoreReport([b"e"])},
        counters={"stores": 5.0, "new": 7.0},
        sparse=sparse(x=2.0),
        handshakes=(SECOND,),
        settled_step=2,
        overdue_loads=("b", "c"),
        settled_loads={"a": 1, "b": 1},
        links={1: ""},
        adapters=AdapterReport({1: {1: "y"}}, frozenset({5})),
        weights={1: WeightsReport(2)},
    )
    before = copy.deepcopy((one, two))
    both = one.aggregate(two)
    assert both == HotKVWorkerMetadata(
        stores={
            1: StoreReport([b"a"]),
            2: StoreReport([b"b", b"c", b"d"]),
            3: StoreReport([b"e"]),
        },
        counters={"stores": 6.0, "loads": 2.0, "new": 7.0},
        sparse=sparse(x=3.0),
        handshakes=(FIRST, SECOND),
        settled_step=3,
        overdue_loads=("a", "b", "c"),
        settled_loads={"a": 2, "b": 1},
        links={0: "gone", 1: ""},
        adapters=AdapterReport({1: {0: "x", 1: "y"}}, frozenset({5})),
        weights={0: WeightsReport(1), 1: WeightsReport(2)},
    )
    assert (one, two) == before


def test_what_one_rank_alone_reports_is_in_the_joined_report() -> None:
    one, nothing = HotKVWorkerMetadata(**copy.deepcopy(FULL)), HotKVWorkerMetadata()
    assert one.aggregate(nothing) == nothing.aggregate(one) == one
    assert nothing.aggregate(nothing) == nothing


def test_reports_of_other_connectors_pass_by() -> None:
    class Other(KVConnectorWorkerMetadata):
        def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
            raise AssertionError

    one = HotKVWorkerMetadata(**FULL)
    assert one.aggregate(Other()) is one


@pytest.mark.parametrize("name", FULL)
def test_a_report_that_has_anything_is_not_empty(name: str) -> None:
    assert HotKVWorkerMetadata().is_empty()
    assert not HotKVWorkerMetadata(**{name: FULL[name]}).is_empty()


def test_counters_begin_at_nothing_and_grow() -> None:
    report = HotKVWorkerMetadata()
    report.count("loads", 2.0)
    report.count("loads", 3.0)
    assert report.counters == {"loads": 5.0}
