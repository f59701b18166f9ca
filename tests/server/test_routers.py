"""Tests topics of KV events as llm-d parses them; llm-d can't be run here."""

from contextlib import ExitStack, closing

import numpy as np
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from demo.processes import Server, runtime_folder
from hotkv_client import BlockRun, Role, Session, SessionConfig
from hotkv_client.admin import AdminClient
from tests.server.routers import Router, external
from tests.server.support import FULL, GroupsEngine, hashes


def test_llm_d_credits_pods_under_requested_names() -> None:
    """`node:one` stands for all pods of a node (llm-d-router#2586)."""
    blocks, flags = hashes(4), ("--events.node", "one")
    with ExitStack() as stack:
        folder = stack.enter_context(runtime_folder(128 << 20))
        endpoint = ("--events.endpoint", f"ipc://{folder}/events")
        server = stack.enter_context(Server(folder, "16MiB", *flags, *endpoint))
        server.wait_ready()
        engine = stack.enter_context(closing(GroupsEngine(server.target, (FULL,), "org/model")))
        config = SessionConfig(
            server.target, "other", Role.SCHEDULER, engine.key_space, model_names=("served",)
        )
        other = stack.enter_context(closing(Session(config)))
        other.start()
        assert other.wait_connected(20)
        routers = [
            stack.enter_context(closing(Router(folder, f"kv@node:one@{name}")))
            for name in ("org/model", "served")
        ]
        for at, router in enumerate(routers):
            router.wait_subscribed(engine, *routers[:at])
        engine.store(BlockRun(0, blocks, np.arange(4, dtype=np.int32)))
        admin = stack.enter_context(AdminClient(server.target))
        admin.evict(everything=True)
        for router in routers:
            stored, removed = router.events(2)
            assert isinstance(stored, BlockStored) and isinstance(removed, BlockRemoved)
            assert stored.block_hashes == removed.block_hashes == [*map(external, blocks)]
