"""Tests how the ledger counts a request's hits and misses; reasons must agree with `hotkv
explain`."""

from collections import Counter

import pytest

from hotkv_proto.reports import Miss
from hotkv_proto.v1 import admin_pb2
from hotkv_server.cache.values import Cause, Run
from hotkv_server.ledger.book.outcome import PromptOutcome, note_outcome
from hotkv_server.wire.admin_service import GONE
from tests.core.support import World, reserve, words_of

TOKENS = 16


@pytest.mark.parametrize("cause", list(Cause))
def test_miss_reason_is_the_blocks_verdict(cause: Cause) -> None:
    place = World()
    session = place.open()
    for group in (0, 1):
        place.store(session, range(6), group=group)
    words = place.core.space.index.find(session.key_space_id, 0, words_of(range(2, 6)))
    removal = place.core.space.removal
    removal.evict(words, cause)
    verdict = admin_pb2.BlockVerdict.Name(GONE[cause][0])
    why = Miss[verdict.removeprefix("BLOCK_VERDICT_")]

    def note(hit_tokens: int) -> PromptOutcome:
        number, words = session.key_space_id, words_of(range(8))
        return note_outcome(place.core, number, words, 8 * TOKENS + 1, 0, hit_tokens, Miss.ABSENT)

    outcome = note(2 * TOKENS)
    counts = Counter({Miss.PARTIAL_BLOCK: 1, Miss.NEVER_STORED: 2 * TOKENS})
    counts[why] += 4 * TOKENS
    assert outcome == PromptOutcome({0: 2 * TOKENS}, counts)
    # A drafter needs the block behind the last hit; it is missing.
    counts[why] += TOKENS
    assert note(TOKENS) == PromptOutcome({0: TOKENS}, counts)
    # In proportion to the reasons' blocks; the remainder goes to the most frequent.
    if why is not Miss.NEVER_STORED:
        missed = 7 * TOKENS + 3
        shares = {Miss.IN_FLIGHT: 2 * missed // 8, Miss.NEVER_STORED: 2 * missed // 8}
        shares[why] = missed - sum(shares.values())
        assert note(TOKENS - 3).missed_tokens == {Miss.PARTIAL_BLOCK: 1, **shares}


@pytest.mark.parametrize("absent", ["evicted", "never stored", "on the device", "nothing"])
def test_hit_ended_by_another_group_names_it(absent: str) -> None:
    """Up to the end of block 5 the sliding-window group's reason counts; behind it each block's
    own."""
    place = World()
    session = place.open()
    hit = 4 if absent == "on the device" else 2
    for group in (0, 1) if absent != "never stored" else (0,):
        place.store(session, range(hit if absent == "on the device" else 0, 6), group=group)
    if absent in ("evicted", "on the device"):
        place.core.space.removal.evict(place.entries([5], session.key_space_id, 1))
    reserve(place.core, session.number, "r", [Run(0, words_of([7]))], 60.0, 1.0)
    place.store(session, [8])
    device_hit = hit * TOKENS if absent == "on the device" else 0
    because = {"never stored": Miss.NEVER_STORED, "nothing": Miss.IN_FLIGHT}
    behind = {Miss.NEVER_STORED: TOKENS, Miss.IN_FLIGHT: 2 * TOKENS}
    for num_blocks, more in ((6, {}), (9, behind)):
        words, tokens = words_of(range(num_blocks)), num_blocks * TOKENS + 1
        said = note_outcome(
            place.core, session.key_space_id, words, tokens, device_hit, hit * TOKENS, Miss.ABSENT
        ).missed_tokens
        counts = Counter({Miss.PARTIAL_BLOCK: 1, **more})
        counts[because.get(absent, Miss.EVICTED)] += (6 - hit) * TOKENS
        assert said == counts


@pytest.mark.parametrize(
    "reason", [Miss.REFUSED, Miss.LATE, Miss.FAILED_LOAD, Miss.COMPUTED_SOONER]
)
def test_engines_reason_counts_only_for_servers_blocks(reason: Miss) -> None:
    """The server has 4 of nine blocks, the engine hit 3."""
    place = World()
    session = place.open()
    for group in (0, 1):
        place.store(session, range(4), group=group)
    outcome = note_outcome(
        place.core, session.key_space_id, words_of(range(9)), 9 * TOKENS + 1, 0, 3 * TOKENS, reason
    )
    missed = {Miss.PARTIAL_BLOCK: 1, reason: TOKENS, Miss.NEVER_STORED: 5 * TOKENS}
    assert outcome == PromptOutcome({0: 3 * TOKENS}, missed)
