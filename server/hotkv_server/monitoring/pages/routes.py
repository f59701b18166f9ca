"""Answers each HTTP path. Everybody may read probes and metrics; `PageAccess` decides who may read
the status page and its API.

Always true: figures are read on the node's event loop, and converted to JSON on the HTTP
thread's. Clients that ask for the same answer at the same time share one computation.
"""

import array
import asyncio
import base64
import dataclasses
import functools
import hashlib
import logging
import math
import re
import time
import urllib.parse
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, TypeVar

import numpy as np
import orjson
from prometheus_client import (
    CollectorRegistry,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from hotkv_server.cache.values import MAX_BLOCKS_PER_CALL, BoolMask
from hotkv_server.monitoring.metrics import NodeCollector
from hotkv_server.monitoring.status import NodeStatus, as_json_values, read_status
from hotkv_server.monitoring.topics import all_topics
from hotkv_server.node.capability import Figures, tell
from hotkv_server.node.node import Node
from hotkv_server.security.page_access import PageAccess, PageRefusal, Sight
from hotkv_server.security.path_checks import UnsafeError

# ----------------------------------------------------------------------------- Requests and answers

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of Prometheus' text format; used for all texts."""
JSON_TYPE = "application/json"
PRIVATE: Mapping[str, str] = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of the status page and its API."""


@dataclass(frozen=True, slots=True)
class Request:
    """The parts of an HTTP request that decide its answer.

    host, authorization, accept: headers; empty if missing.
    body: of a POST to CHECK_PATH.
    """

    path: str
    query: str = ""
    host: str = ""
    authorization: str = field(default="", repr=False)
    accept: str = ""
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes
    content_type: str = TEXT_TYPE
    headers: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def text(status: int, line: str, headers: Mapping[str, str] = PRIVATE) -> "Reply":
        return Reply(status, f"{line}\n".encode(), headers=headers)

    @staticmethod
    def json(value: Any) -> "Reply":
        body = orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)
        return Reply(200, body, JSON_TYPE, PRIVATE)


# ----------------------------------------------------------------------------------------- The page
#
# The status page is a single file without figures; it asks the API for them. Always true: the
# Content-Security-Policy allows only the file's own script and style sheet, by their hashes. It
# forbids loading from other hosts, and making HTML elements from text.

HTML_TYPE = "text/html; charset=utf-8"
FILE = "page.html"


def _hash(tag: str, text: str) -> str:
    """SHA-256 (base64) of the only element with this tag, as a Content-Security-Policy needs it."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _policy(text: str) -> str:
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src 'sha256-{_hash('script', text)}'",
            f"style-src 'sha256-{_hash('style', text)}'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


class Page:
    """Reads the page's file once."""

    def __init__(self) -> None:
        text = resources.files(__package__).joinpath(FILE).read_text("utf-8")
        self._body = text.encode()
        self._headers = {
            **PRIVATE,
            "Content-Security-Policy": _policy(text),
            "Cross-Origin-Opener-Policy": "same-origin",
            "X-Frame-Options": "DENY",
        }

    def reply(self, status: int = 200) -> Reply:
        """With status 401, the page first asks the reader for a token."""
        return Reply(status, self._body, HTML_TYPE, self._headers)


# ------------------------------------------------------------------------------------------ Savings
#
# `/api/v1/savings`: the ledger's figures. The node computes one answer at a time, and then rests.
# Meanwhile clients get the latest answer, with its age.
#
# Always true: all answers together take about RESTING_SHARE of the node's event loop, however
# many clients ask, and for whatever windows. On the HTTP thread's event loop only.

RESTING_SHARE = 0.05
MAX_REST_S = 5.0
"""However long a computation took."""
MAX_SINCE_S = 8 * 86_400.0
"""Longest window of the ledger. The window 0 means all time."""
MAX_KEPT = 32
"""Of cached answers, and of requested computations for which no client waits any more. Answers
differ in their window, or in whether they have names."""


@dataclass(frozen=True, slots=True)
class _Made:
    reply: Reply
    made_s: float

    def at(self, now_s: float) -> Reply:
        """With its age in whole seconds in the header Age."""
        headers = {**self.reply.headers, "Age": str(int(now_s - self.made_s))}
        return dataclasses.replace(self.reply, headers=headers)


class SavingsPage:
    """read: called as `read(since_s, has_names)`.
    clock, sleep: replaced in tests.
    """

    def __init__(
        self,
        read: Callable[[float, bool], Awaitable[Figures]],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._read, self._clock, self._sleep = read, clock, sleep
        self._turn = asyncio.Lock()
        self._rests_until_s = float("-inf")
        self._made: OrderedDict[tuple[int, bool], _Made] = OrderedDict()
        self._making: dict[tuple[int, bool], asyncio.Task[_Made]] = {}
        # How many clients wait for each computation.
        self._num_waiting = Counter[tuple[int, bool]]()

    def __repr__(self) -> str:
        return f"SavingsPage({len(self._made)} answers, {len(self._making)} in the making)"

    async def reply(self, since_s: float, *, has_names: bool) -> Reply:
        """The ledger for the last `since_s`, rounded up to minutes; 0: all time.

        has_names: with a named row for each account.

        Requests a new computation, unless the same one is requested. While the node computes or
        rests, gives the latest answer for these arguments if there is one; otherwise waits.
        Raises the node's errors.
        """
        asked = 60 * math.ceil(min(since_s, MAX_SINCE_S) / 60), has_names
        is_resting = self._turn.locked() or self._clock() < self._rests_until_s
        task = self._making.get(asked)
        if task is None:
            self._limit()
            task = self._making[asked] = asyncio.create_task(self._make(*asked))
        latest = self._made.get(asked)
        if latest is None or not is_resting:
            self._num_waiting[asked] += 1
            try:
                latest = await asyncio.shield(task)
            finally:
                self._num_waiting[asked] -= 1
        return latest.at(self._clock())

    def _limit(self) -> None:
        """With MAX_KEPT computations requested, cancels the last for which no client waits: a
        client could ask for many windows and leave, and others would wait for them."""
        self._num_waiting = +self._num_waiting
        if len(self._making) >= MAX_KEPT:
            asked = next(
                (one for one in reversed(self._making) if one not in self._num_waiting), None
            )
            if asked is not None:
                self._making.pop(asked).cancel()

    async def _make(self, since_s: int, has_names: bool) -> _Made:
        asked = since_s, has_names
        try:
            async with self._turn:
                await self._sleep(max(0.0, self._rests_until_s - self._clock()))
                begun_s = self._clock()
                try:
                    figures = await self._read(float(since_s), has_names)
                finally:
                    now_s = self._clock()
                    rest_s = (now_s - begun_s) * (1 / RESTING_SHARE - 1)
                    self._rests_until_s = now_s + min(rest_s, MAX_REST_S)
        finally:
            # Unless this was cancelled: then `_making` lacks it, or has a newer one with the
            # same arguments.
            if self._making.get(asked) is asyncio.current_task():
                del self._making[asked]
        made = self._made[asked] = _Made(Reply.json(figures), now_s)
        self._made.move_to_end(asked)
        while len(self._made) > MAX_KEPT:
            self._made.popitem(last=False)
        return made


# ------------------------------------------------------------------------------------------- Routes

log = logging.getLogger(__name__)

PAGE_PATH = "/"
API = "/api/v1/"
STATUS_PATH, SAVINGS_PATH = f"{API}status", f"{API}savings"
CHECK_PATH = f"{API}check_blocks"
"""The only path for POST: a router asks which blocks are cached, as Dynamo's
`SharedKvCacheHttpClient` does."""
ALL_PATHS = f"try /, /metrics, /livez, /readyz, {STATUS_PATH} or {SAVINGS_PATH}"
T = TypeVar("T")


async def _probe(node: Node, *, also_draining: bool) -> Reply:
    """Status 503 with the problems, if there are any."""
    problems = node.health.problems(time.monotonic())
    if also_draining and node.core.draining:
        problems += ("the server drains",)
    return Reply.text(503 if problems else 200, "\n".join(problems) or "ok", {})


async def _savings(node: Node, since_s: float, *, has_names: bool) -> Figures:
    filters = {"since_s": str(since_s), "rows": "" if has_names else "no"}
    return await tell(all_topics(node), "savings", filters)


async def _check(node: Node, model: str, block_tokens: int, hashes: list[int]) -> BoolMask | None:
    """None if unknown."""
    asked = node.offers.check_blocks
    return None if asked is None else await asked(model, block_tokens, hashes)


async def _status(node: Node, *, has_names: bool) -> NodeStatus:
    return read_status(node, has_names=has_names)


def since(query: str) -> float:
    """The query's `since_s`; 0 if missing. Raises ValueError."""
    values = urllib.parse.parse_qs(query).get("since_s", ["0"])
    try:
        seconds = float(values[-1])
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError("since_s: give a number of seconds, 0 for all")
    return seconds


class Routes:
    """On the HTTP thread's event loop only."""

    def __init__(
        self, node: Node, node_loop: asyncio.AbstractEventLoop, access: PageAccess
    ) -> None:
        self._node, self._node_loop, self._access = node, node_loop, access
        self._page = Page()
        self._collector = NodeCollector(node)
        self._registry = CollectorRegistry()
        self._registry.register(self._collector)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._told = ""
        self._shared: dict[str, asyncio.Task[Reply]] = {}
        self._savings = SavingsPage(self._read_savings)

    def prepare(self) -> None:
        """Starts a census for the first answer to /metrics. On the node's event loop."""
        self._collector.prepare()

    async def answer(self, request: Request) -> Reply:
        """Raises the node's errors."""
        match request.path:
            case "/metrics":
                return await self._once("metrics", self._metrics)
            case "/livez" | "/readyz":
                return await self._once(
                    request.path,
                    functools.partial(self._probe, also_draining=request.path == "/readyz"),
                )
        if request.path == PAGE_PATH or request.path.startswith(API):
            sight = self.sight(request)
            if isinstance(sight, Reply):
                return sight
            if request.path == CHECK_PATH:
                return await self._checked(request)
            return await self._shown(request, has_names=sight is Sight.NAMES)
        return Reply.text(404, ALL_PATHS)

    def sight(self, request: Request) -> Sight | Reply:
        """What the answer may show, or a refusal."""
        try:
            sight = self._access.judge(request.host, request.authorization)
        except PageRefusal as refusal:
            return self._refused(request, refusal)
        except (OSError, ValueError, UnsafeError) as error:
            if str(error) != self._told:
                self._told = str(error)
                log.warning("http.token_file can't be used: %s", error)
            return Reply.text(503, "http.token_file can't be used; the server's log says why")
        if request.path == CHECK_PATH and sight is not Sight.NAMES:
            return Reply.text(
                403, "questions about blocks need a token of security.admin_token_sha256"
            )
        return sight

    async def _checked(self, request: Request) -> Reply:
        """The body is `{"block_hashes": […]}`. The answer is `{"ranges": [[first, end], …]}`:
        positions of cached blocks, `end` exclusive."""
        query = urllib.parse.parse_qs(request.query)
        model, size = query.get("model", [""])[-1], query.get("block_size", ["0"])[-1]
        if not model:
            return Reply.text(400, "model: name it in the address, as …/check_blocks?model=NAME")
        if not (size.isascii() and size.isdecimal() and len(size) < 7):
            return Reply.text(400, "block_size: give the tokens of a block, as a whole number")
        try:
            hashes = orjson.loads(request.body)["block_hashes"]
            array.array("Q", hashes)
        except (ValueError, TypeError, KeyError, OverflowError):
            return Reply.text(400, 'block_hashes: send {"block_hashes": […]} with 64-bit numbers')
        if len(hashes) > MAX_BLOCKS_PER_CALL:
            return Reply.text(400, f"block_hashes: at most {MAX_BLOCKS_PER_CALL} in a question")
        found = await self._of_node(_check(self._node, model, int(size), hashes))
        if found is None:
            return Reply.text(
                404, "this server answers no questions about blocks: set events.answers"
            )
        steps = np.flatnonzero(np.diff(np.concatenate(([False], found, [False]))))
        return Reply.json({"ranges": steps.reshape(-1, 2).tolist()})

    def _refused(self, request: Request, refusal: PageRefusal) -> Reply:
        if not refusal.needs_token:
            return Reply.text(403, str(refusal))
        if request.path == PAGE_PATH and "text/html" in request.accept:
            return self._page.reply(401)
        headers = {**PRIVATE, "WWW-Authenticate": 'Bearer realm="hotkv"'}
        return Reply.text(401, str(refusal), headers)

    async def _shown(self, request: Request, *, has_names: bool) -> Reply:
        if request.path == PAGE_PATH:
            return self._page.reply()
        if request.path == STATUS_PATH:
            make = functools.partial(self._status, has_names=has_names)
            return await self._once(f"status, names {has_names}", make)
        if request.path != SAVINGS_PATH:
            return Reply.text(404, ALL_PATHS)
        try:
            since_s = since(request.query)
        except ValueError as error:
            return Reply.text(400, str(error))
        return await self._savings.reply(since_s, has_names=has_names)

    async def _once(self, name: str, make: Callable[[], Coroutine[Any, Any, Reply]]) -> Reply:
        """Requests with the same `name` that come while `make` runs share its result."""
        task = self._shared.get(name)
        if task is None or task.done():
            task = self._shared[name] = asyncio.create_task(make())
        return await asyncio.shield(task)

    async def _probe(self, *, also_draining: bool) -> Reply:
        return await self._of_node(_probe(self._node, also_draining=also_draining))

    async def _metrics(self) -> Reply:
        await self._of_node(self._collector.read())
        return Reply(200, generate_latest(self._registry))

    async def _status(self, *, has_names: bool) -> Reply:
        read = await self._of_node(_status(self._node, has_names=has_names))
        return Reply.json(as_json_values(read))

    async def _read_savings(self, since_s: float, has_names: bool) -> Figures:
        return await self._of_node(_savings(self._node, since_s, has_names=has_names))

    async def _of_node(self, read: Coroutine[Any, Any, T]) -> T:
        """Runs `read` on the node's event loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(read, self._node_loop))
