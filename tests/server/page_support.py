"""A server with a status page, and traffic of engines for it."""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from demo.processes import Server
from hotkv_client import BlockRun, GroupHashes, LoadRun, RequestReport
from hotkv_client.admin import AdminClient
from hotkv_client.testing import PagedEngine
from tests.server.support import block_ids, hashes, http_port

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Answer:
    """An HTTP answer."""

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
    """Asks the server on this machine; underscores in the names of headers stand for hyphens."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", None, named, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return Answer(answer.status, answer.headers, answer.read())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.headers, error.read())


def status_of(server: Server, **headers: str) -> dict[str, Any]:
    """Returns what /api/v1/status says."""
    answer = get(http_port(server), "/api/v1/status", **headers)
    assert answer.status == 200, answer.body
    return answer.figures


class Traffic:
    """One engine that stores prompts, loads them again and reports them."""

    def __init__(self, target: str, model: str, engine_id: str, **settings: Any) -> None:
        self.engine = PagedEngine(target, model=model, engine_id=engine_id, **settings).connect()
        self._number = 0

    def prompt(self, num_blocks: int = 8, *, loads: int = 4, device: int = 1) -> list[bytes]:
        """Stores a prompt, then another request loads `loads` of its blocks and had `device` of
        them. Returns the hashes."""
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


def listed(server: Server) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns what the admin API says of the server: info, tiers, sessions."""
    with AdminClient(server.target) as admin:
        return admin.info(), admin.tiers(), admin.sessions()
