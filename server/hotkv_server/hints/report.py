"""Hints for operators: what routers have asked, what has come of it, and where the blocks of a
session lie."""

import time

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.messages.cache import packed_words
from hotkv_proto.v1 import admin_pb2
from hotkv_server.hints.service import outcomes, page_size
from hotkv_server.node.node import Node
from hotkv_server.wire.explain import explain


def list_hints(node: Node, request: admin_pb2.ListHintsRequest) -> admin_pb2.ListHintsResponse:
    """The latest hints of all tenants, in the order in which they came."""
    now_s, most = time.monotonic(), page_size(request.page_size)
    response = admin_pb2.ListHintsResponse()
    found = []
    for name, tenant in node.hints.book.all():
        response.tenants.add(
            tenant=name,
            session_count=len(tenant.sessions),
            session_byte_count=tenant.sessions.num_bytes,
            outcome_count=len(tenant.outcomes),
        )
        found += [
            (one.came_s, name, one)
            for one in tenant.outcomes.values()
            if request.message_id in ("", one.message_id)
        ]
    found.sort(key=lambda row: row[:2])
    for _, name, outcome in found[-most:]:
        response.outcomes.extend(outcomes([outcome], name, now_s))
    return response


async def explain_session(
    node: Node, request: admin_pb2.ExplainSessionRequest
) -> admin_pb2.ExplainSessionResponse:
    """Says where each block of the sessions of a name lies, and what was asked for it."""
    if not request.session_id:
        raise HotKVError(Reason.INVALID_FIELD, "session_id is empty; name a session")
    response = admin_pb2.ExplainSessionResponse()
    for name, tenant in list(node.hints.book.all()):
        if request.tenant not in ("", name):
            continue
        session, now_s = tenant.sessions.get(request.session_id), time.monotonic()
        asked = [one for one in tenant.outcomes.values() if one.session_id == request.session_id]
        if session is None and not asked:
            continue
        shown = response.sessions.add(tenant=name, outcomes=outcomes(asked, name, now_s))
        if session is None:
            continue
        shown.idle_s = now_s - session.used_s
        for number, hashes in list(session.chains.items()):
            if number not in node.core.key_spaces or not len(hashes):
                continue
            packed = packed_words(hashes, node.core.key_space(number).hash_bytes)
            question = admin_pb2.ExplainRequest(key_space_id=number, hashes=packed)
            shown.key_spaces.extend((await explain(node, question)).key_spaces)
    return response
