"""Hints at a server with tenants: who may send them, and that nobody reaches another's."""

from collections.abc import Callable

import pytest

from hotkv_client import RequestReport
from hotkv_client.hints import HintClient
from hotkv_client.testing import PagedEngine
from hotkv_proto.errors import Reason
from tests.server import guarded as support
from tests.server.guarded import TOKEN, Guarded, refused, store

guarded, engine = support.guarded, support.engine
Make = Callable[..., PagedEngine]
DEMOTE = {"action_id": "a", "action_type": "demote", "payload": {"session_id": "chat"}}


def test_a_tenant_reaches_its_own_sessions_alone(guarded: Guarded, engine: Make) -> None:
    one = engine("alpha")
    blocks = store(one)
    report = RequestReport(
        blocks, len(blocks) * one.key_space.hash_block_tokens, 0, 0, 0.0, session_id="chat"
    )
    one.session.report_requests([report])
    one.session.ping(10)
    with HintClient(guarded.target, "blind") as other:
        (foreign,) = other.send({"message_id": "f", "actions": [DEMOTE]})
        (unknown,) = other.send(
            {"message_id": "u", "actions": [{**DEMOTE, "payload": {"session_id": "nobody"}}]}
        )
    assert foreign["status"] == "missing" and foreign["reason"] == unknown["reason"]
    with HintClient(guarded.target, "alpha") as mine:
        (done,) = mine.send({"message_id": "m", "actions": [DEMOTE]})
        assert done["status"] == "accepted" and done["done_block_count"] == len(blocks)
        assert {row["message_id"] for row in mine.outcomes()[0]} == {"m"}
    with HintClient(guarded.target, "blind") as other:
        assert {row["message_id"] for row in other.outcomes()[0]} == {"f", "u"}


@pytest.mark.parametrize("tenant", ["beta", "gamma", "there is no such", ""])
def test_a_peer_without_a_proof_is_refused(guarded: Guarded, tenant: str) -> None:
    with HintClient(guarded.target, tenant) as client:
        sent = refused(lambda: client.send({"actions": []}))
        assert sent[0] in (Reason.NOT_ALLOWED, Reason.UNAUTHENTICATED)
        assert refused(client.outcomes)[0] is sent[0]


def test_over_tcp_a_token_proves_the_tenant(guarded: Guarded) -> None:
    credentials = guarded.credentials("nobody", TOKEN)
    with HintClient(guarded.tcp, "gamma", credentials=credentials) as client:
        assert client.send({"message_id": "t", "actions": [DEMOTE]})[0]["status"] == "missing"
    with HintClient(guarded.tcp, "alpha", credentials=credentials) as client:
        assert refused(lambda: client.send({"actions": []}))[0] is Reason.NOT_ALLOWED
