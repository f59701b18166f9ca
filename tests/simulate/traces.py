"""Made-up traffic: (time in seconds, block ids). An id stands for a block and all before it."""

import heapq
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

Requests = list[tuple[float, list[int]]]


class Chains:
    """Gives equal contents after equal blocks equal ids."""

    ROOT = -1

    def __init__(self) -> None:
        self._ids: dict[tuple[int, object], int] = {}
        self._unique = 0

    def extend(self, parent: int, contents: Sequence[object]) -> list[int]:
        chain = []
        for content in contents:
            parent = self._ids.setdefault((parent, content), len(self._ids))
            chain.append(parent)
        return chain

    def chain(self, contents: Sequence[object]) -> list[int]:
        return self.extend(self.ROOT, contents)

    def fresh(self, num_blocks: int) -> list[object]:
        self._unique += num_blocks
        return [("only once", self._unique - i) for i in range(num_blocks)]


def _zipf(rng: np.random.Generator, num_items: int, exponent: float, size: int) -> list[int]:
    weights = 1 / np.arange(1, num_items + 1) ** exponent
    return [int(item) for item in rng.choice(num_items, size=size, p=weights / weights.sum())]


def _first(requests: Requests, count: int) -> Requests:
    return sorted(requests, key=lambda request: request[0])[:count]


def zipf_trees(seed: int = 0, num_requests: int = 3000) -> Requests:
    """Paths in trees, popular by Zipf's law, and a few unique blocks."""
    rng, chains = np.random.default_rng(seed), Chains()
    requests: Requests = []
    for number in range(num_requests):
        path = _zipf(rng, 60, 1.1, 1) + _zipf(rng, 12, 1.2, int(rng.integers(1, 9)))
        contents = [(branch, part) for branch in path for part in range(3)]
        requests.append(
            (number * 0.4, chains.chain(contents + chains.fresh(int(rng.integers(0, 6)))))
        )
    return requests


def agent_sessions(seed: int = 0, num_requests: int = 3000, pause_s: float = 20.0) -> Requests:
    """Many agents at once. Contexts grow with each tool call, and pauses differ much."""
    rng, chains = np.random.default_rng(seed), Chains()
    requests: Requests = []
    events: list[tuple[float, int]] = []
    contexts: dict[int, list[object]] = {}
    for agent in range(40):
        heapq.heappush(events, (float(rng.exponential(60.0)), agent))
    next_agent = 40
    while len(requests) < num_requests:
        now_s, agent = heapq.heappop(events)
        context = contexts.setdefault(
            agent, [("system prompt", agent % 4, part) for part in range(12)]
        )
        context += chains.fresh(int(rng.integers(1, 6)))
        requests.append((now_s, chains.chain(context)))
        if len(context) > 90 or rng.random() < 0.03:
            del contexts[agent]
            heapq.heappush(events, (now_s + float(rng.exponential(30.0)), next_agent))
            next_agent += 1
        else:
            heapq.heappush(events, (now_s + float(rng.lognormal(np.log(pause_s), 1.0)), agent))
    return requests


def scans(seed: int = 0, num_requests: int = 3000) -> Requests:
    rng, chains = np.random.default_rng(seed), Chains()
    requests: Requests = []
    for number, popular in enumerate(_zipf(rng, 30, 0.8, num_requests)):
        contents: list[object] = [("popular", popular, part) for part in range(15)]
        is_scan = (number // 300) % 2 == 1 and rng.random() < 0.7
        contents = chains.fresh(40) if is_scan else contents + chains.fresh(2)
        requests.append((number * 0.5, chains.chain(contents)))
    return requests


def loops(seed: int = 0, num_requests: int = 3000, num_documents: int = 150) -> Requests:
    """More documents than fit, in the same order, each time with a new question."""
    chains = Chains()
    requests: Requests = []
    for number in range(num_requests):
        document = [("document", number % num_documents, part) for part in range(20)]
        requests.append((number * 0.5, chains.chain(document + chains.fresh(1))))
    return requests


def bursts(seed: int = 0, num_requests: int = 3000) -> Requests:
    """Bursts with a common prompt, which comes back after long silences."""
    rng, chains = np.random.default_rng(seed), Chains()
    requests: Requests = []
    start_s = 0.0
    while len(requests) < num_requests:
        prompt = _zipf(rng, 150, 0.5, 1)[0]
        now_s = start_s
        for _ in range(int(rng.integers(2, 12))):
            contents = [("prompt", prompt, part) for part in range(30)]
            requests.append(
                (now_s, chains.chain(contents + chains.fresh(int(rng.integers(1, 12)))))
            )
            now_s += float(rng.exponential(2.0))
        start_s += float(rng.exponential(6.0))
    return _first(requests, num_requests)


def drift(seed: int = 0, num_requests: int = 3000) -> Requests:
    """Documents by Zipf's law. Other ones become popular in time."""
    rng, chains = np.random.default_rng(seed), Chains()
    requests: Requests = []
    ranks = _zipf(rng, 80, 1.0, num_requests)
    for number in range(num_requests):
        document = ranks[number] + number // 60
        contents = [("document", document, part) for part in range(8 + document % 17)]
        requests.append((number * 0.5, chains.chain(contents + chains.fresh(2))))
    return requests


def _sessions(
    seed: int,
    num_requests: int,
    every_s: float,
    gap_s: Callable[[np.random.Generator, float], float],
    end_ratio: float,
    num_prompts: int = 4,
) -> Requests:
    """Sessions whose context grows from turn to turn.

    every_s: mean time between two starts.
    gap_s: time to the next turn, by generator and the session's pace, around 1.
    end_ratio: probability that a turn is the last.
    """
    rng, chains = np.random.default_rng(seed), Chains()
    requests: Requests = []
    start_s = 0.0
    while len(requests) < num_requests:
        start_s += float(rng.exponential(every_s))
        now_s, pace = start_s, float(rng.lognormal(0.0, 0.3))
        prompt = int(rng.integers(0, num_prompts))
        context: list[object] = [("system prompt", prompt, part) for part in range(8)]
        while True:
            context = context + chains.fresh(int(rng.integers(0, 7)))
            requests.append((now_s, chains.chain(context)))
            if rng.random() < end_ratio:
                break
            now_s += gap_s(rng, pace)
    return _first(requests, num_requests)


def regular_turns(seed: int = 0, num_requests: int = 3000) -> Requests:
    """About four agents, whose tools take two seconds."""

    def gap_s(rng: np.random.Generator, pace: float) -> float:
        return 2.0 * float(rng.lognormal(0.0, 0.25))

    return _sessions(seed, num_requests, 12.0, gap_s, 0.04)


def tool_pauses(seed: int = 0, num_requests: int = 3000) -> Requests:
    """Tools take a second, and sometimes minutes."""

    def gap_s(rng: np.random.Generator, pace: float) -> float:
        return pace * float(rng.gamma(8.0, 1 / 8) if rng.random() < 0.85 else rng.gamma(4.0, 30.0))

    return _sessions(seed, num_requests, 8.0, gap_s, 0.06)


def random_ends(seed: int = 0, num_requests: int = 3000) -> Requests:
    """Chats with pauses of 30 s; a quarter of the turns are the last."""
    return _sessions(
        seed, num_requests, 3.0, lambda rng, pace: float(rng.exponential(30.0)), 0.25, 2
    )


def sub_agents(seed: int = 0, num_requests: int = 3000) -> Requests:
    """Agents that start parallel sub-agents with their own context."""
    rng, chains = np.random.default_rng(seed), Chains()
    requests: Requests = []
    start_s = 0.0
    while len(requests) < num_requests:
        start_s += float(rng.exponential(15.0))
        now_s = start_s
        context: list[object] = [("system prompt", int(rng.integers(0, 3)), i) for i in range(10)]
        for _ in range(int(rng.geometric(0.1))):
            context = context + chains.fresh(int(rng.integers(1, 6)))
            requests.append((now_s, chains.chain(context)))
            if rng.random() < 0.2:
                ends_s = now_s
                for _ in range(int(rng.integers(2, 5))):
                    inner, inner_s = context, now_s + float(rng.uniform(0.2, 1.0))
                    for _ in range(int(rng.integers(2, 8))):
                        inner = inner + chains.fresh(int(rng.integers(1, 5)))
                        requests.append((inner_s, chains.chain(inner)))
                        inner_s += float(rng.gamma(6.0, 0.4))
                    ends_s = max(ends_s, inner_s)
                now_s = ends_s
            now_s += float(rng.gamma(6.0, 0.5))
    return _first(requests, num_requests)


def mixture(seed: int = 0, num_requests: int = 3000) -> Requests:
    makers = (agent_sessions, zipf_trees, scans, loops)
    merged: Requests = []
    for part, maker in enumerate(makers):
        requests = maker(seed, num_requests // len(makers))
        scale = 1200.0 / (requests[-1][0] or 1.0)
        for time_s, ids in requests:
            merged.append((time_s * scale, [block * len(makers) + part for block in ids]))
    return sorted(merged, key=lambda request: request[0])


_SOME = (zipf_trees, agent_sessions, mixture, regular_turns, tool_pauses, random_ends)
MAKERS: dict[str, Callable[..., Requests]] = {
    maker.__name__: maker for maker in (*_SOME, scans, loops, bursts, drift, sub_agents)
}


def write_trace(path: Path, requests: Requests) -> Path:
    """As Mooncake's traces."""
    with path.open("w") as file:
        for time_s, ids in requests:
            line = {"timestamp": round(time_s * 1000), "input_length": 512 * len(ids)}
            file.write(json.dumps({**line, "output_length": 1, "hash_ids": ids}) + "\n")
    return path
