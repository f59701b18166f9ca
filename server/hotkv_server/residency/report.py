"""What operators are told of residencies."""

import math
import time

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.v1 import admin_pb2
from hotkv_server.node.node import Node
from hotkv_server.residency import told as inspect_residencies

DEFAULT_PAGE, MAX_PAGE = 100, 1000


def list_residencies(
    node: Node, request: admin_pb2.ListResidenciesRequest
) -> admin_pb2.ListResidenciesResponse:
    """The residencies with the most room, and the engines that wait for some."""
    if not 0 <= request.page_size <= MAX_PAGE:
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"page_size is {request.page_size}; allowed are 0 (for {DEFAULT_PAGE}) to {MAX_PAGE}",
        )
    now_s, total = time.monotonic(), inspect_residencies.totals(node.core)
    return admin_pb2.ListResidenciesResponse(
        residencies=[
            admin_pb2.Residency(
                engine_id=r.engine_id,
                residency_id=r.residency_id,
                key_space_id=r.key_space_id,
                session_number=r.session_number,
                age_s=now_s - r.opened_s,
                block_count=r.num_blocks,
                reserved_block_count=r.max_blocks,
                pinned_byte_count=r.pinned_bytes,
                promised_byte_count=r.promised_bytes,
            )
            for r in inspect_residencies.largest(node.core, request.page_size or DEFAULT_PAGE)
        ],
        refusals=[
            admin_pb2.ResidencyRefusal(
                engine_id=r.engine_id,
                residency_id=r.residency_id,
                age_s=now_s - r.at_s,
                asked_byte_count=r.asked_bytes,
                available_byte_count=r.available_bytes,
                attempt_count=r.num_attempts,
                message=r.message,
            )
            for r in inspect_residencies.refusals(node.core)
        ],
        residency_count=total.count,
        pinned_byte_count=total.pinned_bytes,
        promised_byte_count=total.promised_bytes,
        bound_byte_count=total.bound_bytes,
        grace_byte_count=total.grace_bytes,
        grace_s=max(0.0, total.grace_until_s - now_s) if math.isfinite(total.grace_until_s) else 0,
    )
