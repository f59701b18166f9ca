"""Measures what the weights' identity costs: seconds to read a GiB, and an engine's start.

vLLM starts on a random Llama of 2 GiB, three cases in turn:

- `named`: the user names the weights (`hotkv.weights_identity`); nothing is read.
- `kept`: an earlier start kept the files' digests.
- `unread`: none is kept; all files are read beside vLLM's own loading.

Prints a table; `--json` prints a JSON object last:

- `digest_s_per_gib`: of a GiB in the page cache.
- `kept_over_named`, `unread_over_named`: a start, from process to first token, divided by that
  of `named`; medians.
"""

import shutil
import sys
import time
from pathlib import Path

from bench.report import at_most, median, parser, print_figures, say
from bench.servers import GIB
from demo.processes import Engine, EngineSettings, Server, ends_cleanly, runtime_folder
from demo.random_llama import Shape, write_model
from hotkv_client.admin import AdminClient
from hotkv_vllm import file_digests

BOUNDS = {
    "digest_s_per_gib": at_most(1.5),
    "kept_over_named": at_most(1.03),
    "unread_over_named": at_most(1.1),
}
SHAPE = Shape(16, 2048, 5632, 32, 4, 64, 32000, "bfloat16")
MAX_TOKENS = 512
ARENA_BYTES = GIB // 4
PROMPT = tuple(range(100, 164))


def digest_s_per_gib(file: Path) -> float:
    best = float("inf")
    for _ in range(3):
        file_digests._known.clear()
        begin = time.perf_counter()
        file_digests.file_digest(file, None, 0.0)
        best = min(best, time.perf_counter() - begin)
    return best / (file.stat().st_size / GIB)


def start_s(model: Path, server: Server, folder: Path, name: str, cache: Path) -> float:
    """Of an engine, to the end of a prompt."""
    named = {"hotkv.weights_identity": "bench"} if name == "named" else {}
    settings = EngineSettings(
        str(model),
        server.target,
        extra_config=named,
        engine_args={"max_model_len": MAX_TOKENS, "skip_tokenizer_init": True},
        environment={"VLLM_CACHE_ROOT": str(cache)},
    )
    begin = time.perf_counter()
    with Engine(name, settings, folder) as engine:
        engine.wait_ready()
        engine.generate(PROMPT, max_tokens=1)
        return time.perf_counter() - begin


def main() -> int:
    flags = parser("Cost of the weights' identity.")
    flags.add_argument("--rounds", type=int, default=3)
    options = flags.parse_args()
    seconds: dict[str, list[float]] = {"named": [], "kept": [], "unread": []}
    with ends_cleanly(), runtime_folder(ARENA_BYTES + GIB // 2) as folder:
        # Digests of files just written are not kept.
        model = write_model(Path.cwd() / "results" / "weights", MAX_TOKENS, SHAPE)
        file = model / "model.safetensors"
        per_gib = digest_s_per_gib(file)
        while time.time() < file.stat().st_ctime + file_digests.RACY_S + 1:
            time.sleep(1)
        with Server(folder, str(ARENA_BYTES)) as server:
            server.wait_ready()
            say("a start that is not counted keeps the digests")
            cache = folder / "cache"
            start_s(model, server, folder, "kept", cache)
            for _ in range(options.rounds):
                for name in seconds:
                    if name == "unread":
                        shutil.rmtree(cache / "hotkv")
                    seconds[name].append(start_s(model, server, folder, name, cache))
                    say(f"{name}: {seconds[name][-1]:.1f} s")
            with AdminClient(server.target) as admin:
                spaces = {row["key_space"]["weights_identity"] for row in admin.key_spaces()}
    figures: dict[str, object] = {"digest_s_per_gib": per_gib}
    for name in ("kept", "unread"):
        ratios = [one / other for one, other in zip(seconds[name], seconds["named"], strict=True)]
        figures[f"{name}_over_named"] = median(ratios)
    assert len(spaces) == 2, "the engines of `kept` and `unread` share one key space"
    print_figures(figures, BOUNDS, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
