"""What ListTiers says of the tiers besides host memory."""

from hotkv_proto.v1 import admin_pb2
from hotkv_server.node.node import Node
from hotkv_server.tiers.told import activity, states


def with_activity(tiers: list[admin_pb2.Tier], node: Node) -> list[admin_pb2.Tier]:
    """The tiers whose places the core knows, and those that nodes share, with what each does."""
    by_name = {tier.name: tier for tier in tiers}
    for state in states(node.tiers):
        if state.is_shared:
            tier = admin_pb2.Tier(name=state.name, capacity_byte_count=state.capacity_bytes)
            tiers.append(tier)
        else:
            tier = by_name[state.name]
        tier.activity.CopyFrom(admin_pb2.TierActivity(**activity(state)))
    return tiers
