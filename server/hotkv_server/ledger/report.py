"""What operators are told of the ledger."""

from hotkv_proto.messages import fields
from hotkv_proto.misses import Miss
from hotkv_proto.v1 import admin_pb2, session_pb2
from hotkv_server.ledger.drive import Savings
from hotkv_server.node.node import Node


def get_savings(node: Node, request: admin_pb2.GetSavingsRequest) -> admin_pb2.GetSavingsResponse:
    """What was counted in the time that is asked about."""
    found = node.ledger.savings(fields.rate("since_s", request.since_s))
    outlook = found.outlook
    return admin_pb2.GetSavingsResponse(
        rows=_rows(found),
        outlook=admin_pb2.SavingsOutlook(
            prompt_token_count=outlook.prompt_tokens,
            ceiling_ratio=outlook.ceiling_ratio,
            step_byte_count=outlook.step_bytes,
            gain_ratio=outlook.gain_ratio,
            gib_gain_ratio=outlook.gib_gain_ratio,
        ),
        began_unix_time_ms=int(found.began_unix_s * 1000),
        folded_row_count=found.num_folded,
        arena_byte_count=found.capacity_bytes,
    )


def _rows(found: Savings) -> list[admin_pb2.SavingsRow]:
    return [
        admin_pb2.SavingsRow(
            tenant=account.tenant,
            model=account.model,
            key_space=account.key_space,
            engine_id=account.engine_id,
            request_count=usage.requests,
            prompt_token_count=usage.prompt_tokens,
            device_hit_token_count=usage.device_hit_tokens,
            hits=[
                admin_pb2.TierTokens(tier=tier, token_count=count)
                for tier, count in usage.hit_tokens.items()
            ],
            misses=[
                admin_pb2.MissedTokens(miss_reason=_reason(reason), token_count=count)
                for reason, count in usage.missed_tokens.items()
                if count
            ],
            saved_s=usage.saved_s,
            waited_s=usage.waited_s,
            failed_load_count=usage.failed_loads,
            loaded_byte_count=usage.loaded_bytes,
            stored_byte_count=usage.stored_bytes,
        )
        for account, usage in found.rows
    ]


def _reason(reason: Miss) -> session_pb2.MissReason.ValueType:
    return session_pb2.MissReason.ValueType(reason)
