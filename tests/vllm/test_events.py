"""A router may read the server's KV events or the engine's: they agree."""

from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored

from demo.processes import Server, runtime_folder
from hotkv_client.admin import AdminClient
from tests.support.routers import replayed
from tests.support.waiting import wait_for
from tests.vllm.processes import Engines
from tests.vllm.runs import settled
from tests.vllm.tiny import VOCAB, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def blocks(events: list[Any]) -> dict[Any, tuple[Any, ...]]:
    """By hash: parent, tokens, block size. vLLM may leave out window blocks but list their
    tokens."""
    found: dict[Any, tuple[Any, ...]] = {}
    for event in events:
        if (
            isinstance(event, BlockStored)
            and len(event.token_ids) == len(event.block_hashes) * event.block_size
        ):
            size, parent = event.block_size, event.parent_block_hash
            for i, block_hash in enumerate(event.block_hashes):
                said = (parent, tuple(event.token_ids[i * size : (i + 1) * size]), size)
                assert found.setdefault(block_hash, said) == said
                parent = block_hash
    return found


def told(events: list[Any]) -> set[tuple[int | None, Any]]:
    """Group and hash of each stored block."""
    stored = (event for event in events if isinstance(event, BlockStored))
    return {(event.group_idx, one) for event in stored for one in event.block_hashes}


def groups(events: list[Any]) -> dict[int | None, tuple[Any, ...]]:
    """Kind and window by group."""
    return {
        e.group_idx: (e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window)
        for e in events
        if isinstance(e, BlockStored)
    }


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.long), "gemma3"])
def test_server_publishes_what_the_engine_published(
    engines: Engines, tmp_path: Path, kind: str
) -> None:
    with runtime_folder(256 << 20) as folder:
        far, near = f"ipc://{folder}/host", f"ipc://{folder}/device"
        flags = ["--events.endpoint", far, "--events.replay-endpoint", f"{far}-replay"]
        own = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": near}
        own["replay_endpoint"] = f"{near}-replay"
        with Server(folder, "64MiB", *flags) as server:
            server.wait_ready()
            model = write_model(tmp_path / "model", kind)
            engine = engines.start(model, server.target, kv_events_config=own)
            engine.ask("wait", connected=True, timeout_s=60)
            for first in (3, 400):
                prompt = [first + (i * 7) % (VOCAB - first) for i in range(600)]
                engine.ask("generate", prompts=[prompt], max_tokens=2)
            settled(engine)
            with AdminClient(server.target) as admin:
                held = {
                    (block["group_index"], int(block["block_hash"][-16:], 16))
                    for block in admin.blocks(1, 10_000)["blocks"]
                    if block["state"] == "ready"
                }
                wait_for(lambda: told(replayed(f"{far}-replay")) == held, "events of what is held")
                host = replayed(f"{far}-replay")
                wait_for(
                    lambda: blocks(host).items() <= blocks(replayed(f"{near}-replay")).items(),
                    "the engine's events of the same blocks",
                )
                device = replayed(f"{near}-replay")
                admin.flush(1)
            wait_for(lambda: replayed(f"{far}-replay")[-1] == AllBlocksCleared(), "the flush")
    assert held
    assert {one for _, one in held} == set(blocks(host)), "a block was told without its tokens"
    assert groups(host) == groups(device)
    assert {event.medium for event in host if isinstance(event, BlockStored)} == {"CPU"}
