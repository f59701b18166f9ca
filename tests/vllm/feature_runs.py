"""Starts engines at one server, and compares answers."""

from pathlib import Path
from typing import Any

from tests.support.waiting import wait_for
from tests.vllm.processes import PATIENT, Daemon, EngineProcess, Engines
from tests.vllm.runs import prompts
from tests.vllm.tiny import BLOCK_TOKENS, write_model

LENGTHS = (100, 257, 500)


class Starter:
    """Each model has its own key space."""

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
        """model: a folder, or the kind of tiny model to write."""
        if isinstance(model, str):
            model = write_model(self.folder / model, model)
        defaults: dict[str, Any] = {
            "load_format": "random",
            "dtype": "float32",
            "kv_cache_memory_bytes": 64 << 20,
            "max_model_len": 1024,
            "constants": PATIENT,
            "skip_tokenizer_init": not (model / "tokenizer.json").exists(),
        }
        ours = {"weights_identity": str(model), "startup_wait_s": 20.0}
        ours |= ({} if sparse is None else {"sparse": sparse}) | (connector or {})
        return self._engines.start(
            model, self._daemon.target, connector=ours, **defaults | settings
        )

    def stop(self) -> None:
        self._engines.stop()


def requests(seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, Any]]:
    return [{"tokens": tokens} for tokens in prompts(seed, lengths)]


def pooled(engine: EngineProcess, operation: str, batch: list[dict[str, Any]]) -> dict[str, Any]:
    """Ends when all stores are reported."""
    answer = engine.ask(operation, requests=batch)

    def has_stored() -> bool:
        engine.ask(operation, requests=requests(38, (5,)))
        stored = engine.ask("stats")["totals"].get("stored_blocks", 0)
        return bool(stored >= sum(length // BLOCK_TOKENS for length in LENGTHS))

    wait_for(has_stored, "the stores")
    return answer


def clean(engine: EngineProcess) -> bool:
    """No failed load, exception, refused block or short grant."""
    troubles = {"failed_loads", "callback_errors", "refused_blocks", "short_grants"}
    return not troubles & engine.ask("stats")["totals"].keys()
