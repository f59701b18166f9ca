"""A vLLM engine in a child process whose steps are timed and whose pool is watched, as is what the
server pins for it."""

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
"""First steps of a decode, which complete its hot sets."""
POLL_S = 0.2
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that ran together. `first_s`: of each, wall and processor seconds to its first
    token. `steps`: wall seconds, processor seconds and tokens of each step from the first token
    on. `most_held`: blocks of the pool at most. `pinned_bytes`: of the arena, at most."""

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
        """Returns the median of the decode steps; `clock` 0: the wall's, 1: of processor time."""
        ends = [step[clock] for step in self.steps[SETTLING_STEPS:]]
        return median([after - before for before, after in pairwise(ends)])

    def decode_rate(self, clock: int) -> float:
        """Tokens a second, by the median of the steps that decode as many requests as any step."""
        pairs = [(after[clock] - before[clock], after[2]) for before, after in pairwise(self.steps)]
        most = max(tokens for _, tokens in pairs)
        return most / median([took_s for took_s, tokens in pairs if tokens == most])

    @property
    def prefill_cpu_s(self) -> float:
        """Returns the processor seconds to the first token of a single request, the server's
        included."""
        return self.first_s[0][1] + self.server_cpu_s

    def counter(self, name: str) -> float:
        """Returns the growth of one of the connector's counters."""
        return self.counters.get(name, 0.0)


class Watched(Engine):
    """An engine whose steps are timed. `server`: the one that it uses, if any."""

    MODULE = "demo.watched_process"

    def __init__(
        self, name: str, settings: EngineSettings, folder: Path, server: Server | None = None
    ) -> None:
        super().__init__(name, settings, folder)
        self._server = server

    def batch(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Batch:
        """Runs requests together. Raises ChildError if one ends with an error."""
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
        """Attends to everything from now on, or sparsely again."""
        self.ask({"op": "mode", "dense": is_dense})

    def forget(self) -> None:
        """Empties vLLM's own prefix cache."""
        self.ask({"op": "reset"})

    def device_blocks(self, num_tokens: int) -> int:
        """Blocks that a request of so many tokens holds at most, by the engine's arithmetic."""
        return int(self.ask({"op": "device_blocks", "num_tokens": num_tokens})["blocks"])

    def memory(self) -> dict[str, float]:
        """Bytes beside the pool: staging area and rows of representations."""
        return {name: float(value) for name, value in self.ask({"op": "memory"}).items()}


class _Pinned:
    """Watches how much of the arena residencies pin, in a thread of its own."""

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
    """Returns the processor seconds of a process so far."""
    # After the name in brackets: state, then ten numbers, user and system time.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S
