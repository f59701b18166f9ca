"""The demo of contexts beyond device memory: a request whose KV is eight times the device's pool.

vLLM alone refuses to start with so small a pool. With `"residency": "host"` it is enough: the
server keeps the KV, the device holds sinks, recent window and hot slots. A second, equal request
hits in host memory. At the end no process and no file is left.

The model is a random Llama of 4 layers: a real one would take a CPU hours. Its words mean
nothing; memory, copies and times are real.
"""

import contextlib
import random
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from demo import random_llama
from demo.processes import (
    ChildError,
    Engine,
    EngineSettings,
    Server,
    ends_cleanly,
    runtime_folder,
)
from demo.progress import step
from demo.watched import Batch, Watched
from hotkv_client.admin import AdminClient
from hotkv_client.command.tables import human_bytes
from hotkv_proto.errors import HotKVError

CONTEXT_TOKENS = 65_536
POOL_TOKENS = 8_192
ANSWER_TOKENS = 64
BLOCK_TOKENS = 32
CHUNK_TOKENS = 1024
ARENA, ARENA_BYTES = "512MiB", 512 << 20
BLOCK_BYTES = BLOCK_TOKENS * random_llama.KV_TOKEN_BYTES
PAGE_BYTES = BLOCK_BYTES // random_llama.LAYERS
PROGRESS_S = 15.0
REFUSAL = re.compile(r"ValueError: (To serve at least one request.*)")
OPTION = '"hotkv.sparse": {"residency": "host", "sparse_topk": 1024}'


def settings(model: Path, server: Server | None) -> EngineSettings:
    """Equal memory for KV with and without a server."""
    arguments = {
        "block_size": BLOCK_TOKENS,
        "dtype": "float32",
        "max_model_len": CONTEXT_TOKENS,
        "max_num_batched_tokens": CHUNK_TOKENS,
        "max_num_seqs": 1,
        "kv_cache_memory_bytes": POOL_TOKENS * random_llama.KV_TOKEN_BYTES,
        "skip_tokenizer_init": True,
    }
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    sparse = {"residency": "host", "sparse_topk": 1024, "min_context_tokens": 1024}
    return EngineSettings(
        str(model),
        "" if server is None else server.target,
        {} if server is None else {"hotkv.sparse": sparse},
        engine_args=arguments,
        environment=environment,
    )


def refusal(model: Path, folder: Path) -> str:
    """vLLM's error. Raises ChildError if vLLM starts, or ends for another reason."""
    with Engine("vLLM alone", settings(model, None), folder) as engine:
        try:
            engine.wait_ready()
        except ChildError:
            found = REFUSAL.search(engine.log.read_text(errors="replace"))
            if found is None:
                raise
            return found[1]
        raise ChildError("vLLM alone started with a pool that is too small for its context")


@contextlib.contextmanager
def progress(server: Server, what: str) -> Iterator[None]:
    """Every few seconds: bytes that the server keeps."""
    done, first = threading.Event(), "\n" if sys.stdout.isatty() else ""

    def watch() -> None:
        with AdminClient(server.target, 10.0) as admin:
            while not done.wait(PROGRESS_S):
                with contextlib.suppress(HotKVError):
                    pinned = float(admin.info()["counters"]["residency_pinned_bytes"])
                    print(f"{first}          {what}: kept {human_bytes(pinned)}", flush=True)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def table(computed: Batch, again: Batch) -> str:
    both = (computed, again)

    def pages(batch: Batch, name: str) -> str:
        return human_bytes(batch.counter(name) * PAGE_BYTES)

    rows = [
        ("", "computed", "asked again"),
        ("tokens found in host memory", *(str(batch.cached[0]) for batch in both)),
        (
            "KV cache of the request",
            *[human_bytes(CONTEXT_TOKENS // BLOCK_TOKENS * BLOCK_BYTES)] * 2,
        ),
        ("held on the device, at most", *(human_bytes(b.most_held * BLOCK_BYTES) for b in both)),
        ("kept in host memory", *(human_bytes(batch.pinned_bytes) for batch in both)),
        ("loaded into the device's pool", *(human_bytes(b.counter("load_bytes")) for b in both)),
        ("staged for prefill, layer by layer", *(pages(b, "resident_staged_pages") for b in both)),
        ("pulled into hot slots by decode", *(pages(b, "resident_pulled_pages") for b in both)),
        ("preemptions", *(f"{batch.counter('preemptions'):.0f}" for batch in both)),
        ("time to first token", *(f"{batch.first_s[0][0]:.2f} s" for batch in both)),
        ("a decode step, median", *(f"{1e3 * batch.step_s(0):.1f} ms" for batch in both)),
    ]
    return "\n".join(f"  {name:<36}{one:>14}{other:>14}" for name, one, other in rows)


def run(folder: Path) -> int:
    """Exit status: 0 if both were answered without preemption."""
    model = random_llama.write_model(folder / "model", CONTEXT_TOKENS)
    pool = human_bytes(POOL_TOKENS * random_llama.KV_TOKEN_BYTES)
    print(f"a request of {CONTEXT_TOKENS} tokens; the device has {pool} for keys and values\n")
    with step("vLLM alone: starting"):
        refused = refusal(model, folder)
    print(f"          refused: {refused}\n")
    prompt = random.Random(1).choices(
        range(3, random_llama.VOCAB), k=CONTEXT_TOKENS - ANSWER_TOKENS
    )
    with Server(folder, ARENA) as server:
        with step(f"hotkv-server: starting with {ARENA}"):
            server.wait_ready(300.0)
        with Watched("engine", settings(model, server), folder, server) as engine:
            with step(f"vLLM with {OPTION}: starting"):
                engine.wait_ready()
            held = engine.device_blocks(CONTEXT_TOKENS)
            pool_blocks = POOL_TOKENS // BLOCK_TOKENS
            print(
                f"          a request holds {held} of {pool_blocks} blocks, and what is not stored "
                "yet"
            )
            with progress(server, "computing"), step(f"computing {len(prompt)} tokens"):
                computed = engine.batch([prompt], ANSWER_TOKENS)
            with step("the same again"):
                again = engine.batch([prompt], ANSWER_TOKENS)
        version = engine.vllm_version
    print(f"\nvLLM {version} on CPU, random Llama of 4 layers\n{table(computed, again)}\n")
    preempted = computed.counter("preemptions") + again.counter("preemptions")
    return 0 if not preempted and again.cached[0] else 1


def main() -> int:
    try:
        with ends_cleanly(), runtime_folder(2 * ARENA_BYTES) as folder:
            code = run(folder)
        print("engine and server have ended; nothing is left running")
        return code
    except KeyboardInterrupt:
        print("\nstopped; nothing is left running")
        return 130
    except ChildError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
