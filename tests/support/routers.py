"""Two readers of hotkv's KV events: NVIDIA Dynamo's indexer, and a reader of what a publisher
keeps for replay."""

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher

from tests.support.ports import free_ports
from tests.support.waiting import wait_for

WHEEL = "ai-dynamo-runtime==1.6.1"


def installed() -> Path:
    """Dynamo's wheel with its dependencies; downloaded the first time."""
    folder = Path(sys.prefix) / ".dynamo" / WHEEL
    if not folder.exists():
        making = folder.with_name(f"making-{os.getpid()}")
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(making), WHEEL]
        subprocess.run([*command, "pyzmq"], check=True)
        making.rename(folder)
    return folder


Worker = tuple[str, str]
"""A publisher's addresses of events and replays."""


class Indexer:
    """Dynamo's standalone indexer; the workers have the ids 1, 2, …"""

    def __init__(self, log: Path, block_tokens: int, *workers: Worker) -> None:
        (port,) = free_ports(1)
        self._url = f"http://127.0.0.1:{port}"
        flags = ["--block-size", str(block_tokens), "--port", str(port), "--threads", "1"]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dynamo.indexer", *flags],
                env=os.environ | {"PYTHONPATH": str(installed())},
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        for number, (endpoint, replay_endpoint) in enumerate(workers, 1):
            worker = {
                "instance_id": number,
                "model_name": "m",
                "block_size": block_tokens,
                "endpoint": endpoint,
                "replay_endpoint": replay_endpoint,
            }
            wait_for(partial(self._registers, worker), "the indexer answers")

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found

    def _registers(self, worker: dict[str, Any]) -> bool:
        with contextlib.suppress(OSError):
            return self._post("/register", worker)["status"] == "ok"
        return False

    def credits(self, prompt: list[int], worker: int = 1) -> tuple[int, int]:
        """Of the prompt's tokens: in a worker's host memory, and there or in tiers below."""
        found = self._post("/query", {"model_name": "m", "token_ids": prompt})["instances"]
        of_worker = found.get(str(worker), {"cpu": 0, "disk": 0})
        return of_worker["cpu"], of_worker["disk"]

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)


def replay(
    endpoint: str, since: int = 0, before: Sequence[list[bytes]] = (), topic: bytes = b""
) -> list[tuple[bytes, int, list[Any]]]:
    """(topic, number, events) of each kept message, in order.

    before: messages to send first.
    topic: empty: all.
    """
    messages = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(endpoint)
        asked = [b"", since.to_bytes(8, "big"), *([topic] if topic else [])]
        for message in (*before, asked):
            dealer.send_multipart(message)
        while True:
            assert dealer.poll(30_000), "the replay has no end"
            _, topic, number, payload = dealer.recv_multipart()
            if number == ZmqEventPublisher.END_SEQ:
                return messages
            events = msgspec.msgpack.decode(payload, type=KVEventBatch).events
            messages.append((topic, int.from_bytes(number, "big"), list(events)))


def replayed(endpoint: str) -> list[Any]:
    return [event for *_, events in replay(endpoint) for event in events]
