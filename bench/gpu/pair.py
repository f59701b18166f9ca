"""Two engines share blocks through one server for a while, every byte compared, while engines of
other processes are killed in the middle of copies.

`python -m bench.gpu.pair [--json] [--seconds N]`, on a machine with a GPU, 1 GiB of device and host
memory. In turns, one engine stores random blocks and the other loads them over others of its own.
Fails at the first wrong byte.
"""

import math
import os
import subprocess
import sys
import time

import numpy as np
import torch

from bench.gpu.engine import Engine, Shape, Side, about, done, find_side, operation_bytes, settled
from bench.gpu.figures import Figure, gpu_parser, print_figures
from bench.servers import MIB, new_hashes
from demo.processes import ROOT
from hotkv_client.types import Int32s

PAGE_BYTES, LAYERS = 64 << 10, 32
COPYING_S = 0.5
MORE_S = 15.0
"""Until an engine has been killed."""
VICTIM_BYTES = 128 * MIB


class Victim:
    """An engine in another process that copies until it is killed."""

    def __init__(self, side: Side, target: str) -> None:
        words = [target, str(VICTIM_BYTES), *(["made-up"] if side.is_made_up else [])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.gpu.engine", *words], cwd=ROOT, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def is_copying(self) -> bool:
        """Raises AssertionError if it has ended."""
        assert self._process.poll() is None, "the engine to be killed has ended"
        assert self._process.stdout is not None
        return b"copying" in (self._process.stdout.read() or b"")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def exchange(one: Engine, other: Engine, dice: np.random.Generator) -> int:
    """Blocks that `other` has loaded. Raises AssertionError at wrong bytes."""
    num_blocks = one.shape.num_blocks
    count = int(dice.integers(1, num_blocks // 4))
    stored, loaded = (dice.permutation(num_blocks)[:count].astype(np.int32) for _ in range(2))
    one.memory.view(num_blocks, -1)[torch.from_numpy(stored).long()] = int(dice.integers(1, 256))
    for block in stored[:8]:
        # Blocks of one value would hide swapped ones.
        one.memory.view(num_blocks, -1)[int(block)].random_(0, 256)
    one.side.synchronize()
    names = new_hashes(count)
    done(one.store(names, stored))
    lease = other.lease(names)
    done(other.load(lease, loaded))
    other.session.release(lease)
    if not torch.equal(rows(one, stored), rows(other, loaded)):
        raise AssertionError(f"wrong bytes in a load of {count} blocks")
    return count


def rows(engine: Engine, ids: Int32s) -> torch.Tensor:
    at = torch.from_numpy(np.asarray(ids, np.int64)).to(engine.memory.device)
    return engine.memory.view(engine.shape.num_blocks, -1)[at]


def main() -> int:
    flags = gpu_parser("Two engines share blocks while others are killed.")
    flags.add_argument("--seconds", type=float, default=20)
    options = flags.parse_args()
    side, dice = find_side(options.made_up), np.random.default_rng(1)
    shape = Shape(PAGE_BYTES, LAYERS, 32, "BLHNC")
    arena_bytes = operation_bytes(256 * MIB, 2) * 2
    exchanges = blocks = kills = 0
    with settled(side, arena_bytes, is_calibrated=False) as server:
        pair = [Engine(side, server.target, shape, model="pair").connected() for _ in range(2)]
        until_s, victim = time.monotonic() + options.seconds, Victim(side, server.target)
        kill_s = math.inf
        try:
            while time.monotonic() < until_s + (0 if kills else MORE_S):
                one, other = pair
                blocks += exchange(one, other, dice)
                pair.reverse()
                exchanges += 1
                if victim.is_copying():
                    kill_s = time.monotonic() + COPYING_S
                if time.monotonic() > kill_s:
                    victim.kill()
                    victim, kills, kill_s = Victim(side, server.target), kills + 1, math.inf
        finally:
            victim.kill()
            for engine in pair:
                engine.close()
    figures = [
        Figure("pair: exchanges with equal bytes", exchanges, 1),
        Figure("pair: blocks", blocks),
        Figure("pair: engines killed meanwhile", kills, 1),
    ]
    print_figures(figures, about(side), as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
