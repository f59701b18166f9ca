"""Starts engines of one server and compares their answers."""

from pathlib import Path
from typing import Any

from tests.vllm.processes import Daemon, EngineProcess, Engines
from tests.vllm.runs import difference, prompts
from tests.vllm.tiny import write_model

TOLERANCE = 1e-4
LENGTHS = (100, 257, 500)


class Starter:
    """Starts engines of one server, each model in its own key space."""

    def __init__(self, daemon: Daemon, folder: Path) -> None:
        self.folder, self._daemon = folder, daemon
        self._engines = Engines(folder)

    def __call__(
        self,
        model: Path | str,
        *,
        sparse: dict[str, Any] | None = None,
        connector: dict[str, Any] | None = None,
        **settings: Any,
    ) -> EngineProcess:
        """Starts an engine. `model`: its folder, or a kind of model to write."""
        if isinstance(model, str):
            model = write_model(self.folder / model, model)
        defaults: dict[str, Any] = {
            "load_format": "random",
            "dtype": "float32",
            "kv_cache_memory_bytes": 64 << 20,
            "max_model_len": 1024,
            "skip_tokenizer_init": not (model / "tokenizer.json").exists(),
        }
        ours = {"weights_identity": str(model), "flush_timeout_s": 5.0, "startup_wait_s": 20.0}
        ours |= ({} if sparse is None else {"sparse": sparse}) | (connector or {})
        return self._engines.start(
            model, self._daemon.target, connector=ours, **defaults | settings
        )

    def stop(self) -> None:
        self._engines.stop()


def requests(seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, Any]]:
    return [{"tokens": tokens} for tokens in prompts(seed, lengths)]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["tokens"] == other["tokens"] and difference(one, other) < TOLERANCE


def clean(engine: EngineProcess) -> bool:
    """Returns True if the connector reports no failure."""
    troubles = {"failed_loads", "hook_errors", "refused_blocks", "short_grants"}
    return not troubles & engine.ask("stats")["totals"].keys()
