"""What ListTiers says of the tiers besides host memory."""

from hotkv.v1 import admin_pb2
from hotkv_server.runtime.node import Node
from hotkv_server.runtime.tier_figures import TierState, states


def with_activity(tiers: list[admin_pb2.Tier], node: Node) -> list[admin_pb2.Tier]:
    """The tiers whose places the core knows, and those that nodes share, with what each does."""
    by_name = {tier.name: tier for tier in tiers}
    for state in states(node.tiers):
        if state.is_shared:
            tier = admin_pb2.Tier(name=state.name, capacity_byte_count=state.capacity_bytes)
            tiers.append(tier)
        else:
            tier = by_name[state.name]
        tier.activity.CopyFrom(_activity(state))
    return tiers


def _activity(state: TierState) -> admin_pb2.TierActivity:
    reads, moved = state.reads, state.moved
    return admin_pb2.TierActivity(
        is_shared=state.is_shared,
        is_up=state.is_up,
        problem=state.problem,
        asked_block_count=reads.asked_blocks,
        hit_block_count=reads.hit_blocks,
        written_byte_count=moved.written_bytes,
        read_byte_count=moved.read_bytes,
        read_count=reads.num_reads,
        read_p50_s=reads.quantile_s(0.5),
        read_p99_s=reads.quantile_s(0.99),
        read_bytes_per_s=reads.bytes_per_s(),
        queued_byte_count=moved.queued_bytes,
        waiting_block_count=state.waiting_blocks,
        lost_block_count=state.lost_blocks,
        failed_block_count=moved.failed_blocks,
        budget_byte_count=state.budget_bytes,
        budget_left_byte_count=state.left_bytes,
    )
