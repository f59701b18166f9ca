"""`PageStaging`, against a model that copies every page anew."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotkv_sparse.vllm.cpu.resident_pages import PageStaging, staged_places
from hotkv_sparse.vllm.cpu.swap import PageCopier

NUM_LAYERS, NUM_SLOTS, NUM_BLOCKS, PAGE = 3, 12, 6, 64
DICE = np.random.default_rng(0)
ARENA = DICE.integers(0, 256, (NUM_SLOTS, NUM_LAYERS, PAGE), np.uint8)
DEVICE = DICE.integers(0, 256, (NUM_LAYERS, NUM_BLOCKS, PAGE), np.uint8)
PLACES: Any = SimpleNamespace(pages={index: index * PAGE for index in range(NUM_LAYERS)})


def layer(index: int) -> Any:
    pages = SimpleNamespace(page_bytes=PAGE, tensor=torch.from_numpy(DEVICE[index]))
    return SimpleNamespace(name=f"l{index}", index=index, group=0, pages=pages)


LAYERS = [layer(index) for index in range(NUM_LAYERS)]
asked = st.tuples(
    st.integers(0, NUM_LAYERS - 1),
    st.lists(st.integers(0, NUM_SLOTS - 1), max_size=9, unique=True),
    st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=4),
    st.booleans(),
)


def filled(staging: PageStaging, index: int, slots: list[int], blocks: list[int], on: bool) -> Any:
    at = ARENA.ctypes.data + np.array(slots, np.int64) * NUM_LAYERS * PAGE
    here = DEVICE[index].ctypes.data + np.array(blocks, np.int64) * PAGE
    return staging.fill(LAYERS[index], at, here, goes_on=on).numpy()[: len(slots) + len(blocks)]


def refused(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def staging_of(monkeypatch: pytest.MonkeyPatch, num_cores: int) -> PageStaging:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(num_cores)))
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    return PageStaging(LAYERS, PLACES, PageCopier())


@given(calls=st.lists(asked, max_size=12), num_cores=st.integers(1, 2))
def test_pages_are_those_that_were_asked_for(calls: list[Any], num_cores: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        staging = staging_of(patch, num_cores)
        for index, slots, blocks, goes_on in calls:
            found = filled(staging, index, slots, blocks, goes_on)
            wanted = np.concatenate([ARENA[slots, index], DEVICE[index][blocks]])
            assert np.array_equal(found, wanted)


def test_step_copies_ahead_on_a_free_core(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_cores, num_ahead in ((2, 2 * 5), (1, 0)):
        staging = staging_of(monkeypatch, num_cores)
        for index in range(NUM_LAYERS):
            # In each layer another number of blocks is on the device.
            found = filled(staging, index, [3, 4, 5, 6, 7], list(range(3 - index)), True)
            assert np.array_equal(found[:5], ARENA[3:8, index])
        assert staging.num_ahead == num_ahead


@pytest.mark.parametrize(("group", "page_bytes"), [(1, PAGE), (0, 2 * PAGE)])
def test_layer_with_other_pages_copies_nothing_ahead(
    monkeypatch: pytest.MonkeyPatch, group: int, page_bytes: int
) -> None:
    """Blocks of another group have other slots."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    pages = SimpleNamespace(
        page_bytes=page_bytes, tensor=torch.zeros(1, page_bytes, dtype=torch.uint8)
    )
    other: Any = SimpleNamespace(name="other", index=1, group=group, pages=pages)
    staging = PageStaging([LAYERS[0], other], PLACES, PageCopier())
    slots = ARENA.ctypes.data + np.arange(3, 8) * NUM_LAYERS * PAGE
    for one in (LAYERS[0], other):
        found = staging.fill(one, slots, np.empty(0, np.int64), goes_on=True).numpy()
    wanted = ARENA.reshape(NUM_SLOTS, -1)[3:8, PAGE : PAGE + page_bytes]
    assert np.array_equal(found.reshape(-1)[: wanted.size], wanted.reshape(-1))
    assert staging.num_ahead == 0


def test_without_a_thread_nothing_is_copied_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("threading.Thread.start", refused)
    staging = staging_of(monkeypatch, num_cores=2)
    for index in range(NUM_LAYERS):
        assert np.array_equal(filled(staging, index, [3, 4], [], True)[:2], ARENA[3:5, index])
    assert not staging.num_ahead


def test_area_grows_ahead_to_the_longest_context() -> None:
    staging = PageStaging(LAYERS, PLACES, PageCopier(), usual_blocks=10)
    for count, most in ((4, 4), (5, 8), (9, 10), (12, 12)):
        filled(staging, 0, list(range(count)), [], False)
        assert max(area.numel() for area in staging._areas) == most * PAGE


def test_what_only_the_server_has_lies_first() -> None:
    is_away = np.array([False, True, True, False, True])
    assert staged_places(is_away).tolist() == [3, 0, 1, 4, 2]
