"""Answers each HTTP path. Everybody may read the probes and metrics; `PageAccess` decides who may
read the status page and its API.

Always true: figures are read on the node's event loop, and converted to JSON on the event loop of
the HTTP thread. Clients that ask for the same answer at the same time share one computation.
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
# Requests and answers of HTTP, as values.

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of Prometheus' text format. It is used for all texts."""
JSON_TYPE = "application/json"
PRIVATE: Mapping[str, str] = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of the answers of the status page and its API."""


@dataclass(frozen=True, slots=True)
class Request:
    """The parts of an HTTP request that decide its answer.

    path, query: the parts of the address before and after the question mark.
    host, authorization, accept: values of these headers; empty if the header is missing.
    body: body of a POST to CHECK_PATH.
    """

    path: str
    query: str = ""
    host: str = ""
    authorization: str = field(default="", repr=False)
    accept: str = ""
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer to an HTTP request."""

    status: int
    body: bytes
    content_type: str = TEXT_TYPE
    headers: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def text(status: int, line: str, headers: Mapping[str, str] = PRIVATE) -> "Reply":
        """Makes an answer whose body is a line of text."""
        return Reply(status, f"{line}\n".encode(), headers=headers)

    @staticmethod
    def json(value: Any) -> "Reply":
        """Makes an answer with status 200 and the value as JSON. Its headers are PRIVATE, which
        forbid caching."""
        body = orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)
        return Reply(200, body, JSON_TYPE, PRIVATE)


# ----------------------------------------------------------------------------------------- The page
# The status page is a single file. It needs no other files, and its headers forbid others.
#
# Always true: the page contains no figures; it asks the API for them. The Content-Security-Policy
# allows only the script and the style sheet of the file, which it identifies by their hashes. It
# forbids loading from other hosts, and making HTML elements from text.

HTML_TYPE = "text/html; charset=utf-8"
FILE = "page.html"


def _hash(tag: str, text: str) -> str:
    """Returns the SHA-256 (base64) of the content of the only element with this tag, in the form
    that a Content-Security-Policy needs."""
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
    """Makes the answer that contains the status page (HTML). Reads the page's file only once."""

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
        """Returns the answer that contains the status page. With the status 401, the page first
        asks the reader for a token."""
        return Reply(status, self._body, HTML_TYPE, self._headers)


# ------------------------------------------------------------------------------------------ Savings
# Answers `/api/v1/savings` (the ledger's figures). The node computes one answer at a time. After it
# the node rests: for some time it computes no further answer. While it computes or rests, clients
# get the latest answer, with its age.
#
# Always true: all answers together take about RESTING_SHARE of the node's event loop, however many
# clients ask, and whatever windows of time they ask for. Use on the HTTP thread's event loop only.

RESTING_SHARE = 0.05
"""Share of the event loop's time that the computations of all answers may take together."""
MAX_REST_S = 5.0
"""Longest pause of the node after an answer, in seconds, however long its computation took."""
MAX_SINCE_S = 8 * 86_400.0
"""Longest window of the ledger, in seconds. The window 0 means all time."""
MAX_KEPT = 32
"""Most answers about savings that are cached, and most computations of such answers that are
requested while no client waits for them any more. Answers differ in their window, or in whether
they contain names."""


@dataclass(frozen=True, slots=True)
class _Made:
    reply: Reply
    made_s: float

    def at(self, now_s: float) -> Reply:
        """Returns the cached answer, with its age at `now_s` in whole seconds in the header Age."""
        headers = {**self.reply.headers, "Age": str(int(now_s - self.made_s))}
        return dataclasses.replace(self.reply, headers=headers)


class SavingsPage:
    """Answers requests for the savings: the figures of the ledger, which counts hits and the time
    that they saved. The node computes one answer at a time and then pauses, so that all answers
    together take about RESTING_SHARE of its event loop. While it computes or pauses, clients get
    the latest answer.

    read: called as `read(since_s, has_names)`; returns the figures from the node.
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
        # For the arguments of each computation: how many clients wait for its answer.
        self._num_waiting = Counter[tuple[int, bool]]()

    def __repr__(self) -> str:
        return f"SavingsPage({len(self._made)} answers, {len(self._making)} in the making)"

    async def reply(self, since_s: float, *, has_names: bool) -> Reply:
        """Returns the ledger's figures (hits and the time that they saved) for the last `since_s`
        seconds, rounded up to minutes; 0: all time.

        has_names: True includes a row with the names of each account (tenant, model, engine).

        Requests a new computation, unless the same computation is already requested. It begins when
        the running computation and the pause after it are over. While the node computes or pauses,
        returns the latest answer for the same arguments if there is one. Otherwise waits for the
        new answer. Raises the node's errors.
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
        """If MAX_KEPT computations are requested, cancels the last computation for which no client
        waits. The reason: a client could ask for the savings of many windows of time and
        disconnect; the other clients would then wait for these computations."""
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
            # If this computation was cancelled, `_making` no longer has it, or has a newer
            # computation under the same arguments.
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
"""The only path that accepts POST. A router asks there which blocks are cached, in the format of
Dynamo's `SharedKvCacheHttpClient`."""
ALL_PATHS = f"try /, /metrics, /livez, /readyz, {STATUS_PATH} or {SAVINGS_PATH}"
T = TypeVar("T")


async def _probe(node: Node, *, also_draining: bool) -> Reply:
    """Answers a probe: status 200, or status 503 with the problems of the server.

    also_draining: True: it counts as a problem too if the server drains (is about to stop and
        accepts no new work).
    """
    problems = node.health.problems(time.monotonic())
    if also_draining and node.core.draining:
        problems += ("the server drains",)
    return Reply.text(503 if problems else 200, "\n".join(problems) or "ok", {})


async def _savings(node: Node, since_s: float, *, has_names: bool) -> Figures:
    filters = {"since_s": str(since_s), "rows": "" if has_names else "no"}
    return await tell(all_topics(node), "savings", filters)


async def _check(node: Node, model: str, block_tokens: int, hashes: list[int]) -> BoolMask | None:
    """Asks the capabilities (optional parts of the server) which of these blocks are cached.
    Returns a mask of the cached blocks [n], from the first capability that answers; None if no
    capability answers.

    model: name of the model.
    block_tokens: tokens of a block.
    hashes: the router's block hashes.
    """
    for one in node.capabilities:
        if (found := await one.check_blocks(model, block_tokens, hashes)) is not None:
            return found
    return None


async def _status(node: Node, *, has_names: bool) -> NodeStatus:
    return read_status(node, has_names=has_names)


def since(query: str) -> float:
    """Returns the parameter `since_s` of a URL's query, in seconds; 0 if it is missing. Raises
    ValueError if the parameter is no number, or is below 0."""
    values = urllib.parse.parse_qs(query).get("since_s", ["0"])
    try:
        seconds = float(values[-1])
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError("since_s: give a number of seconds, 0 for all")
    return seconds


class Routes:
    """Answers HTTP requests for probes, metrics, the status page and its API. Use on the HTTP
    thread's event loop only."""

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
        """Starts to count the cache's entries (records in the block table) in the background, for
        the first answer to /metrics. Call this method on the node's event loop."""
        self._collector.prepare()

    async def answer(self, request: Request) -> Reply:
        """Answers an HTTP request. Raises the node's errors."""
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
        """Returns which details the answer to a request may show (`Sight`). If the headers of the
        request do not give enough rights for its path, returns a `Reply` that refuses the
        request."""
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
        """Answers a router's request that asks which blocks are cached.

        The request's body is `{"block_hashes": […]}`. The answer is `{"ranges": [[first, end],
        …]}`: the ranges of positions in `block_hashes` (`end` exclusive) whose blocks are cached.
        """
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
        """Runs `make` and returns its result. If requests with the same `name` arrive while `make`
        runs, they get the same result."""
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
        """Runs the coroutine `read` on the node's event loop and returns its result."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(read, self._node_loop))
