"""The fuzzer's calls with a single request, and hints to send in them."""

import json

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

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
"""Of the admin API, only calls that do not change blocks."""
SERVER_STREAMS: dict[str, type[Message]] = {
    "Health/Watch": health_pb2.HealthCheckRequest,
    "AdminService/WatchRequests": admin_pb2.WatchRequestsRequest,
    "EventService/Subscribe": events_pb2.SubscribeRequest,
}
ENVELOPE = json.dumps(
    {
        "protocol_version": "0.1",
        "message_id": "m",
        "actions": [
            {
                "action_id": "a",
                "action_type": "pin",
                "action_version": "1.0",
                "payload": {"session_id": "a", "ttl_s": 0.5},
            }
        ],
    }
)
"""The server accepts these."""
