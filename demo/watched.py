"""A vLLM engine in a child process with timed steps, its most blocks in use, and the most memory
pinned for it."""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from demo.processes import Engine, EngineSettings, Server
from hotkv_client.admin import AdminClient
from hotkv_proto.errors import HotKVError

SETTLING_STEPS = 4
"""Steps that are not timed: the hot sets still fill."""
POLL_S = 0.2
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Batch:
    """Of requests that ran together.

    first_s: per request, wall and processor seconds to its first token.
    steps: since the first token: wall and processor seconds from the batch's start to the step's
        end, and tokens of the step.
    most_held: the pool's blocks in use.
    pinned_bytes: at most, of the arena.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    cached: list[int]
    ended: list[str]
    first_s: list[tuple[float, float]]
    steps: list[tuple[float, float, int]]
    most_held: int
    most_decoding: int
    counters: dict[str, float]
    server_cpu_s: float
    pinned_bytes: float

    def step_s(self, clock: int) -> float:
        """Median. `clock`: 0 wall, 1 processor."""
        ends = [step[clock] for step in self.steps[SETTLING_STEPS:]]
        return median([after - before for before, after in pairwise(ends)])

    def decode_rate(self, clock: int) -> float:
        """Tokens per second of steps that decode the most requests, by their median. `clock`: 0
        wall, 1 processor."""
        pairs = [(after[clock] - before[clock], after[2]) for before, after in pairwise(self.steps)]
        most = max(tokens for _, tokens in pairs)
        return most / median([took_s for took_s, tokens in pairs if tokens == most])

    @property
    def prefill_cpu_s(self) -> float:
        """Of a single request: the engine's until the first token, and the server's during the
        batch."""
        return self.first_s[0][1] + self.server_cpu_s

    def counter(self, name: str) -> float:
        """Growth during the batch. Raises KeyError if there is none."""
        return self.counters[name]


class Watched(Engine):
    """`server`: the one that it uses, if any."""

    MODULE = "demo.watched_process"

    def __init__(
        self, name: str, settings: EngineSettings, folder: Path, server: Server | None = None
    ) -> None:
        super().__init__(name, settings, folder)
        self._server = server

    def batch(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Batch:
        """Raises ChildError if a request ends with an error."""
        server = self._server
        cpu_s = 0.0 if server is None else processor_s(server.pid)
        with _Pinned(server) as pinned:
            reply = self.ask({"op": "batch", "prompts": prompts, "max_tokens": max_tokens})
        took_s = 0.0 if server is None else processor_s(server.pid) - cpu_s
        found = Batch(**reply, server_cpu_s=took_s, pinned_bytes=pinned.most_bytes)
        if "error" in found.ended:
            raise self._child.error("a request ended with an error")
        return found

    def dense(self, is_dense: bool) -> None:
        """Switches to dense attention, or back to sparse."""
        self.ask({"op": "mode", "dense": is_dense})

    def forget(self) -> None:
        """Empties vLLM's own prefix cache."""
        self.ask({"op": "reset"})

    def device_blocks(self, num_tokens: int) -> int:
        """At most for a request, as vLLM's block manager computes it."""
        return int(self.ask({"op": "device_blocks", "num_tokens": num_tokens})["blocks"])

    def memory(self) -> dict[str, float]:
        """Bytes besides the pool: staging, and rows of sketches."""
        return {name: float(value) for name, value in self.ask({"op": "memory"}).items()}


class _Pinned:
    """Polls the server on a thread for the most bytes pinned by residencies."""

    def __init__(self, server: Server | None) -> None:
        self._server = server
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.most_bytes = 0.0

    def __enter__(self) -> "_Pinned":
        if self._server is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._server is not None:
            self._thread.join()

    def _watch(self) -> None:
        assert self._server is not None
        with AdminClient(self._server.target, 10.0) as admin:
            while not self._done.wait(POLL_S):
                try:
                    pinned = float(admin.info()["counters"]["residency_pinned_bytes"])
                except HotKVError:
                    continue
                self.most_bytes = max(self.most_bytes, pinned)


def processor_s(pid: int) -> float:
    # State, ten numbers, user and system time follow the name in brackets.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S
