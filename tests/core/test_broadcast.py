"""Tests `Feeds`: events come in order through a bounded queue; a slow reader learns how many it
has lost."""

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass
from unittest import mock

import hypothesis.strategies as st
from hypothesis import given

from hotkv_proto.errors import Reason
from hotkv_proto.v1 import events_pb2
from hotkv_proto.versions import MAX_MESSAGE_BYTES
from hotkv_server.node import broadcast as feed_module
from hotkv_server.node.broadcast import Feeds
from hotkv_server.wire.errors import stream
from tests.core.support import reason_of


@dataclass(frozen=True)
class Item:
    number: int
    num_bytes: int = 0


STEPS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 7)), max_size=30)


@given(steps=STEPS, bound=st.integers(1, 12))
def test_reader_sees_all_or_hears_what_it_missed(steps: list[tuple[int, int]], bound: int) -> None:
    async def run() -> None:
        feeds: Feeds[Item] = Feeds()
        waiting: list[int] = []
        sent = num_seen = told = lost_before = 0
        with feeds.reader() as feed, feeds.reader() as idle:
            for num_put, most in steps:
                feeds.put(map(Item, range(sent, sent + num_put)))
                room = max(0, bound - len(waiting)) if told == lost_before else 0
                kept = list(range(sent, sent + num_put))[:room]
                lost_before += num_put - len(kept)
                waiting += kept
                sent += num_put
                assert len(feed) == len(waiting) <= bound
                assert len(idle) == min(sent, bound)
                if most and (waiting or told < lost_before):
                    items, lost = await asyncio.wait_for(feed.get(most), 5)
                    assert [item.number for item in items] == waiting[:most]
                    waiting = waiting[most:]
                    num_seen += len(items)
                    told += lost
                    assert waiting or told == lost_before
        assert num_seen + len(waiting) + lost_before == sent
        assert len(feeds) == 0
        assert feeds.lost_items == lost_before + max(0, sent - bound)

    with mock.patch.object(feed_module, "FEED_BYTES", bound * feed_module.ITEM_BYTES):
        asyncio.run(run())


def test_one_large_item_alone_always_fits() -> None:
    feeds: Feeds[Item] = Feeds()
    huge, half = Item(1, feed_module.FEED_BYTES * 2), Item(3, feed_module.FEED_BYTES // 2)
    with feeds.reader() as feed:
        feeds.put([huge, Item(2)])
        assert (len(feed), feeds.lost_items) == (1, 1)
        assert asyncio.run(feed.get(5)) == ([huge], 1)
        feeds.put([half, half, Item(5)])
        assert asyncio.run(feed.get(5)) == ([half], 2)


def test_the_answers_of_a_stream_fit_a_message() -> None:
    feeds: Feeds[Item] = Feeds()

    def message(item: Item) -> events_pb2.Event:
        return events_pb2.Event(removed=events_pb2.BlocksRemoved(hashes=bytes(item.num_bytes)))

    def response(parts: list[events_pb2.Event], lost: int) -> events_pb2.SubscribeResponse:
        return events_pb2.SubscribeResponse(events=parts, lost_event_count=lost)

    async def run() -> None:
        answers = stream(None, mock.Mock(), 0, feeds, message, response)
        await anext(answers)
        # The 256 items alone fill a message, so with its own bytes one is too many.
        num_bytes = MAX_MESSAGE_BYTES // 256
        overhead = message(Item(0, num_bytes)).ByteSize() - num_bytes
        feeds.put([Item(number, num_bytes - overhead) for number in range(256)])
        read: list[events_pb2.SubscribeResponse] = []
        while sum(len(answer.events) for answer in read) < 256:
            read.append(await anext(answers))
        assert [len(answer.events) for answer in read] == [255, 1]
        assert max(answer.ByteSize() for answer in read) <= MAX_MESSAGE_BYTES

    asyncio.run(run())


def test_readers_are_bounded() -> None:
    feeds: Feeds[Item] = Feeds()
    with ExitStack() as readers:
        for _ in range(feed_module.MAX_READERS):
            readers.enter_context(feeds.reader())
        assert reason_of(feeds.reader().__enter__) is Reason.OVERLOADED
    with feeds.reader():
        assert len(feeds) == 1
