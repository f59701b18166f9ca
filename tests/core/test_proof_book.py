"""Tests the book of proofs beside lists that forget nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hotkv_server.proof.book import latest, sources
from hotkv_server.proof.book.latest import (
    COMPUTED,
    FAILED,
    LOADED,
    LOADING,
    LoadedRequest,
    Requests,
)
from hotkv_server.proof.book.sources import BLOCK, RESTORED, STORED, Sources

NUM_REQUESTS, NUM_BLOCKS, NUM_ENGINES, NUM_ENTRIES = 5, 40, 3, 8


@contextmanager
def small() -> Iterator[None]:
    with (
        patch.multiple(latest, MAX_REQUESTS=NUM_REQUESTS, MAX_BLOCKS=NUM_BLOCKS),
        patch.object(sources, "MAX_ENGINES", NUM_ENGINES),
    ):
        yield


def request(name: str, num_blocks: int, outcome: str = LOADING) -> LoadedRequest:
    blocks = np.zeros(num_blocks, BLOCK)
    blocks["position"] = np.arange(num_blocks)
    return LoadedRequest(name, "engine", "model", 1, 100, 0, 100, outcome, 0.0, blocks)


REQUEST_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(0, 6), st.sampled_from((0, 1, 9, 10, 25))),
        st.tuples(st.just("end"), st.integers(0, 6), st.sampled_from((LOADED, FAILED))),
    ),
    max_size=40,
)


@given(REQUEST_STEPS)
def test_the_latest_requests_are_kept(steps: list[tuple[str, int, int | str]]) -> None:
    with small():
        requests = Requests()
        # Key, name, blocks, outcome of all that began and were not replaced, oldest first.
        model: list[tuple[int, str, int, str]] = []
        for number, (what, key, value) in enumerate(steps):
            if isinstance(value, int):
                outcome = LOADING if value else COMPUTED
                requests.begin(key, request(f"r{number}", value, outcome))
                model = [one for one in model if one[0] != key]
                model.append((key, f"r{number}", min(value, NUM_BLOCKS // 4), outcome))
                model = model[-NUM_REQUESTS:]
                while sum(one[2] for one in model) > NUM_BLOCKS:
                    del model[0]
            else:
                requests.end(key, value)
                model = [
                    (*one[:3], value) if one[0] == key and one[3] != COMPUTED else one
                    for one in model
                ]
            requests.check_invariants()
            kept = [(one.request_id, len(one.blocks), one.outcome) for one in requests.latest()]
            assert kept == [one[1:] for one in reversed(model)], what


def test_a_long_request_loses_its_last_blocks() -> None:
    with small():
        requests = Requests()
        requests.begin(1, request("long", 100))
        (kept,) = requests.latest()
        assert kept.blocks["position"].tolist() == list(range(10)) and kept.num_omitted == 90


def test_requests_are_found_by_their_first_characters() -> None:
    requests = Requests()
    for key, name in enumerate(("chatcmpl-ab-0-77", "chatcmpl-ac-0-78", "cmpl-abc", "ab")):
        requests.begin(key, request(name, 0))

    def names(text: str) -> list[str]:
        return [one.request_id for one in requests.named(text)]

    assert names("chatcmpl-a") == ["chatcmpl-ac-0-78", "chatcmpl-ab-0-77"]
    assert names("chatcmpl-ab") == ["chatcmpl-ab-0-77"]
    assert names("ac") == ["chatcmpl-ac-0-78"], "as the client chose it"
    assert names("ab") == ["ab"], "a whole id is no prefix"
    assert names("cmpl-abcd") == names("0-77") == []


SOURCE_STEPS = st.lists(
    st.tuples(
        st.integers(-2, 5),
        st.lists(st.integers(1, NUM_ENTRIES), min_size=1, max_size=4, unique=True),
    ),
    max_size=30,
)
"""An engine's number, or negative: a tier's; and entries."""


@given(SOURCE_STEPS)
def test_the_latest_source_of_an_entry_counts(steps: list[tuple[int, list[int]]]) -> None:
    with small():
        kept = Sources(NUM_ENTRIES)
        model = dict.fromkeys(range(1, NUM_ENTRIES + 1), (RESTORED, "", 0))
        # Engines in the order in which they got their numbers, and who stored an entry by number.
        given: list[str] = []
        for time_s, (who, entries) in enumerate(steps, 1):
            numbers = np.array(entries, np.uint32)
            if who < 0:
                tiers = np.full(len(entries), -who, np.uint8)
                kept.promoted(numbers, tiers, time_s)
                told = (-who, "", time_s)
            else:
                kept.stored(numbers, f"engine-{who}", time_s)
                if f"engine-{who}" not in given[-NUM_ENGINES:]:
                    given.append(f"engine-{who}")
                place = len(given) - 1 - given[::-1].index(f"engine-{who}")
                told = (STORED, str(place), time_s)
            model |= dict.fromkeys(entries, told)
            kept.check_invariants()
        blocks = np.zeros(NUM_ENTRIES, BLOCK)
        kept.tell(np.arange(1, NUM_ENTRIES + 1, dtype=np.uint32), blocks)
        for entry, block in enumerate(blocks, 1):
            origin, place, unix_s = model[entry]
            is_named = place and int(place) >= len(given) - NUM_ENGINES
            name = given[int(place)] if is_named else ""
            found = kept.engine(int(block["engine"]))
            assert (block["origin"], found, block["unix_s"]) == (origin, name, unix_s)
