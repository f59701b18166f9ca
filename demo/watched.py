"""Runs a vLLM engine in a child process and times its steps. Records the largest number of blocks
of its pool in use, and the most memory that the server pinned for it."""

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
"""Number of first decode steps that are not timed, because the hot sets (blocks to attend to) fill
in them."""
POLL_S = 0.2
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Batch:
    """The results of requests that ran together.

    first_s: for each request, wall and processor seconds to its first token.
    steps: for each step since the first token, wall and processor seconds from the start of the
        batch to the end of the step, and the tokens of the step.
    most_held: the largest number of blocks of the pool in use.
    pinned_bytes: the most pinned bytes of the arena.
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
        """Returns the median time of a decode step, in seconds. `clock`: 0 for wall time, 1 for
        processor time."""
        ends = [step[clock] for step in self.steps[SETTLING_STEPS:]]
        return median([after - before for before, after in pairwise(ends)])

    def decode_rate(self, clock: int) -> float:
        """Returns the tokens per second of the steps that decode the most requests, computed from
        their median time. `clock`: 0 for wall time, 1 for processor time."""
        pairs = [(after[clock] - before[clock], after[2]) for before, after in pairwise(self.steps)]
        most = max(tokens for _, tokens in pairs)
        return most / median([took_s for took_s, tokens in pairs if tokens == most])

    @property
    def prefill_cpu_s(self) -> float:
        """Returns, for a batch with a single request, the sum of two times: the engine's processor
        seconds until the first token, and the server's processor seconds during the batch."""
        return self.first_s[0][1] + self.server_cpu_s

    def counter(self, name: str) -> float:
        """Returns how much one of the connector's counters grew during the batch. Raises KeyError
        if there is no counter of this name."""
        return self.counters[name]


class Watched(Engine):
    """An engine whose steps are timed. `server`: the server that it uses, if any."""

    MODULE = "demo.watched_process"

    def __init__(
        self, name: str, settings: EngineSettings, folder: Path, server: Server | None = None
    ) -> None:
        super().__init__(name, settings, folder)
        self._server = server

    def batch(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Batch:
        """Runs requests together and returns the results. Raises ChildError if a request ends with
        an error."""
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
        """Switches the engine to dense attention, or back to sparse attention."""
        self.ask({"op": "mode", "dense": is_dense})

    def forget(self) -> None:
        """Empties vLLM's own prefix cache."""
        self.ask({"op": "reset"})

    def device_blocks(self, num_tokens: int) -> int:
        """Returns the largest number of device blocks that a request of `num_tokens` may use, as
        vLLM's block manager computes it."""
        return int(self.ask({"op": "device_blocks", "num_tokens": num_tokens})["blocks"])

    def memory(self) -> dict[str, float]:
        """Returns the bytes of the engine's memory besides the pool: the staging area (into which
        whole layers are copied), and the rows of sketches (compact forms of blocks'
        keys)."""
        return {name: float(value) for name, value in self.ask({"op": "memory"}).items()}


class _Pinned:
    """Polls the server on a thread, and records the largest number of arena bytes pinned by
    residencies (contexts that live in host memory)."""

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
    # In /proc/PID/stat, the process's name in brackets is followed by the state, ten numbers, and
    # the user and system time.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S
