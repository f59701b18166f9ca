"""Missed blocks have the reason of their removal: only evicted blocks call for more memory."""

import pytest

from hotkv_proto.reports import Miss
from hotkv_server.cache.values import Cause
from hotkv_server.ledger.book.outcome import PromptOutcome, note_outcome
from tests.core.support import World, words_of


@pytest.mark.parametrize("cause", list(Cause))
def test_what_more_memory_would_have_kept_is_evicted(cause: Cause) -> None:
    place = World()
    session = place.open()
    place.store(session, range(6))
    words = place.core.space.index.find(session.key_space_id, 0, words_of(range(2, 6)))
    removal = place.core.space.removal
    if cause in (Cause.FLUSH, Cause.DAMAGE):
        removal.flush(words, cause)
    elif cause:
        removal.evict(words, cause)
    tokens = place.core.key_space(session.key_space_id).groups[0].block_tokens

    def note(hit_tokens: int) -> PromptOutcome:
        number, words = session.key_space_id, words_of(range(8))
        return note_outcome(place.core, number, words, 8 * tokens + 1, 0, hit_tokens, Miss.ABSENT)

    outcome = note(2 * tokens)
    evicted = outcome.missed_tokens.get(Miss.EVICTED, 0)
    assert evicted == (4 * tokens if cause in (Cause.ROOM, Cause.HINT) else 0)
    assert outcome.hit_tokens == {0: 2 * tokens}
    # Of a hit that ends in a block, the reasons share what is left; the most frequent has the rest.
    if cause in (Cause.ROOM, Cause.HINT):
        missed = 6 * tokens + 3
        shares = {Miss.IN_FLIGHT: missed // 7, Miss.NEVER_STORED: 2 * missed // 7}
        shares[Miss.EVICTED] = missed - sum(shares.values())
        assert note(2 * tokens - 3).missed_tokens == {Miss.PARTIAL_BLOCK: 1, **shares}
