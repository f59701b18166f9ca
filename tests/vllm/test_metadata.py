"""Reports of ranks and steps are joined, and each counts once."""

import copy
import dataclasses
from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
    TransferStats,
)

from hotkv_vllm.identity.adapters import LATER, UNKNOWN, AdapterReport
from hotkv_vllm.identity.rekeying import WeightsReport
from hotkv_vllm.metadata import JOINS, HotKVHandshake, HotKVWorkerMetadata, StepReport
from hotkv_vllm.offloading.messages import DoorRankReport, DoorReport, PageFormat
from hotkv_vllm.report_ids import MAX_SEEN_IDS, SeenReports, report_ids


@dataclasses.dataclass
class Said:
    """A companion's report."""

    names: set[str]

    def join(self, other: "Said") -> "Said":
        return Said(self.names | other.names)


FIRST, SECOND = HotKVHandshake(None, "first"), HotKVHandshake(None, "second")
EXAMPLES: dict[str, tuple[Any, Any, Any]] = {
    "stores": (
        {1: {0: b"a"}, 2: {0: b"b"}},
        {2: {1: b"c", 2: b"d"}},
        {1: {0: b"a"}, 2: {0: b"b", 1: b"c", 2: b"d"}},
    ),
    "counters": ({"a": 1.0, "b": 2.0}, {"a": 5.0, "c": 7.0}, {"a": 6.0, "b": 2.0, "c": 7.0}),
    "companion": (Said({"a"}), Said({"b"}), Said({"a", "b"})),
    "handshakes": ({0: FIRST}, {1: SECOND}, {0: FIRST, 1: SECOND}),
    "settled_step": (3, 2, 3),
    "timed_step": (2, 3, 3),
    "overdue_loads": (("a", "b"), ("b", "c"), ("a", "b", "c")),
    "settled_loads": (
        {"a": frozenset({0})},
        {"a": frozenset({1}), "b": frozenset({1})},
        {"a": frozenset({0, 1}), "b": frozenset({1})},
    ),
    # The longest time counts, negative if any was late.
    "load_seconds": (
        {"a": 0.5, "b": -0.3, "c": -0.5},
        {"a": 0.3, "b": 0.5, "c": 0.3, "d": 0.3},
        {"a": 0.5, "b": -0.5, "c": -0.5, "d": 0.3},
    ),
    "links": ({0: "gone", 2: "gone"}, {1: "", 2: ""}, {0: "gone", 1: "", 2: ""}),
    "adapters": (
        AdapterReport({1: {0: "x"}}),
        AdapterReport({1: {1: "y"}}, frozenset({5})),
        AdapterReport({1: {0: "x", 1: "y"}}, frozenset({5})),
    ),
    "weights": tuple({n: WeightsReport(n) for n in ranks} for ranks in ((0,), (1,), (0, 1))),
}
"""Two values of each field, and the joined one."""


NAMES, RANKS = st.sampled_from("ab"), st.integers(0, 2)
WHOLE = st.integers(0, 9).map(float)
"""Their float sums are equal in any order."""


def positions() -> st.SearchStrategy[Any]:
    return st.lists(st.integers(0, 9), unique=True).map(lambda p: np.array(sorted(p), np.int32))


SAID: dict[str, st.SearchStrategy[Any]] = {
    "stores": st.dictionaries(
        st.integers(1, 2), st.dictionaries(RANKS, st.binary(max_size=2), min_size=1)
    ),
    "counters": st.dictionaries(NAMES, WHOLE),
    "companion": st.none() | st.builds(Said, st.sets(NAMES)),
    "handshakes": st.dictionaries(RANKS, st.builds(HotKVHandshake, st.none(), NAMES)),
    "settled_step": st.integers(0, 3),
    "timed_step": st.integers(0, 3),
    "overdue_loads": st.lists(NAMES, max_size=2).map(tuple),
    "settled_loads": st.dictionaries(NAMES, st.frozensets(RANKS, min_size=1)),
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
"""Values of each field in a rank's report."""


def plain(value: Any) -> Any:
    """Makes values comparable."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def joined(reports: list[StepReport]) -> StepReport:
    return reduce(StepReport.join, reports, StepReport())


def test_reports_are_joined_field_by_field() -> None:
    one, two, both = (
        StepReport(**{name: values[at] for name, values in EXAMPLES.items()}) for at in range(3)
    )
    before = copy.deepcopy(plain([one, two]))
    assert plain(one.join(two)) == plain(both)
    assert plain([one, two]) == before and not one.is_empty()
    # Another connector's report changes nothing.
    said = HotKVWorkerMetadata({(0, 0): one})
    assert said.aggregate(object()) is said  # type: ignore[arg-type]


def test_each_field_names_its_tried_join() -> None:
    names = [one.name for one in dataclasses.fields(StepReport)]
    assert [name for name, _ in JOINS] == names == list(SAID)


@pytest.mark.parametrize("name", [name for name in SAID if name != "counters"])
def test_report_joined_with_itself_stays(name: str) -> None:
    """Only counters add up."""

    @given(SAID[name])
    def twice(said: Any) -> None:
        one = StepReport(**{name: said})
        assert plain(one.join(one)) == plain(StepReport().join(one))

    twice()


# -------------------------------------------------------------------------------------- messages


def of_own(data: st.DataObject, number: int) -> Any:
    values = {name: data.draw(said) for name, said in SAID.items()}
    return HotKVWorkerMetadata({(number % 2, number): StepReport(**values)})


THEIRS = st.none() | st.builds(
    OffloadingWorkerMetadata,
    st.dictionaries(st.integers(0, 2), st.just(1)),
    st.just(TransferStats()),
)
OF_DOOR = st.builds(
    DoorRankReport,
    THEIRS,
    st.none() | st.builds(WeightsReport, st.integers(0, 2), NAMES),
    st.none() | st.builds(PageFormat, RANKS, NAMES),
    st.integers(0, 3),
    st.integers(0, 2),
)


def of_door(data: st.DataObject, number: int) -> Any:
    return DoorReport.of({(number % 2, number): data.draw(OF_DOOR)})


def heard(said: Any, before: SeenReports) -> Any:
    if isinstance(said, HotKVWorkerMetadata):
        return plain(said.joined(before))
    fresh = said.fresh(before)
    return plain([fresh.completed_jobs, fresh.parts])


@pytest.mark.parametrize("make", [of_own, of_door])
@given(data=st.data(), count=st.integers(1, 4))
def test_messages_joined_anyhow_and_repeatedly_say_the_same(
    make: Any, data: st.DataObject, count: int
) -> None:
    said = [make(data, number) for number in range(count)]
    before = copy.deepcopy(plain(said))
    expected = heard(reduce(lambda one, other: one.aggregate(other), said), SeenReports())
    again = data.draw(st.lists(st.sampled_from(said)))
    shuffled = data.draw(st.permutations([*said, *again]))
    while len(shuffled) > 1:
        # As aggregators in a tree may.
        at = data.draw(st.integers(0, len(shuffled) - 2))
        shuffled[at : at + 2] = [shuffled[at].aggregate(shuffled[at + 1])]
    known = SeenReports()
    assert heard(shuffled[0], known) == expected
    assert plain(said) == before, "a message was changed by being joined"
    # A later step repeats some.
    nothing = heard(make(data, 0), SeenReports()) and heard(type(said[0])(), SeenReports())
    for one in (shuffled[0], *said):
        assert heard(one, known) == nothing


@pytest.mark.parametrize("make", [of_own, of_door])
@given(data=st.data(), late=st.booleans())
def test_report_counts_when_it_first_comes(make: Any, data: st.DataObject, late: bool) -> None:
    first, second = make(data, 0), make(data, 1)
    known, alone = SeenReports(), heard(second, SeenReports())
    heard(first, known)
    assert heard(first.aggregate(second) if late else second.aggregate(first), known) == alone


def test_seen_reports_are_bounded_new_process_unique() -> None:
    known, ids = SeenReports(), [report_ids(rank) for rank in (0, 1)]
    for _ in range(MAX_SEEN_IDS):
        said = [next(one) for one in ids]
        assert known.fresh(reversed(said)) == said and known.fresh(said) == []
    assert len(known._ids) == MAX_SEEN_IDS
    assert known.fresh([next(report_ids(0))])
