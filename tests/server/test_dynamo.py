"""Dynamo's indexer, from its wheel, hears hotkv's events: what it credits is where blocks lie."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo.processes import Server, runtime_folder
from hotkv_client import BlockResult, BlockRun
from hotkv_client.admin import AdminClient
from tests.server.support import FULL, PATIENT, GroupsEngine, hashes
from tests.support.ports import free_ports
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

WHEEL = "ai-dynamo-runtime==1.6.1"
BLOCK_TOKENS, PROMPT_TOKENS = 16, 128


def installed() -> Path:
    """Returns a folder with the wheel and what it needs, which are loaded once from the index."""
    folder = Path(sys.prefix) / ".dynamo" / WHEEL
    if not folder.exists():
        making = folder.with_name(f"making-{os.getpid()}")
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(making), WHEEL]
        subprocess.run([*command, "pyzmq"], check=True)
        making.rename(folder)
    return folder


class Indexer:
    """Dynamo's standalone indexer with one worker, whose events come from `port`."""

    def __init__(self, http_port: int, port: int, replay_port: int, log: Path) -> None:
        self._log = log
        self._url = f"http://127.0.0.1:{http_port}"
        self._worker: dict[str, Any] = {
            "instance_id": 1,
            "model_name": "m",
            "block_size": BLOCK_TOKENS,
            "endpoint": f"tcp://127.0.0.1:{port}",
            "replay_endpoint": f"tcp://127.0.0.1:{replay_port}",
        }
        flags = ["--block-size", str(BLOCK_TOKENS), "--port", str(http_port), "--threads", "1"]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dynamo.indexer", *flags],
                env=os.environ | {"PYTHONPATH": str(installed())},
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        wait_for(self._registers, "the indexer answers", 60)

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found

    def _registers(self) -> bool:
        with contextlib.suppress(OSError):
            return self._post("/register", self._worker)["status"] == "ok"
        return False

    def credits(self, prompt: list[int]) -> tuple[int, int]:
        """Returns the tokens of a prompt that the worker is credited with: in host memory, and
        there or below."""
        found = self._post("/query", {"model_name": "m", "token_ids": prompt})["instances"]
        worker = found.get("1", {"cpu": 0, "disk": 0})
        return worker["cpu"], worker["disk"]

    def late(self, http_port: int) -> "Indexer":
        """Returns another indexer of the same worker."""
        port, replay_port = (
            int(self._worker[name].rpartition(":")[2]) for name in ("endpoint", "replay_endpoint")
        )
        return Indexer(http_port, port, replay_port, self._log.with_name("late"))

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)


class Node:
    """A server with a disk that publishes events, and the prompts that engines store there."""

    def __init__(self, folder: Path, port: int, replay_port: int) -> None:
        self.folder = folder
        self._flags = (
            *("--arena.slab-bytes", "64KiB"),
            *("--tiers.disk.path", str(folder / "disk"), "--tiers.disk.bytes", "64MiB"),
            *("--events.endpoint", f"tcp://*:{port}", "--events.numbering", "endpoint"),
            *("--events.replay-endpoint", f"tcp://*:{replay_port}", *PATIENT),
            # So few that a late reader has missed most of them.
            *("--events.buffer-steps", "4"),
        )
        self._first_token = 1000
        self.server = self._started()

    def _started(self) -> Server:
        server = Server(self.folder, "16MiB", *self._flags)
        server.wait_ready()
        return server

    def store(self, model: str) -> list[int]:
        """Stores a new prompt of a model. Returns its tokens once the disk has its blocks."""
        prompt = list(range(self._first_token, self._first_token + PROMPT_TOKENS))
        self._first_token += 1000
        count = PROMPT_TOKENS // BLOCK_TOKENS
        before = self.server.counter("tier_demoted_blocks_total")
        with contextlib.closing(GroupsEngine(self.server.target, (FULL,), model)) as engine:
            run = BlockRun(0, hashes(count), np.arange(count, dtype=np.int32), token_ids=prompt)
            stored = engine.session.store("s", f"s{prompt[0]}", [run], 60).result(60)
            assert (stored.results[0] == BlockResult.STORED).all()
        wait_for(lambda: self.server.counter("tier_demoted_blocks_total") == before + count)
        return prompt

    def tells_of(self, prompt: list[int], indexer: Indexer) -> bool:
        """Makes another event. Returns whether the node is credited with the prompt by now."""
        self.store("beta")
        return indexer.credits(prompt)[0] > 0

    def evict(self) -> None:
        with AdminClient(self.server.target) as admin:
            admin.evict(everything=True)

    def flush(self, model: str) -> None:
        with contextlib.closing(GroupsEngine(self.server.target, (FULL,), model)) as engine:
            engine.session.flush().result(60)

    def restart(self, how: signal.Signals) -> None:
        os.kill(self.server.pid, how)
        self.server._child.process.wait(60)
        self.server.__exit__()
        self.server = self._started()

    def close(self) -> None:
        self.server.__exit__()


@pytest.fixture
def node_and_indexer(tmp_path: Path) -> Iterator[tuple[Node, Indexer]]:
    http_port, port, replay_port = free_ports(3)
    with (
        runtime_folder(128 << 20) as folder,
        contextlib.closing(Node(folder, port, replay_port)) as node,
        contextlib.closing(Indexer(http_port, port, replay_port, tmp_path / "log")) as indexer,
    ):
        yield node, indexer


def test_prompts_are_credited_where_they_lie(node_and_indexer: tuple[Node, Indexer]) -> None:
    node, indexer = node_and_indexer

    def lies(prompt: list[int], in_host: int, anywhere: int) -> None:
        wait_for(lambda: indexer.credits(prompt) == (in_host, anywhere))

    first, second = node.store("alpha"), node.store("beta")
    lies(first, PROMPT_TOKENS, PROMPT_TOKENS)
    lies(second, PROMPT_TOKENS, PROMPT_TOKENS)
    node.evict()
    lies(first, 0, PROMPT_TOKENS)
    lies(second, 0, PROMPT_TOKENS)
    node.flush("alpha")
    lies(first, 0, 0)
    lies(second, 0, PROMPT_TOKENS)
    kept = node.store("alpha")
    for how in (signal.SIGTERM, signal.SIGKILL):
        node.restart(how)
        # The indexer connects again after a while; it asks for what it has missed with the next
        # event that it gets.
        again = node.store("alpha")
        wait_for(partial(node.tells_of, again, indexer))
        lies(again, PROMPT_TOKENS, PROMPT_TOKENS)
        lies(kept, PROMPT_TOKENS, PROMPT_TOKENS)
        lies(second, 0, PROMPT_TOKENS)
        lies(first, 0, 0)
    later = [node.store(model) for model in ("alpha", "beta") * 4]
    (http_port,) = free_ports(1)
    with contextlib.closing(indexer.late(http_port)) as late:
        wait_for(partial(node.tells_of, again, late))
        for prompt in (again, kept, *later):
            wait_for(lambda prompt=prompt: late.credits(prompt) == (PROMPT_TOKENS, PROMPT_TOKENS))
        assert late.credits(second) == (0, PROMPT_TOKENS)
        assert late.credits(first) == (0, 0)
