"""What a hit of 32k tokens moves on a model with windows of 1024 tokens in five of six layers, over
what it moves with full layers only.

`python -m bench.hybrid [--json]`. One engine stores a prompt in a running server, another finds it
and plans its load as the connector does (`hotkv_vllm.scheduler.hits.HitFinder`), and the server
copies it. Bytes are those that the server says it has moved; every one is compared.
`hybrid_load_ratio`: the target is 0.20 at most.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bench.report import median, parser, print_report
from demo.processes import Server, ends_cleanly, runtime_folder
from hotkv.groups import needed_blocks
from hotkv_client import BlockResult, BlockRun, Role, Session, SessionConfig, TransferStatus
from hotkv_client.testing import PagedEngine
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.scheduler.groups import CachedGroups
from hotkv_vllm.scheduler.hits import HitFinder
from hotkv_vllm.scheduler.request import RequestState, StoreState
from hotkv_vllm.stats import HotKVStats

HIT_TOKENS = 32 << 10
BLOCK_TOKENS = 16
BLOCKS = HIT_TOKENS // BLOCK_TOKENS
LAYERS_PER_GROUP = 2
PAGE_BYTES = 4096
WINDOW = 1024
MODELS = {"windows in 5 of 6 layers": (0, *[WINDOW] * 5), "all layers full": (0,) * 6}
ARENA = "1GiB"
ARENA_BYTES = 1 << 30
ROUNDS = 5
TARGET = 0.20
WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the connector reads of a request."""

    request_id: str
    block_hashes: Sequence[bytes]
    num_tokens: int = HIT_TOKENS + 1


@dataclass(slots=True)
class Moved:
    """Loads of one model."""

    num_bytes: int = 0
    seconds: list[float] = field(default_factory=list)


def engine(target: str, model: str, name: str) -> PagedEngine:
    """An engine that holds the prompt once in every group; block 0 is vLLM's null block."""
    windows = MODELS[model]
    return PagedEngine(
        target,
        layers=LAYERS_PER_GROUP,
        num_blocks=1 + len(windows) * BLOCKS,
        page_bytes=PAGE_BYTES,
        model=model,
        engine_id=f"{name}, {model}",
        block_tokens=BLOCK_TOKENS,
        windows=windows,
    ).connect()


def block_table(group: int) -> NDArray[np.int32]:
    """Where the engines keep a group's blocks."""
    return np.arange(1 + group * BLOCKS, 1 + (group + 1) * BLOCKS, dtype=np.int32)


def store(source: PagedEngine, hashes: list[bytes]) -> None:
    """All blocks of all groups: any of them may be what a hit needs."""
    source.kv[:] = np.random.default_rng(1).integers(0, 256, source.kv.shape, dtype=np.uint8)
    runs = [
        BlockRun(group, hashes, block_table(group)) for group in range(len(source.key_space.groups))
    ]
    result = source.session.store("store", "store", runs, WAIT_S).result(WAIT_S)
    assert all((stored == BlockResult.STORED).all() for stored in result.results), result


def load(
    finder: HitFinder, target: PagedEngine, hashes: list[bytes], number: int
) -> tuple[int, float]:
    """Bytes and seconds of one load, from the connector's plan. The block tables are as vLLM makes
    them: null if nothing is needed."""
    state = RequestState(Prompt(f"request {number}", hashes), StoreState([], 0))
    deadline_s = time.monotonic() + WAIT_S
    while (answer := finder.match(state, 0, time.monotonic()))[
        0
    ] is None and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert answer == (HIT_TOKENS, True), answer
    tables = []
    for group, needed in enumerate(needed_blocks(finder.groups.specs, HIT_TOKENS)):
        table = block_table(group)
        table[: needed.start] = 0
        tables.append(table.tolist())
    job = finder.begin_load(state, tables, HIT_TOKENS, 0)
    assert job is not None
    began_s = time.perf_counter()
    result = target.session.load(job.transfer_id, job.lease_id, job.runs, WAIT_S).result(WAIT_S)
    seconds = time.perf_counter() - began_s
    assert result.status is TransferStatus.DONE, result
    finder.end_load(state, failed=False)
    return result.num_bytes, seconds


def measure(server: Server, model: str) -> Moved:
    """Stores the prompt and loads it some times in another engine."""
    hashes = [
        bytes(h) for h in np.random.default_rng(2).integers(0, 256, (BLOCKS, 32), dtype=np.uint8)
    ]
    source, target = engine(server.target, model, "source"), engine(server.target, model, "target")
    scheduler = Session(
        SessionConfig(
            server.target, target.session.config.engine_id, Role.SCHEDULER, target.key_space
        )
    )
    scheduler.start()
    moved = Moved()
    try:
        assert scheduler.wait_connected(WAIT_S), scheduler
        store(source, hashes)
        config = ConnectorConfig(target=server.target, lookup_timeout_s=WAIT_S)
        finder = HitFinder(
            scheduler,
            CachedGroups(target.key_space.groups, BLOCK_TOKENS, BLOCK_TOKENS),
            config,
            HotKVStats(),
            "bench",
        )
        for number in range(ROUNDS):
            target.kv[:] = 0
            moved.num_bytes, seconds = load(finder, target, hashes, number)
            moved.seconds.append(seconds)
        check(source, target)
    finally:
        for session in (scheduler, source, target):
            session.close()
    return moved


def check(source: PagedEngine, target: PagedEngine) -> None:
    """The blocks that the hit needs are there, and nothing else was written."""
    expected = np.zeros_like(source.kv)
    for group, needed in enumerate(needed_blocks(source.key_space.groups, HIT_TOKENS)):
        blocks = block_table(group)[needed.start : needed.stop]
        expected[:, blocks] = source.kv[:, blocks]
    assert np.array_equal(target.kv, expected), "wrong bytes"


def main() -> int:
    """Command line."""
    options = parser("Bytes of a hit on a model with window layers.").parse_args()
    with (
        ends_cleanly(),
        runtime_folder(ARENA_BYTES + (1 << 28)) as folder,
        Server(folder, ARENA) as server,
    ):
        server.wait_ready()
        moved = {model: measure(server, model) for model in MODELS}
    hybrid, full = moved.values()
    ratio = hybrid.num_bytes / full.num_bytes
    rows = [
        (model, round(one.num_bytes / (1 << 20), 1), round(median(one.seconds) * 1e3, 1))
        for model, one in moved.items()
    ]
    rows.append(
        (
            f"ratio, at most {TARGET:.2f}",
            round(ratio, 3),
            round(median(hybrid.seconds) / median(full.seconds), 3),
        )
    )
    figures: dict[str, object] = {
        "hybrid_load_ratio": ratio,
        "hybrid_load_bytes": hybrid.num_bytes,
        "full_load_bytes": full.num_bytes,
        "hit_tokens": HIT_TOKENS,
    }
    print_report(("model", "MiB moved", "ms"), rows, figures, as_json=options.json)
    return 0 if ratio <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
