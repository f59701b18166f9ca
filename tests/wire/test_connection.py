"""One life of a client's stream: each call is resolved once, or was not sent and says why."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from hotkv_client import Role, SessionConfig, connection
from hotkv_client.connection import Connection, Pending
from hotkv_client.fence import Fence
from hotkv_client.types import After, TransferStatus
from hotkv_client.wire import requests as _wire
from hotkv_proto.errors import HotKVError, Reason, SessionLostError
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace
from hotkv_proto.order import DeviceMark, OrderKind

SPACE = KeySpace("m", "w", "bfloat16", (GroupSpec(GroupKind.FULL_ATTENTION, 16, (4096,)),), 16)


@pytest.fixture
def made(tmp_path: Path) -> Connection:
    """A connection that nobody answers, with a fence."""
    config = SessionConfig(f"unix:{tmp_path}/none.sock", "e", Role.WORKER, SPACE)
    return Connection(config, None, Fence())


def pending(**fields: Any) -> Pending:
    return Pending(Future(), **fields)


def test_after_its_end_a_connection_takes_no_call(made: Connection) -> None:
    before = pending()
    assert made.submit(_wire.ping(), before, None) is None and made.num_pending == 1
    made.end()
    assert isinstance(before.future.exception(0), SessionLostError)
    after = pending()
    assert isinstance(made.submit(_wire.ping(), after, None), SessionLostError)
    assert made.num_pending == 0 and not after.future.done()


def test_calls_have_numbers_of_their_own(made: Connection) -> None:
    requests = [_wire.ping() for _ in range(3)]
    assert all(made.submit(request, pending(), None) is None for request in requests)
    assert len({request.request_id for request in requests} - {0}) == 3


def test_as_many_calls_wait_as_there_may(made: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_PENDING", 2)
    assert [made.submit(_wire.ping(), pending(), None) for _ in range(2)] == [None, None]
    refused = made.submit(_wire.ping(), pending(), None)
    assert isinstance(refused, HotKVError) and refused.reason is Reason.OVERLOADED
    assert refused.retryable and made.num_pending == 2


@pytest.mark.parametrize(
    ("fields", "after"),
    [({}, After(OrderKind.FLAGS, DeviceMark(0, 1))), ({"fence_index": 3}, None)],
)
def test_what_the_link_does_not_take_is_not_sent(
    made: Connection, fields: dict[str, Any], after: After | None
) -> None:
    refused = made.submit(_wire.ping(), pending(**fields), after)
    assert isinstance(refused, SessionLostError) and "mark anew" in refused.message
    assert made.num_pending == 0 and made.outbox.empty()


def test_a_cancelled_store_with_a_word_of_the_fence_ends_at_once(made: Connection) -> None:
    made.link = object()  # type: ignore[assignment]
    store, load = (
        pending(transfer_id="s", fence_index=3),
        pending(transfer_id="l", is_load=True),
    )
    for call in (store, load):
        assert made.submit(_wire.ping(), call, None) is None
    stored, loaded = store.future, load.future
    for name in ("s", "l"):
        made.cancel(name)
    assert stored.result(0).status is TransferStatus.CANCELLED
    assert not loaded.done() and made.num_pending == 2
    assert not made.has_unrevocable_store()


def test_a_store_without_a_word_of_the_fence_can_not_be_revoked(made: Connection) -> None:
    store = pending(transfer_id="s")
    assert made.submit(_wire.ping(), store, None) is None and made.has_unrevocable_store()
    future = store.future
    made.cancel("s")
    assert not future.done()
    made.end()
    assert isinstance(future.exception(0), SessionLostError), "there is no link to wait for"
