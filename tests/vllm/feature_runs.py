"""Engines with a feature of vLLM, with and without hotkv."""

from pathlib import Path
from typing import Any

from tests.vllm.processes import Daemon, EngineProcess, Engines
from tests.vllm.runs import difference, prompts

TOLERANCE = 1e-4
LENGTHS = (100, 257, 500)


class Starter:
    """Starts engines of one server, each model in a key space of its own."""

    def __init__(self, daemon: Daemon, folder: Path) -> None:
        self.folder, self._daemon = folder, daemon
        self._engines = Engines(folder)

    def __call__(
        self, model: Path, *, sparse: dict[str, Any] | None = None, **settings: Any
    ) -> EngineProcess:
        settings = {
            "load_format": "random",
            "dtype": "float32",
            "kv_cache_memory_bytes": 64 << 20,
            "max_model_len": 1024,
        } | settings
        settings |= {"skip_tokenizer_init": not (model / "tokenizer.json").exists()}
        connector = {"weights_identity": str(model), "flush_timeout_s": 5.0, "startup_wait_s": 20.0}
        connector |= {} if sparse is None else {"sparse": sparse}
        return self._engines.start(
            model, self._daemon.target, connector=connector, driver="feature_driver.py", **settings
        )

    def stop(self) -> None:
        self._engines.stop()


def requests(seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, Any]]:
    return [{"tokens": tokens} for tokens in prompts(seed, lengths)]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["tokens"] == other["tokens"] and difference(one, other) < TOLERANCE
