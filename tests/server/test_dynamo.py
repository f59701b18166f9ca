"""Tests that NVIDIA Dynamo's KV indexer reads hotkv's events and credits each node with its
blocks."""

import contextlib
import signal
from collections.abc import Iterator
from functools import partial
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest

from hotkv_client import BlockResult, BlockRun
from hotkv_client.admin import AdminClient
from tests.doubles.with_constants import constant
from tests.server.places import opened
from tests.server.support import FULL, GroupsEngine, hashes
from tests.server.tiered import Tiered
from tests.support.ports import free_ports
from tests.support.routers import Indexer
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

BLOCK_TOKENS, PROMPT_TOKENS = 16, 128


class Node(Tiered):
    """A server with a disk that publishes KV events. It records the prompts that are stored."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        port, replay_port = free_ports(2)
        self.worker = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay_port}"
        self._flags = (
            *("--events.endpoint", f"tcp://*:{port}", "--events.numbering", "endpoint"),
            *("--events.replay-endpoint", f"tcp://*:{replay_port}"),
            # Four messages are kept for replay, so a late reader can't get most.
            *constant("events.capability.BUFFER_STEPS", 4),
        )
        self._stored: list[tuple[list[int], list[bytes]]] = []

    def begin(self) -> None:
        self.start_tiered(*self._flags)

    def store(self, model: str) -> list[int]:
        """Stores a new prompt, and waits until it is on the disk. Its tokens."""
        assert self.server is not None
        first, count = 1000 * (1 + len(self._stored)), PROMPT_TOKENS // BLOCK_TOKENS
        prompt, blocks = list(range(first, first + PROMPT_TOKENS)), hashes(count)
        before = self.counter("tier_demoted_blocks_total")
        with contextlib.closing(GroupsEngine(self.server.target, (FULL,), model)) as engine:
            run = BlockRun(0, blocks, np.arange(count, dtype=np.int32), token_ids=prompt)
            assert (engine.store(run).results[0] == BlockResult.STORED).all()
        wait_for(lambda: self.counter("tier_demoted_blocks_total") == before + count)
        self._stored.append((prompt, blocks))
        return prompt

    def is_equal(self, indexer: Indexer) -> bool:
        """For each prompt, the indexer must count the tokens up to the first block that is not
        ready."""
        assert self.server is not None
        with AdminClient(self.server.target) as admin:
            told = admin.blocks(page_size=10_000)["blocks"]
        ready = {one["block_hash"] for one in told if one["state"] == "ready"}
        return all(
            indexer.credits(prompt)[0]
            == BLOCK_TOKENS * len(list(takewhile(lambda one: one.hex() in ready, blocks)))
            for prompt, blocks in self._stored
        )

    def tells_of(self, prompt: list[int], indexer: Indexer) -> bool:
        """The indexer asks for missed events when the next one comes, here that of another
        prompt."""
        self.store("beta")
        return indexer.credits(prompt)[0] > 0

    def flush(self, model: str) -> None:
        assert self.server is not None
        with contextlib.closing(GroupsEngine(self.server.target, (FULL,), model)) as engine:
            engine.session.flush().result(60)


@pytest.fixture
def node() -> Iterator[Node]:
    with opened(Node, 128 << 20) as made:
        made.begin()
        yield made


@pytest.fixture
def indexer(node: Node, tmp_path: Path) -> Iterator[Indexer]:
    with contextlib.closing(Indexer(tmp_path / "log", BLOCK_TOKENS, node.worker)) as made:
        yield made


def test_prompts_are_credited_where_they_lie(node: Node, indexer: Indexer, tmp_path: Path) -> None:
    def lies(prompt: list[int], in_host: int, anywhere: int) -> None:
        wait_for(lambda: indexer.credits(prompt) == (in_host, anywhere))
        wait_for(lambda: node.is_equal(indexer), "the index equals `hotkv blocks`")

    first, second = node.store("alpha"), node.store("beta")
    lies(first, PROMPT_TOKENS, PROMPT_TOKENS)
    lies(second, PROMPT_TOKENS, PROMPT_TOKENS)
    node.forget()
    lies(first, 0, PROMPT_TOKENS)
    lies(second, 0, PROMPT_TOKENS)
    node.flush("alpha")
    lies(first, 0, 0)
    lies(second, 0, PROMPT_TOKENS)
    kept = node.store("alpha")
    for how in (signal.SIGTERM, signal.SIGKILL):
        node.stop(how)
        node.begin()
        # The indexer reconnects after a while, and asks for missed events when the next one
        # comes.
        again = node.store("alpha")
        wait_for(partial(node.tells_of, again, indexer))
        lies(again, PROMPT_TOKENS, PROMPT_TOKENS)
        lies(kept, PROMPT_TOKENS, PROMPT_TOKENS)
        lies(second, 0, PROMPT_TOKENS)
        lies(first, 0, 0)
    later = [node.store(model) for model in ("alpha", "beta") * 4]
    with contextlib.closing(Indexer(tmp_path / "late", BLOCK_TOKENS, node.worker)) as late:
        wait_for(partial(node.tells_of, again, late))
        for prompt in (again, kept, *later):
            wait_for(lambda prompt=prompt: late.credits(prompt) == (PROMPT_TOKENS, PROMPT_TOKENS))
        wait_for(lambda: node.is_equal(late), "the late index equals `hotkv blocks`")
        wait_for(lambda: late.credits(second) == (0, PROMPT_TOKENS))
        assert late.credits(first) == (0, 0)
