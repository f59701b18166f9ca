"""An id that a client chose answers for its first call, and for no other."""

from collections.abc import Callable

import pytest

from hotkv_proto.blocks import BlockResult
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.keys import MAX_GROUPS, Representation
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.leases.leases import write_weight
from hotkv_server.cache.room.policies import LRU
from hotkv_server.cache.values import CoreConfig, HashList, Run
from tests.core.cache_model import snapshot
from tests.core.support import begin_store, make_key_space, make_table, reserve, words_of

SLAB = 4 * SLOT_ALIGN


def make_core(num_shards: int = 1, **config: int) -> tuple[CacheCore, int]:
    """Returns a core and the number of a session that declares a representation of group 0."""
    core = CacheCore(
        CoreConfig(6 * SLAB, SLAB, 50, unadmitted_share=1.0, **config), make_table(50), LRU(50)
    )
    kinds = (Representation(0, "f", 1, (SLOT_ALIGN // num_shards,) * num_shards),)
    return core, core.open_session(
        "e", "w", make_key_space("m", SLOT_ALIGN, SLOT_ALIGN, num_shards), 0.0, kinds
    ).number


def stored(core: CacheCore, session: int, numbers: range) -> None:
    begin_store(core, session, "s", "s", [Run(0, words_of(numbers))], 0, 0.0, 0.0)
    core.end_store(session, "s", True, 0.0)


def refused(
    core: CacheCore,
    call: Callable[[], object],
    reason: Reason = Reason.DUPLICATE_ID,
    match: str = "lease_id 'id' is in use",
) -> None:
    before = snapshot(core)
    with pytest.raises(HotKVError, match=match) as raised:
        call()
    assert raised.value.reason is reason and snapshot(core) == before


def test_the_id_of_a_write_lease_does_not_answer_for_other_blocks() -> None:
    """Ranks that join name what the first call named, or less of it."""
    core, session = make_core(2)
    first = [Run(0, words_of([0, 1, 2])), Run(1, words_of([0]))]
    reserve(core, session, "id", first, 0.0, 0.0)
    for other in (
        [Run(0, words_of([3]))],
        [Run(0, words_of([0, 1, 3]))],
        [*first, Run(1, words_of([1]))],
    ):
        refused(core, lambda runs=other: reserve(core, session, "id", runs, 0.0, 0.0))  # type: ignore[misc]
        refused(core, lambda runs=other: begin_store(core, session, "t", "id", runs, 1, 0.0, 0.0))  # type: ignore[misc]
    refused(core, lambda: core.acquire(session, "id", [HashList(0, words_of([0]))], 0.0, 0.0))
    same = reserve(core, session, "id", first, 0.0, 0.0)
    assert {value for row in same.results for value in row.tolist()} == {BlockResult.RESERVED}
    less = reserve(core, session, "id", [Run(0, words_of([2, 0]))], 0.0, 0.0)
    assert less.results[0].tolist() == [BlockResult.RESERVED] * 2


def test_a_rank_may_bring_representations_that_the_first_did_not_name() -> None:
    """Each rank sends those that it could build; the blocks come all the same."""
    core, session = make_core(2)
    reserve(core, session, "id", [Run(0, words_of([0, 1]))], 0.0, 0.0)
    runs = [Run(0, words_of([0, 1])), Run(MAX_GROUPS, words_of([0, 1]))]
    results = reserve(core, session, "id", runs, 0.0, 0.0).results
    assert [row.tolist() for row in results] == [
        [BlockResult.RESERVED] * 2,
        [BlockResult.NO_SPACE] * 2,
    ]


def test_blocks_that_write_leases_list_are_bounded() -> None:
    """Also those that have no slots of their own: present ones. A refused call evicts nothing,
    though the arena is full."""
    core, session = make_core(2, client_memory_bytes=3 * write_weight(4, 2))
    for first in range(0, 24, 4):
        for shard in range(2):
            run = Run(0, words_of(range(first, first + 4)))
            begin_store(core, session, "s", "s", [run], shard, 0.0, 0.0)
            core.end_store(session, "s", True, 0.0)
    reserve(core, session, "id", [Run(0, words_of(range(4)))], 0.0, 0.0)
    more = [Run(0, words_of(range(100, 108)))]
    refused(
        core,
        lambda: reserve(core, session, "other", more, 0.0, 0.0),
        Reason.OVERLOADED,
        "runs: .*bytes of lists of leases",
    )
    core.check_invariants()
