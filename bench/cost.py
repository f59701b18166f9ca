"""Measures what the server itself needs: processor time by call and thread, and the part of the
arena that no slot can use. `python -m bench.cost [--only arena|calls] [--json]`.

Processor time is the threads' own, so waiting does not count. One engine makes call after call;
blocks of 4 KiB cost little to copy; a ping costs only gRPC and the event loop. With `--json` the
last line is a JSON object:

- `store_cpu_ms`, `hit_256_cpu_ms` (a lease, a load and a release of 256 blocks),
  `lookup_1024_cpu_ms`, `ping_cpu_ms`: processor ms per call;
- `idle_core_share`: an idle server's, as a share of one core;
- `arena_loss_worst`: the largest share of an arena that no slot can use: what is left at a run's
  end of slabs. Arenas are filled with blocks of each of 32 public models, and with changing
  mixes.
"""

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.policies import POLICIES
from bench.report import at_most, parser, print_figures, say
from bench.servers import GIB, MIB, new_hashes, serving
from bench.shapes import slot_sizes
from hotkv_client import BlockRun, GroupHashes, LoadRun, Session
from hotkv_client.paged_engine import PagedEngine
from hotkv_proto.table import BlockTable, TableGeometry
from hotkv_server.cache.room.removal import finished
from hotkv_server.cache.room.slabs import SlabPool
from hotkv_server.cache.room.space import Space
from hotkv_server.settings.storage import ArenaSettings

ARENAS_GIB = (2, 16, 64)
BLOCK_TOKENS = (16, 64)
NUM_MIXES, TURNS = 12, 6
CALLS, IDLE_S, PAUSE_S = 400, 20.0, 0.002
BOUNDS = {
    "store_cpu_ms": at_most(0.45),
    "hit_256_cpu_ms": at_most(0.70),
    "idle_core_share": at_most(0.004),
    "arena_loss_worst": at_most(0.03),
}


# ------------------------------------------------------------------------------------- the arena


def loss_alone(arena: ArenaSettings, slot_bytes: int) -> float:
    """Share that no slot can use with one model's blocks."""
    pool = SlabPool(arena.bytes, arena.slab_size)
    num_slots = len(pool.allocate(slot_bytes, arena.bytes // slot_bytes))
    return 1 - num_slots * slot_bytes / arena.bytes


def loss_mixed(arena: ArenaSettings, sizes: list[int], seed: int) -> float:
    """Largest share lost while TURNS times the arena's size is stored, in changing proportions
    of `sizes`."""
    chance, now_s, number = random.Random(seed), 0.0, 0
    capacity = 2 * sum(arena.bytes // size for size in sizes) // len(sizes) + 1024
    geometry = TableGeometry.for_capacity(capacity, 1, arena.bytes)
    space = Space(
        BlockTable(np.zeros(geometry.file_bytes, np.uint8), geometry),
        arena.bytes,
        arena.slab_size,
        POLICIES["lru"](capacity),
    )
    space.index.add_key_space(1, [7])
    stored_bytes, next_phase, worst, weights = 0, 0, 0.0, [1.0] * len(sizes)
    while stored_bytes < TURNS * arena.bytes:
        if stored_bytes >= next_phase:
            weights = [chance.random() ** 2 for _ in sizes]
            next_phase += arena.bytes // 2
        (size,) = chance.choices(sizes, weights)
        count, now_s = max(1, min(64, 32 * MIB // size)), now_s + 1
        hashes = np.arange(8 * count, dtype=np.uint32).reshape(count, 8)
        hashes[:, 0] += np.uint32(number)
        number += count
        hashes = np.ascontiguousarray(hashes * np.uint32(0x9E3779B1))
        finished(space.make_room(1, 0, size, count))
        entries = space.insert(1, 0, hashes, size, np.arange(count), 1)
        space.publish(entries, now_s)
        space.removal.take_effects()
        stored_bytes += count * size
        if stored_bytes > 2 * arena.bytes and chance.random() < 0.05:
            worst = max(worst, space.pool.figures().tail_bytes / arena.bytes)
    return worst


def arena_rows() -> list[tuple[str, float]]:
    """(name, lost share): the worst single model, and the worst and the mean of the mixes."""
    rows = []
    for gib in ARENAS_GIB:
        arena = ArenaSettings.model_validate({"bytes": gib * GIB})
        sizes = {
            f"{name}, {tokens} tokens": size
            for tokens in BLOCK_TOKENS
            for name, size in slot_sizes(tokens).items()
        }
        losses = {name: loss_alone(arena, size) for name, size in sizes.items()}
        worst = max(losses, key=lambda name: losses[name])
        rows.append((f"{gib} GiB, alone: {worst}", losses[worst]))
        if gib > 16:
            continue
        mixed = []
        for seed in range(NUM_MIXES):
            some = random.Random(seed).sample(sorted(set(sizes.values())), 2 + seed % 3)
            mixed.append(loss_mixed(arena, some, seed))
        rows.append((f"{gib} GiB, worst of {NUM_MIXES} mixes", max(mixed)))
        rows.append((f"{gib} GiB, mean of {NUM_MIXES} mixes", float(np.mean(mixed))))
    return rows


# -------------------------------------------------------------------------------------- the calls


def thread_times(pid: int) -> dict[str, float]:
    """Processor seconds of the main thread ("loop") and of all others."""
    spent = {"loop": 0.0, "others": 0.0}
    for folder in Path(f"/proc/{pid}/task").iterdir():
        try:
            ran_ns = int((folder / "schedstat").read_text().split()[0])
        except OSError:
            continue
        spent["loop" if folder.name == str(pid) else "others"] += ran_ns / 1e9
    return spent


def call_times(target: str, pid: int) -> dict[str, dict[str, float]]:
    """Processor ms per call, by kind, of the main thread ("loop") and of all others."""
    engine = PagedEngine(target, layers=1, num_blocks=512, page_bytes=4096).connect()
    session, kept = engine.session, new_hashes(1024)
    ids = np.arange(256, dtype=np.int32)
    for start in range(0, 1024, 256):
        store(session, f"kept {start}", kept[start : start + 256], ids)
    kinds: dict[str, Callable[[str], object]] = {
        "ping": lambda name: session.ping(10),
        "lookup 1024": lambda name: session.lookup([GroupHashes(0, kept)]).result(10),
        "store 16": lambda name: store(session, name, new_hashes(16), ids[:16]),
        "store 256": lambda name: store(session, name, new_hashes(256), ids),
        "hit 16": lambda name: hit(session, name, kept[:16], ids[:16]),
        "hit 256": lambda name: hit(session, name, kept[:256], ids),
    }
    spent = {kind: {"loop": 0.0, "others": 0.0} for kind in kinds}
    rounds = 8
    for number in range(rounds):
        for kind, call in kinds.items():
            before = thread_times(pid)
            for at in range(CALLS // rounds):
                call(f"{kind} {number} {at}")
                time.sleep(PAUSE_S)
            after = thread_times(pid)
            for thread in before:
                spent[kind][thread] += 1e3 * (after[thread] - before[thread]) / CALLS
    session.close()
    return spent


def store(session: Session, name: str, hashes: list[bytes], ids: np.ndarray) -> None:
    session.store(name, name, [BlockRun(0, hashes, ids)], 20).result(60)


def hit(session: Session, name: str, hashes: list[bytes], ids: np.ndarray) -> None:
    session.acquire(name, [GroupHashes(0, hashes)]).result(60)
    run = LoadRun(0, np.arange(len(ids), dtype=np.int32), ids + 256)
    session.load(name, name, [run], 20).result(60)
    session.release(name)


def idle_share(pid: int) -> float:
    before = sum(thread_times(pid).values())
    time.sleep(IDLE_S)
    return (sum(thread_times(pid).values()) - before) / IDLE_S


# -------------------------------------------------------------------------------------- the command


def main() -> int:
    options = parser("Measure what the server costs.")
    options.add_argument("--only", choices=("arena", "calls"), help="measure only this")
    chosen = options.parse_args()
    figures: dict[str, float] = {}
    if chosen.only != "calls":
        say("arenas")
        rows = arena_rows()
        for name, loss in rows:
            print(f"{loss:7.2%}  {name}")
        figures["arena_loss_worst"] = max(loss for _, loss in rows)
    if chosen.only != "arena":
        with serving(1 * GIB) as server:
            server.wait_filled()
            say("idle")
            figures["idle_core_share"] = idle_share(server.pid)
            say("calls")
            spent = call_times(server.target, server.pid)
        for kind, by_thread in spent.items():
            print(f"{kind:12} loop {by_thread['loop']:.3f} ms, others {by_thread['others']:.3f} ms")
            figures[f"{kind.replace(' ', '_')}_cpu_ms"] = sum(by_thread.values())
        figures["store_cpu_ms"] = figures["store_16_cpu_ms"]
    print_figures(figures, BOUNDS, as_json=chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
