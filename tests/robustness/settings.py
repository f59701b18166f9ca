"""Tests that blocks stored under some settings of vLLM are correct under others.

`python -m tests.robustness.settings [--only PATH …] [--json FILE]` starts an engine for each
field of vLLM's config (`tests.vllm.config_walk`) and other values. Its logprobs with hits in the
usual engine's blocks, and without (under a cache salt), must be equal. The tiny Phi-3 with
LongRoPE has keys that depend on more settings than most. A value with which vLLM does not start
counts as refused.
"""

import argparse
import dataclasses
import enum
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from tests.vllm.config_walk import config_objects, other_values
from tests.vllm.processes import PATIENT, Daemon, EngineProcess
from tests.vllm.tiny import COMMON, VOCAB, engine_args, transfer_config

NOISE = 1e-3
"""Largest difference of float32 logprobs between two ways of computing; wrong KV causes far
larger ones."""
PROMPT_TOKENS = 500
ANSWER_TOKENS = 6
PATIENCE_S = 90.0
"""Then an engine counts as refused: it waits for others, such as replicas."""
SETTINGS: dict[str, Any] = {
    "load_format": "random",
    "dtype": "float32",
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 1024,
}
LONGROPE = {
    **COMMON,
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
    "original_max_position_embeddings": 256,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16},
}


@dataclasses.dataclass(slots=True)
class Outcome:
    """hit_tokens: in the usual engine's blocks.
    difference: largest between logprobs with and without hits.
    """

    path: str
    value: Any
    refused: str = ""
    hit_tokens: int = 0
    difference: float = 0.0


def write_longrope(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LONGROPE))
    return folder


def variants(model: Path) -> Iterator[tuple[str, Any]]:
    """(path of a field, other value), for every field of an engine's config objects."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = engine_args(model, **SETTINGS)
    arguments.pop("disable_log_stats")
    arguments["load_format"] = "dummy"
    config = EngineArgs(**arguments, kv_transfer_config=transfer_config()).create_engine_config()
    for path, owner in config_objects(config):
        for field in dataclasses.fields(owner):
            value = getattr(owner, field.name, None)
            others = other_values(type(owner), field.name, value)
            if isinstance(value, int) and not isinstance(value, bool) and value >= 8:
                others.append(value // 4)
            for other in others:
                yield path + field.name, other.name if isinstance(other, enum.Enum) else other


class Restarts:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemon = Daemon(folder / "run").start()
        self.model = write_longrope(folder / "model")
        dice = random.Random(1)
        self.prompt = [dice.randrange(3, VOCAB) for _ in range(PROMPT_TOKENS)]

    def engine(self, **more: Any) -> EngineProcess:
        connector = {"weights_identity": "the same", "startup_wait_s": 20.0}
        log, more = self.folder / "engine.log", {**SETTINGS, "constants": PATIENT, **more}
        return EngineProcess(self.model, log, self.daemon.target, connector=connector, **more)

    def ask(self, engine: EngineProcess, salt: str | None = None) -> dict[str, Any]:
        return engine.ask("generate", prompts=[self.prompt], max_tokens=ANSWER_TOKENS, salt=salt)

    def fill(self) -> int:
        """Stores the prompt's blocks; returns the tokens that a second engine hits."""
        engine = self.engine()
        self.ask(engine)
        engine.ask("wait", connected=True, timeout_s=20.0)
        # A store may end in a later step.
        engine.ask("generate", prompts=[self.prompt[:40]], max_tokens=8, salt="settles")
        engine.stop()
        return self.outcome("", None).hit_tokens

    def outcome(self, path: str, value: Any) -> Outcome:
        engine = self.engine(config_overrides={path: value} if path else {})
        patience = threading.Timer(PATIENCE_S, engine.process.kill)
        patience.start()
        try:
            warm, cold = self.ask(engine), self.ask(engine, salt=uuid.uuid4().hex)
            assert cold["cached"] == [0], cold["cached"]
            difference = np.abs(np.subtract(warm["logprobs"], cold["logprobs"])).max()
            return Outcome(path, value, "", warm["cached"][0], float(difference))
        except AssertionError as error:
            lines = [line for line in str(error).splitlines() if "Error" in line]
            return Outcome(path, value, (lines or [str(error)[:200]])[-1].strip()[-200:])
        finally:
            patience.cancel()
            engine.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="model_config.max_model_len, …")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hotkv-settings-"))
    restarts, outcomes = Restarts(folder), list[Outcome]()
    try:
        same = restarts.fill()
        assert same > PROMPT_TOKENS - 64, f"an engine with the same settings hits {same} tokens"
        for path, value in variants(restarts.model):
            if not chosen.only or path in chosen.only:
                outcomes.append(restarts.outcome(path, value))
                print(outcomes[-1], flush=True)
    finally:
        restarts.daemon.stop()
        shutil.rmtree(folder, ignore_errors=True)
    if chosen.json:
        rows = [dataclasses.asdict(one) for one in outcomes]
        chosen.json.write_text(json.dumps(rows, indent=1, default=str))
    started = [one for one in outcomes if not one.refused]
    shared, wrong = (
        sum(one.hit_tokens > 0 for one in started),
        sum(one.difference > NOISE for one in started),
    )
    print(
        f"{len(outcomes)} values of {len({one.path for one in outcomes})} fields: {len(started)} "
        f"engines started, {shared} shared, {wrong} answered otherwise than their own cold run"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
