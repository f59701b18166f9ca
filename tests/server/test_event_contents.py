"""Contents kept for tiers' events, against a naive book."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hotkv_proto.blocks import RunContent
from hotkv_server.events.contents import BLOCK_BYTES, KnownContents
from hotkv_server.events.drive import UNKNOWN, BlocksStored
from tests.core.support import words_of

RUNS = st.tuples(st.integers(0, 12), st.integers(1, 5), st.booleans(), st.booleans())
BLOCK_TOKENS = 4


def run_of(number: int, first: int, count: int, has_tokens: bool, has_keys: bool) -> BlocksStored:
    """Returns blocks `first`… after the block before them. The tokens name run and block."""
    tokens = np.repeat(np.arange(count), BLOCK_TOKENS).astype(np.int32) + 100 * number
    return BlocksStored(
        1,
        0,
        words_of(range(first, first + count)),
        words_of([first - 1])[0] if first else None,
        first,
        RunContent(
            tokens if has_tokens else tokens[:0],
            "adapter",
            tuple((f"{number} {at}",) for at in range(count)) if has_keys else (),
        ),
    )


@given(st.lists(RUNS, max_size=12), st.integers(1, 12))
def test_a_block_has_the_content_of_its_last_store_while_that_run_is_kept(
    stores: list[tuple[int, int, bool, bool]], num_blocks: int
) -> None:
    max_bytes = num_blocks * (BLOCK_BYTES + 80)
    book, kept = KnownContents(max_bytes), list[BlocksStored]()
    for number, store in enumerate(stores):
        run = run_of(number, *store)
        book.keep(run)
        kept += [run] * bool(len(run.content.token_ids))
        while sum(one.num_bytes + BLOCK_BYTES * len(one.hashes) for one in kept) > max_bytes:
            del kept[0]
    for block in range(18):
        name = words_of([block]).tobytes()
        holders = [one for one in kept if one.depth <= block < one.depth + len(one.hashes)]
        found = book.find(1, 0, name)
        assert book.find(2, 0, name) is book.find(1, 1, name) is UNKNOWN
        if not holders:
            assert found is UNKNOWN
            continue
        last = holders[-1]
        at = block - last.depth
        here = slice(at * BLOCK_TOKENS, (at + 1) * BLOCK_TOKENS)
        assert found.content.token_ids.tolist() == last.content.token_ids[here].tolist()
        assert found.content.extra_keys == last.content.extra_keys[at : at + 1]
        assert found.content.lora_name == "adapter"
        assert (found.parent is None) == (block == 0)
        if found.parent is not None:
            assert np.array_equal(found.parent, words_of([block - 1])[0])
