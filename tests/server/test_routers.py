"""Stand-ins for routers that can't be run here: the rules by which each reads events, in a few
lines."""

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing

import msgspec
import numpy as np
import pytest
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

from demo.processes import Server, runtime_folder
from hotkv_client import BlockRun, Role, Session, SessionConfig
from hotkv_client.admin import AdminClient
from tests.server.support import FULL, GroupsEngine, hashes
from tests.support.ports import free_ports
from tests.support.waiting import wait_for


class LlmD:
    """Stands for llm-d's index: the second part of a topic names the holder of the blocks, the
    third the model. With llm-d-router#2586 `node:` and `pool:` stand for the pods of a node and of
    all nodes."""

    def __init__(self, endpoint: str, pods: dict[str, str]) -> None:
        """pods: the node of each pod's address."""
        self._pods = pods
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, "kv@")
        self._index: dict[tuple[str, str], set[object]] = defaultdict(set)

    def read(self) -> None:
        while self._socket.poll(50):
            topic, _, payload = self._socket.recv_multipart()
            named = re.fullmatch(r"kv@([^@]+)@(.+)", topic.decode())
            assert named is not None, topic
            known = self._index[named[2], named[1]]
            for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events:
                if isinstance(event, BlockStored):
                    known.update(event.block_hashes)
                elif isinstance(event, BlockRemoved):
                    known.difference_update(event.block_hashes)
                else:
                    known.clear()

    def holders(self, model: str) -> dict[str, int]:
        """Returns how many blocks of a model each pod can load."""
        self.read()
        found: dict[str, set[object]] = defaultdict(set)
        for (of_model, name), known in self._index.items():
            for pod, node in self._pods.items():
                if of_model == model and name in (pod, f"node:{node}", "pool:all"):
                    found[pod] |= known
        return {pod: len(known) for pod, known in found.items() if known}

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


PODS = {"10.0.0.1:8000": "one", "10.0.0.2:8000": "one", "10.0.0.3:8000": "two"}


@pytest.fixture
def node() -> Iterator[tuple[Server, LlmD]]:
    (port,) = free_ports(1)
    flags = ("--events.endpoint", f"tcp://*:{port}", "--events.node", "one")
    with (
        runtime_folder(128 << 20) as folder,
        Server(folder, "16MiB", "--arena.slab-bytes", "64KiB", *flags) as server,
        closing(LlmD(f"tcp://127.0.0.1:{port}", PODS)) as router,
    ):
        server.wait_ready()
        yield server, router


def test_llm_d_credits_the_pods_of_a_node_under_the_names_of_requests(
    node: tuple[Server, LlmD],
) -> None:
    server, router = node
    with closing(GroupsEngine(server.target, (FULL,), "org/model")) as engine:
        run = BlockRun(
            0, hashes(4), np.arange(4, dtype=np.int32), token_ids=np.arange(64, dtype=np.int32)
        )
        of_node = {"10.0.0.1:8000": 4, "10.0.0.2:8000": 4}

        def is_heard() -> bool:
            """Stores again, because a subscription takes effect after a while. Returns True once
            the router has received the event."""
            engine.session.flush().result(60)
            engine.store(run)
            return router.holders("org/model") == of_node

        wait_for(is_heard)
        # Another engine serves the same weights under another name.
        config = SessionConfig(
            server.target, "other", Role.SCHEDULER, engine.key_space, model_names=("served",)
        )
        with closing(Session(config)) as second:
            second.start()
            assert second.wait_connected(20)
            wait_for(lambda: router.holders("served") == of_node)
        with AdminClient(server.target) as admin:
            admin.evict(everything=True)
        wait_for(lambda: router.holders("served") == router.holders("org/model") == {})
