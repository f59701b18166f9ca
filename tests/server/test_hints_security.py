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


def envelope(message_id: str, session_id: str = "chat") -> dict[str, object]:
    payload = {"session_id": session_id}
    action = {"action_id": "a", "action_type": "demote", "payload": payload}
    return {"message_id": message_id, "actions": [action]}


def test_a_tenant_reaches_its_own_sessions_alone(guarded: Guarded, engine: Make) -> None:
    one = engine("alpha")
    blocks = store(one)
    tokens = len(blocks) * one.key_space.hash_block_tokens
    one.session.report_requests([RequestReport(blocks, tokens, 0, 0, 0.0, session_id="chat")])
    one.session.ping(10)
    with HintClient(guarded.target, "blind") as other, HintClient(guarded.target, "alpha") as mine:
        (foreign,) = other.send(envelope("f"))
        (unknown,) = other.send(envelope("u", "nobody"))
        assert foreign["status"] == "missing" and foreign["reason"] == unknown["reason"]
        (done,) = mine.send(envelope("m"))
        assert done["status"] == "accepted" and done["done_block_count"] == len(blocks)
        for client, messages in ((mine, {"m"}), (other, {"f", "u"})):
            assert {row["message_id"] for row in client.outcomes()[0]} == messages


@pytest.mark.parametrize("tenant", ["beta", "gamma", "there is no such", ""])
def test_a_peer_without_a_proof_is_refused(guarded: Guarded, tenant: str) -> None:
    with HintClient(guarded.target, tenant) as client:
        sent = refused(lambda: client.send({"actions": []}))
        assert sent[0] in (Reason.NOT_ALLOWED, Reason.UNAUTHENTICATED)
        assert refused(client.outcomes)[0] is sent[0]


def test_over_tcp_a_token_proves_the_tenant(guarded: Guarded) -> None:
    credentials = guarded.credentials("nobody", TOKEN)
    with HintClient(guarded.tcp, "gamma", credentials=credentials) as client:
        assert client.send(envelope("t"))[0]["status"] == "missing"
    with HintClient(guarded.tcp, "alpha", credentials=credentials) as client:
        assert refused(lambda: client.send({"actions": []}))[0] is Reason.NOT_ALLOWED
