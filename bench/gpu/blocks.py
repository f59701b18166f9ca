"""How wide the copy kernel should be: its speed with 2 to 64 blocks, beside a plain pinned copy of
as many bytes.

`python -m bench.gpu.blocks [--json]`, on a machine with CuPy and a GPU; a few seconds. No server:
the runtime itself, pages of 4 and 16 KiB, scattered on both sides. A narrower kernel leaves more of
the device to an engine (`bench.gpu.methods` says what it costs), a wider one copies faster until
the bus is full. `hotkv_server.device.cupy_runtime.COPY_BLOCKS` is what servers use.
"""

import ctypes
import sys
from collections.abc import Callable
from time import perf_counter

import numpy as np

from bench.gpu.figures import gpu_parser, print_figures
from hotkv_client.tables import table
from hotkv_server.device.cupy_runtime import COPY_BLOCKS, CupyRuntime
from hotkv_server.device.runtime import DeviceError, DeviceRuntime, Priority, Stream
from hotkv_server.testing.device import FakeRuntime

BLOCKS = (2, 4, 8, 16, 32, 64)
PAGES = (4 << 10, 16 << 10)
NUM_BYTES = 128 << 20
ROUNDS = 7


class Bench:
    """Memory on both sides and a stream of one runtime."""

    def __init__(self, runtime: DeviceRuntime, num_bytes: int) -> None:
        self.runtime, self.num_bytes = runtime, num_bytes
        self._device, self._host = (
            runtime.allocate(0, num_bytes),
            runtime.allocate_pinned(num_bytes),
        )
        self._num_rows = num_bytes // PAGES[0]
        self._table = runtime.allocate_pinned(24 * self._num_rows)
        self.rows = np.ctypeslib.as_array(
            (ctypes.c_int64 * (3 * self._num_rows)).from_address(self._table)
        )
        self._stream: Stream = runtime.new_stream(0, Priority.LOW)
        self._event = runtime.new_event(0)

    def close(self) -> None:
        self.runtime.free(0, self._device)
        self.runtime.free_pinned(self._host)
        self.runtime.free_pinned(self._table)

    def rate(self, work: Callable[[Stream], None]) -> float:
        """GB/s of what `work` gives to the stream, the fastest of some."""
        found = []
        for _ in range(ROUNDS):
            start_s = perf_counter()
            work(self._stream)
            self.runtime.record(self._event, self._stream)
            self.runtime.synchronize(self._event)
            found.append(perf_counter() - start_s)
        return self.num_bytes / min(found) / 1e9

    def plain(self, load: bool) -> float:
        dst, src = (self._device, self._host) if load else (self._host, self._device)
        return self.rate(lambda stream: self.runtime.copy(stream, dst, src, self.num_bytes))

    def kernel(self, load: bool, page_bytes: int) -> float:
        count, random = self.num_bytes // page_bytes, np.random.default_rng(page_bytes)
        device = self._device + random.permutation(count) * page_bytes
        host = self._host + random.permutation(count) * page_bytes
        self.rows[: 3 * count] = (
            np.concatenate([device, host] if load else [host, device]).tolist()
            + [page_bytes] * count
        )
        return self.rate(
            lambda stream: self.runtime.copy_kernel(stream, self._table, count, page_bytes)
        )


def main() -> int:
    """Command line."""
    options = gpu_parser("Time the copy kernel by its number of blocks.").parse_args()
    found: dict[str, dict[str, float]] = {}
    rows = []
    num_bytes = NUM_BYTES // 16 if options.made_up else NUM_BYTES
    for blocks in BLOCKS:
        try:
            runtime: DeviceRuntime = (
                FakeRuntime(0) if options.made_up else CupyRuntime(copy_blocks=blocks)
            )
            bench = Bench(runtime, num_bytes)
        except DeviceError as error:
            print(f"bench.gpu.blocks: {error}", file=sys.stderr)
            return 1
        ceiling = {load: bench.plain(load) for load in (True, False)}
        one = found[str(blocks)] = {"plain load": ceiling[True], "plain store": ceiling[False]}
        for page_bytes in PAGES:
            for load in (True, False):
                one[f"{'load' if load else 'store'} {page_bytes >> 10} KiB"] = bench.kernel(
                    load, page_bytes
                )
        rows.append((blocks, *(f"{rate:.1f}" for rate in one.values())))
        bench.close()
    print(table(("blocks", *(f"{name}, GB/s" for name in next(iter(found.values())))), rows))
    print_figures(
        [],
        {"made_up": options.made_up, "copy_blocks": COPY_BLOCKS, "gb_s": found},
        as_json=options.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
