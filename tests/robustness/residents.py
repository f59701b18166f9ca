"""The chaos campaign of residency: engines with contexts beyond the device share a server with a
dense engine, while the server is killed, stopped and flushed, prefix caches are reset, and requests
are aborted.

Checked in every round:
- The dense engine's tokens are those of an engine without a server: it never got KV of sparse
  steps, wrong bytes or another prompt's.
- A resident engine's first token is the dense one, since prompts are computed exactly; of a context
  that its budget covers, all are.
- Every request ends: with all its tokens, or, only after a fault, with an error.
At the end nothing is left: no sequence in the engines, no residency in the server.

`python -m tests.robustness.residents --requests 2000 --seed 7 [--kinds auto windows ...]` prints a
table. A seed decides all but the timing.
"""

import argparse
import collections
import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.offloading.engines import door_config, multi
from tests.support.waiting import wait_for
from tests.vllm.adapters import LORA, adapter, write_adapter
from tests.vllm.processes import Daemon, Engines
from tests.vllm.runs import NGRAM
from tests.vllm.tiny import VOCAB, transfer_config, write_model

BUDGET = 512
LONGEST = 8192
NOISE = 2e-3
"""Of a first token's log probability; batches differ."""
SPARSE: dict[str, Any] = {
    "sparse_topk": BUDGET,
    "min_context_tokens": BUDGET,
    "sink_tokens": 32,
    "recent_tokens": 64,
    "dense_layers": [],
}
LLAMA = {"hf_overrides": {"num_hidden_layers": 3, "max_position_embeddings": LONGEST}}
WINDOWS = {"hf_overrides": {"max_position_embeddings": LONGEST}}


@dataclass(frozen=True, slots=True)
class Kind:
    """all: settings of the three engines.
    resident: further ones of the resident engine.
    shares: the dense engine has hotkv's other connector too, in a MultiConnector.
    """

    model: str = "llama"
    residency: str = "auto"
    all: dict[str, Any] = field(default_factory=lambda: LLAMA)
    resident: dict[str, Any] = field(default_factory=dict)
    shares: bool = False


KINDS = {
    "host": Kind(residency="host"),
    "auto": Kind(),
    "async": Kind(resident={"async_scheduling": True}),
    "windows": Kind("gemma3", all=WINDOWS),
    "drafts": Kind(residency="host", resident={"speculative_config": NGRAM}),
    "fp8": Kind(all=LLAMA | {"kv_cache_dtype": "fp8_e4m3"}),
    "adapters": Kind(all=LORA | {"hf_overrides": {"max_position_embeddings": LONGEST}}),
    "doors": Kind(shares=True),
}
FAULTS = ("none", "none", "none", "kill", "stop", "flush", "reset", "abort", "abort")
POOL_BLOCKS = 150
"""4,800 tokens: less than one of the longest contexts."""


@dataclass(slots=True)
class Findings:
    """`wrong` must stay empty."""

    counted: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)


class Campaign:
    def __init__(self, folder: Path, kind: str, dice: random.Random) -> None:
        chosen = KINDS[kind]
        self.kind, self.dice, self.found = kind, dice, Findings()
        (folder / "server").mkdir(parents=True)
        self.daemon = Daemon(folder / "server", arena="192MiB").start()
        self.engines = Engines(folder)
        path = write_model(folder / "model", chosen.model)
        self.adapters: list[dict[str, Any] | None] = [None]
        if "enable_lora" in chosen.all:
            # On CPUs vLLM's tokens without an adapter depend on who else is in the batch.
            self.adapters = [
                adapter(write_adapter(folder / name, seed)) for seed, name in enumerate("ab")
            ]
        settings: dict[str, Any] = {
            "load_format": "random",
            "dtype": "float32",
            "max_model_len": LONGEST,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 6,
            "kv_cache_memory_bytes": 96 << 20,
            "driver": "sparse_driver.py",
        } | chosen.all
        connector = {"weights_identity": "chaos", "residency_timeout_s": 20.0}
        self.alone = self.engines.start(path, None, **settings)
        dense = transfer_config(target=self.daemon.target, weights_identity="chaos")
        if chosen.shares:
            door = door_config(self.daemon.target, **{"hotkv.weights_identity": "chaos"})
            dense = multi([dense, door])
        self.dense = self.engines.start(path, None, kv_transfer_config=dense, **settings)
        self.resident = self.engines.start(
            path,
            self.daemon.target,
            connector=connector | {"sparse": SPARSE | {"residency": chosen.residency}},
            **settings | {"num_gpu_blocks_override": POOL_BLOCKS} | chosen.resident,
        )
        for one in (self.dense, self.resident):
            one.ask("wait", connected=True, timeout_s=120.0)
        self.texts = [self._tokens(LONGEST) for _ in range(4)]

    def _tokens(self, count: int) -> list[int]:
        return [self.dice.randrange(3, VOCAB) for _ in range(count)]

    # ------------------------------------------------------------------------------------ a round

    def round(self, most: int) -> None:
        requests = [self._request() for _ in range(self.dice.randint(1, min(5, most)))]
        fault = self.dice.choice(FAULTS)
        aborts = (
            {
                str(n): self.dice.randint(1, 40)
                for n in range(len(requests))
                if self.dice.random() < 0.5
            }
            if fault == "abort"
            else {}
        )
        self.resident.begin("answer_some", requests=requests, aborts=aborts)
        time.sleep(self.dice.random() * 1.5)
        self._harm(fault)
        answers = self.resident.answer()["answers"]
        wanted = self.alone.ask("answer_some", requests=requests, aborts={})["answers"]
        dense = self.dense.ask("answer_some", requests=requests, aborts={})["answers"]
        self.found.counted[fault] += 1
        for number, request in enumerate(requests):
            self.found.counted["requests"] += 1
            is_aborted = str(number) in aborts
            self._check(fault, is_aborted, request, answers[number], wanted[number])
            if dense[number]["tokens"] != wanted[number]["tokens"]:
                self._wrong(f"{fault}: the dense engine's tokens differ", request)
            self.found.counted["hit_tokens"] += answers[number]["cached"]
            self.found.counted["dense_hit_tokens"] += dense[number]["cached"]
            if self.dice.random() < 0.3 and len(request["tokens"]) < LONGEST // 2:
                # The next turn of an agent.
                turn = [*request["tokens"], *wanted[number]["tokens"], *self._tokens(20)]
                self.texts[self.dice.randrange(len(self.texts))][: len(turn)] = turn

    def _request(self) -> dict[str, Any]:
        """Prompts share prefixes of a few texts."""
        most = self.dice.choice((200, 400, 900, 2500, 4500, 7000))
        shared = self.dice.randint(1, most)
        prompt = [*self.dice.choice(self.texts)[:shared], *self._tokens(self.dice.randint(1, 80))]
        made = {"tokens": prompt, "max_tokens": self.dice.choice((1, 8, 40, 120))}
        return made | {"adapter": self.dice.choice(self.adapters)}

    def _harm(self, fault: str) -> None:
        if fault == "kill":
            self.daemon.kill()
            time.sleep(self.dice.random())
            self.daemon.start()
        elif fault == "stop":
            os.kill(self.daemon.pid, signal.SIGSTOP)
            threading.Timer(
                self.dice.random() * 3, os.kill, (self.daemon.pid, signal.SIGCONT)
            ).start()
        elif fault == "flush":
            for space in self.daemon.admin("key_spaces"):
                self.daemon.admin("flush", key_space_id=space["key_space_id"])
        elif fault == "reset":
            self.dense.ask("reset", connector=self.dice.random() < 0.5)

    def _check(
        self,
        fault: str,
        is_aborted: bool,
        request: dict[str, Any],
        answer: dict[str, Any],
        wanted: dict[str, Any],
    ) -> None:
        count = len(answer["tokens"])
        if is_aborted:
            self.found.counted["aborted"] += 1
        elif answer["ended"] == "error":
            self.found.counted["failed"] += 1
            if fault not in ("kill", "stop"):
                self._wrong(f"{fault}: a request failed without a fault", request)
        elif count != request["max_tokens"]:
            self._wrong(f"{fault}: {count} tokens, ended by {answer['ended']}", request)
        is_covered = len(request["tokens"]) + request["max_tokens"] <= BUDGET
        compared = count if is_covered else min(count, 1)
        if answer["tokens"][:compared] != wanted["tokens"][:compared]:
            self._wrong(f"{fault}: the resident engine's tokens differ", request)
        elif compared and abs(answer["logprobs"][0] - wanted["logprobs"][0]) > NOISE:
            self._wrong(f"{fault}: the first token's log probability differs", request)
        self.found.counted["covered"] += is_covered

    def _wrong(self, what: str, request: dict[str, Any]) -> None:
        about = f"{len(request['tokens'])} tokens, {request['max_tokens']} more"
        self.found.wrong.append(f"{self.kind}: {what} ({about})")
        print(self.found.wrong[-1], flush=True)

    # -------------------------------------------------------------------------------------- the end

    def finish(self) -> Findings:
        self.resident.ask("wait", connected=True, timeout_s=120.0)
        for _ in range(2):
            self.resident.ask("generate", prompts=[[5, 6, 7]], max_tokens=2)
        counted = self.resident.ask("stats")["totals"]
        for name in ("moved", "lost", "parked", "failed"):
            self.found.counted[f"{name}_residencies"] += int(counted.get(f"{name}_residencies", 0))
        if counted.get("callback_errors"):
            self.found.wrong.append(f"{self.kind}: {counted['callback_errors']} callback errors")
        if self.resident.ask("sparse")["sequences"]:
            self.found.wrong.append(f"{self.kind}: sequences are left in the engine")

        def is_empty() -> bool:
            return not self.daemon.admin("residencies")["residencies"]

        try:
            wait_for(is_empty, "the end of all residencies")
        except AssertionError:
            self.found.wrong.append(f"{self.kind}: residencies are left in the server")
        return self.found

    def stop(self) -> None:
        self.engines.stop()
        self.daemon.stop()


def run(kind: str, requests: int, seed: int, folder: Path) -> Findings:
    campaign = Campaign(folder / kind, kind, random.Random(f"{kind}{seed}"))
    try:
        while campaign.found.counted["requests"] < requests:
            campaign.round(requests - campaign.found.counted["requests"])
            print(f"{kind}: {campaign.found.counted['requests']} of {requests}", flush=True)
        return campaign.finish()
    finally:
        campaign.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description="The chaos campaign of residency.")
    parser.add_argument("--requests", type=int, default=2000, help="in all kinds together")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    chosen = parser.parse_args()
    wrong = []
    for kind in chosen.kinds:
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found = run(kind, -(-chosen.requests // len(chosen.kinds)), chosen.seed, Path(folder))
        figures = ", ".join(f"{name} {number}" for name, number in sorted(found.counted.items()))
        print(
            f"{kind}: wrong {len(found.wrong)}, {time.monotonic() - began_s:.0f} s, {figures}",
            flush=True,
        )
        wrong += found.wrong
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
