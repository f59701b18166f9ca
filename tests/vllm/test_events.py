"""Events of the server beside those of the engine that filled it: a router must be able to take one
for the other."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)

from demo.processes import Server, runtime_folder
from hotkv_client.admin import AdminClient
from tests.vllm.processes import EngineProcess
from tests.vllm.tiny import VOCAB, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def replayed(endpoint: str) -> list[Any]:
    """All events that a publisher has sent and still keeps, in order."""
    events: list[Any] = []
    context = zmq.Context()
    with context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(endpoint)
        dealer.send_multipart([b"", bytes(8)])
        while True:
            assert dealer.poll(30_000), "the replay has no end"
            _, _, sequence, payload = dealer.recv_multipart()
            if sequence == ZmqEventPublisher.END_SEQ:
                break
            events += msgspec.msgpack.decode(payload, type=KVEventBatch).events
    context.term()
    return events


def blocks(events: list[Any]) -> dict[Any, tuple[Any, ...]]:
    """By hash, what is said of each stored block: parent, tokens, block size.

    An engine leaves blocks of window groups out of an event but not their tokens; what such an
    event says of its blocks is not exact, and is passed over.
    """
    found: dict[Any, tuple[Any, ...]] = {}
    for event in events:
        if (
            isinstance(event, BlockStored)
            and len(event.token_ids) == len(event.block_hashes) * event.block_size
        ):
            for i, block_hash in enumerate(event.block_hashes):
                parent = event.block_hashes[i - 1] if i else event.parent_block_hash
                tokens = tuple(event.token_ids[i * event.block_size : (i + 1) * event.block_size])
                assert found.setdefault(block_hash, (parent, tokens, event.block_size)) == (
                    parent,
                    tokens,
                    event.block_size,
                )
    return found


def groups(events: list[Any]) -> dict[int | None, tuple[Any, ...]]:
    """By group, its kind and window."""
    return {
        e.group_idx: (e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window)
        for e in events
        if isinstance(e, BlockStored)
    }


@pytest.fixture
def folder() -> Iterator[Path]:
    with runtime_folder(256 << 20) as made:
        yield made


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_the_server_tells_of_each_block_what_the_engine_told(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    flags = [
        "--events.endpoint",
        f"ipc://{folder}/host",
        "--events.replay-endpoint",
        f"ipc://{folder}/host-replay",
    ]
    own = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{folder}/device"}
    own["replay_endpoint"] = f"ipc://{folder}/device-replay"
    with Server(folder, "64MiB", *flags) as server:
        server.wait_ready()
        model = write_model(tmp_path / "model", kind)
        engine = EngineProcess(model, tmp_path / "engine.log", server.target, kv_events_config=own)
        try:
            engine.ask("wait", connected=True, timeout_s=60)
            for first in (3, 400):
                prompt = [first + (i * 7) % (VOCAB - first) for i in range(600)]
                engine.ask("generate", prompts=[prompt], max_tokens=2)
            server.wait_for_stores()
            device, host = replayed(own["replay_endpoint"]), replayed(f"ipc://{folder}/host-replay")
        finally:
            engine.stop()
        with AdminClient(server.target) as admin:
            listed = admin.blocks(1, 10_000)["blocks"]
            admin.flush(1)
        cleared = replayed(f"ipc://{folder}/host-replay")[-1]
    held = {
        (b["group_index"], int(b["block_hash"][-16:], 16)) for b in listed if b["state"] == "ready"
    }
    told = {
        (e.group_idx, block_hash)
        for e in host
        if isinstance(e, BlockStored)
        for block_hash in e.block_hashes
    }
    assert told == held and held, "the events do not tell what is held"
    assert {block_hash for _, block_hash in told} == set(blocks(host)), (
        "a block was told without its tokens"
    )
    assert blocks(host).items() <= blocks(device).items()
    assert groups(host) == groups(device)
    assert {e.medium for e in host if isinstance(e, BlockStored)} == {"CPU"}
    assert cleared == AllBlocksCleared()
