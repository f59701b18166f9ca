"""A server with a status page, and an engine whose traffic it shows."""

import contextlib
import hashlib
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo.processes import Server
from hotkv_client import BlockRun, GroupHashes, LoadRun, RequestReport
from hotkv_client.paged_engine import PagedEngine
from hotkv_proto.groups import GroupSpec
from tests.server.support import FULL, GroupsEngine, block_ids, hashes, http_port

BLOCK_TOKENS = 16
ASKS = 4


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def figures(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found

    @property
    def text(self) -> str:
        return self.body.decode()


def get(port: int, path: str = "/", *, method: str = "GET", **headers: str) -> Answer:
    """In names of headers, underscores stand for hyphens. Retries while the server is too busy
    to answer."""
    for _ in range(ASKS - 1):
        answer = _get(port, path, method, headers)
        if not (answer.status == 503 and b"the event loop does not answer" in answer.body):
            return answer
    return _get(port, path, method, headers)


def _get(port: int, path: str, method: str, headers: Mapping[str, str]) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", None, named, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return Answer(answer.status, answer.headers, answer.read())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.headers, error.read())


def status_of(server: Server, **headers: str) -> dict[str, Any]:
    answer = get(http_port(server), "/api/v1/status", **headers)
    assert answer.status == 200, answer.body
    return answer.figures


@pytest.fixture
def groups_engine(server: Server) -> Iterator[Callable[..., GroupsEngine]]:
    with contextlib.ExitStack() as stack:

        def make(model: str, *groups: GroupSpec) -> GroupsEngine:
            one = GroupsEngine(server.target, groups or (FULL,), model)
            stack.callback(one.close)
            return one

        yield make


class Traffic:
    def __init__(self, target: str, model: str, engine_id: str, **settings: Any) -> None:
        self.engine = PagedEngine(target, model=model, engine_id=engine_id, **settings).connect()
        self._number = 0

    def prompt(self, num_blocks: int = 8, *, loads: int = 4, device: int = 1) -> list[bytes]:
        """Stores a prompt, loads its first `loads` blocks, and reports it with `device` blocks
        hit in the engine's own cache."""
        self._number += 1
        name, blocks = f"{self.engine.session.config.engine_id}-{self._number}", hashes(num_blocks)
        session, ids = self.engine.session, block_ids(num_blocks)
        session.store(name, name, [BlockRun(0, blocks, ids)], 20).result(60)
        lease = f"{name}-again"
        if loads:
            session.acquire(lease, [GroupHashes(0, blocks[:loads])], 20).result(60)
            run = LoadRun(0, np.arange(loads, dtype=np.int32), ids[:loads])
            session.load(lease, lease, [run], 20).result(60)
            session.release(lease)
        tokens, hit = num_blocks * BLOCK_TOKENS + 3, (device + loads) * BLOCK_TOKENS
        report = RequestReport(
            blocks, tokens, device * BLOCK_TOKENS, hit, 0.0, saved_s=0.5, wait_s=0.125
        )
        session.report_requests([report])
        session.ping(10)
        return blocks

    def close(self) -> None:
        self.engine.close()


def settings_with_tenants(
    folder: Path, admin: str, *tenants: str, token_file: Path | None = None
) -> Path:
    """admin: an administrator's token.
    tenants: those that this process's user may use.
    token_file: lets the page listen for other machines, with the token in this file.
    """
    digest = hashlib.sha256(admin.encode()).hexdigest()
    text = f'[security]\nadmin_token_sha256 = ["{digest}"]\n'
    for name in tenants:
        text += f'[[security.tenants]]\nname = "{name}"\nuids = [{os.getuid()}]\n'
    if token_file is not None:
        text += f'[http]\nhost = "0.0.0.0"\ntoken_file = "{token_file}"\n'
    config = folder / "hotkv.toml"
    config.write_text(text)
    return config
