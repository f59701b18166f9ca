"""Feeds against a plain list: in order, bounded, and every loss is told."""

import asyncio
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hotkv_proto.errors import HotKVError, Reason
from hotkv_server.node import broadcast as feed_module
from hotkv_server.node.broadcast import Feeds


@dataclass(frozen=True)
class Item:
    """A numbered item."""

    number: int
    num_bytes: int = 0


STEPS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 7)), max_size=30)


@given(steps=STEPS, bound=st.integers(1, 12))
def test_a_reader_sees_everything_or_is_told_what_it_missed(
    steps: list[tuple[int, int]], bound: int
) -> None:
    """Each step puts some items and reads at most some. What was read plus what was lost is what
    was put, in order."""

    async def run() -> None:
        feeds: Feeds[Item] = Feeds()
        waiting: list[int] = []
        seen: list[int] = []
        sent = told = lost_before = 0
        with feeds.reader() as feed, feeds.reader() as idle:
            for num_put, most in steps:
                feeds.put(map(Item, range(sent, sent + num_put)))
                kept = list(range(sent, sent + num_put))[: max(0, bound - len(waiting))]
                lost_before += num_put - len(kept)
                waiting += kept
                sent += num_put
                assert len(feed) == len(waiting) <= bound
                assert len(idle) == min(sent, bound)
                if most and (waiting or told < lost_before):
                    items, lost = await asyncio.wait_for(feed.get(most), 5)
                    assert [item.number for item in items] == waiting[:most]
                    waiting = waiting[most:]
                    seen += [item.number for item in items]
                    told += lost
                    assert told == (told if waiting else lost_before)
        assert len(seen) + len(waiting) + lost_before == sent
        assert len(feeds) == 0
        assert feeds.lost_items == lost_before + max(0, sent - bound)

    whole = feed_module.FEED_BYTES
    feed_module.FEED_BYTES = bound * feed_module.ITEM_BYTES
    try:
        asyncio.run(run())
    finally:
        feed_module.FEED_BYTES = whole


def test_large_items_fill_a_feed_and_one_alone_always_fits() -> None:
    feeds: Feeds[Item] = Feeds()
    huge = Item(1, feed_module.FEED_BYTES * 2)
    with feeds.reader() as feed:
        feeds.put([huge, Item(2)])
        assert (len(feed), feeds.lost_items) == (1, 1)
        assert asyncio.run(feed.get(5)) == ([huge], 1)
        feeds.put(
            [Item(3, feed_module.FEED_BYTES // 2), Item(4, feed_module.FEED_BYTES // 2), Item(5)]
        )
        assert asyncio.run(feed.get(5)) == ([Item(3, feed_module.FEED_BYTES // 2), Item(5)], 1)


def test_readers_are_bounded() -> None:
    feeds: Feeds[Item] = Feeds()
    readers = [feeds.reader() for _ in range(feed_module.MAX_READERS + 1)]
    for reader in readers[:-1]:
        reader.__enter__()
    with pytest.raises(HotKVError, match="end one of them") as caught:
        readers[-1].__enter__()
    assert caught.value.reason is Reason.OVERLOADED
    readers[0].__exit__(None, None, None)
    with feeds.reader():
        assert len(feeds) == feed_module.MAX_READERS
