"""Calls of the fuzzer with a single request, and odd envelopes of hints for them."""

import json
import random
from typing import Any

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from hotkv_proto.hints import ActionType
from hotkv_proto.v1 import admin_pb2, cache_pb2, events_pb2, hints_pb2, sparse_pb2, warm_pb2

UNARY: dict[str, type[Message]] = {
    "CacheService/Lookup": cache_pb2.LookupRequest,
    "CacheService/AcquireLease": cache_pb2.AcquireLeaseRequest,
    "CacheService/ReserveBlocks": cache_pb2.ReserveBlocksRequest,
    "CacheService/ReleaseLease": cache_pb2.ReleaseLeaseRequest,
    "CacheService/Load": cache_pb2.LoadRequest,
    "CacheService/Store": cache_pb2.StoreRequest,
    "CacheService/CancelTransfer": cache_pb2.CancelTransferRequest,
    "SparseService/CreateSequence": sparse_pb2.CreateSequenceRequest,
    "SparseService/AppendBlocks": sparse_pb2.AppendBlocksRequest,
    "SparseService/DeleteSequence": sparse_pb2.DeleteSequenceRequest,
    "HintService/SendHints": hints_pb2.SendHintsRequest,
    "HintService/GetHintOutcomes": hints_pb2.GetHintOutcomesRequest,
    "AdminService/Tell": admin_pb2.TellRequest,
    "AdminService/Explain": admin_pb2.ExplainRequest,
    "AdminService/PreviewEvict": admin_pb2.PreviewEvictRequest,
    "WarmStartService/PrefetchBlocks": warm_pb2.PrefetchBlocksRequest,
}
"""Calls of the admin that do not change the bystander's blocks."""
SERVER_STREAMS: dict[str, type[Message]] = {
    "Health/Watch": health_pb2.HealthCheckRequest,
    "AdminService/WatchRequests": admin_pb2.WatchRequestsRequest,
    "EventService/Subscribe": events_pb2.SubscribeRequest,
}
"""Calls that the server answers with a stream."""


def odd_envelope(chance: random.Random) -> str:
    """Returns an envelope of hints in JSON: most fields make sense, others have any type."""

    def odd(*good: Any) -> Any:
        anything = (None, True, -1, 1e308, "", "x" * 200, "\n", [], [1, 2], {}, {"a": [{}]}, 10**40)
        return chance.choice(good) if chance.random() < 0.8 else chance.choice(anything)

    def payload() -> Any:
        fields = {
            "session_id": odd("a", "b", "c"),
            "target": odd({"session_id": "a"}, {"token_range": [0, 32]}, "request"),
            "token_range": odd([0, 16], [16, None], [0, 10**9]),
            "priority": odd(-8, 0, 8, 100),
            "ttl_s": odd(0.5, 1, 10**6),
            "deadline_s": odd(0, 0.1),
        }
        names = chance.sample(sorted(fields), chance.randint(0, 4))
        return odd({name: fields[name] for name in names})

    actions = [
        odd(
            {
                "action_id": odd("a", "b", str(number)),
                "action_type": odd(*(kind.value for kind in ActionType)),
                "action_version": odd("1.0", "0.1"),
                "payload": payload(),
            }
        )
        for number in range(chance.choice((0, 1, 2, 5, 70)))
    ]
    envelope = {
        "protocol_version": odd("0.1"),
        "message_id": odd("m", "n", str(chance.random())),
        "actions": odd(actions),
    }
    return json.dumps(odd(envelope))
