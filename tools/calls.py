"""Counts calls of hotkv's functions in the server: `python -m tools.calls [--blocks N] [--by-file]
[--each]`, for a store and for a hit (lease, load, release) over the fast lane.

A call is one of a function or method; comprehensions and generator expressions are counted apart.
"""

import argparse
import cProfile
import os
import pstats
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from bench.servers import GIB, new_hashes, serving
from hotkv_client import BlockRun, GroupHashes, LoadRun
from hotkv_client.paged_engine import PagedEngine
from hotkv_server import cli
from hotkv_server.wire.session_stream import SessionCalls

WARM, COUNTED = 100, 100
PAUSE_S = 0.002
PACKAGES = ("hotkv_server", "hotkv_proto")
ENVIRONMENT = "HOTKV_COUNTED_CALLS"
"""Path of the profile, number of the first counted message and of the last."""


def serve(arguments: list[str]) -> int:
    """A server that profiles its event loop while it serves the counted messages."""
    path, first, last = os.environ[ENVIRONMENT].split(",")
    profile, handle, num_handled = cProfile.Profile(), SessionCalls.handle, 0

    async def counted(self: SessionCalls, request: object) -> object:
        nonlocal num_handled
        num_handled += 1
        if num_handled == int(first):
            profile.enable()
        if num_handled == int(last):
            profile.disable()
            profile.dump_stats(path)
        return await handle(self, request)  # type: ignore[arg-type]

    SessionCalls.handle = counted  # type: ignore[method-assign, assignment]
    return cli.main(arguments)


Calls = Counter[tuple[str, str]]
"""By file and function, of COUNTED turns together."""


def count(kind: str, num_blocks: int) -> Calls:
    """`kind`: "store" or "hit"."""
    messages = 1 if kind == "store" else 3
    known, ids = new_hashes(num_blocks), np.arange(num_blocks, dtype=np.int32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile"
        # A hit's first message stores what is known.
        first = 1 + (kind == "hit") + WARM * messages
        os.environ[ENVIRONMENT] = f"{path},{first},{first + COUNTED * messages}"
        with serving(GIB, command=[sys.executable, "-m", "tools.calls", "serve", "run"]) as server:
            server.wait_filled()
            engine = PagedEngine(server.target, layers=1, num_blocks=512).connect()
            session = engine.session
            if kind == "hit":
                session.store("s", "s", [BlockRun(0, known, ids)], 10).result(10)
            for turn in range(WARM + COUNTED + 2):
                if kind == "store":
                    run = BlockRun(0, new_hashes(num_blocks), ids)
                    session.store(f"s{turn}", f"s{turn}", [run], 10).result(10)
                else:
                    session.acquire(f"l{turn}", [GroupHashes(0, known)]).result(10)
                    session.load(f"l{turn}", f"l{turn}", [LoadRun(0, ids, ids)], 10).result(10)
                    session.release(f"l{turn}")
                time.sleep(PAUSE_S)
            engine.close()
        stats = pstats.Stats(str(path)).stats  # type: ignore[attr-defined]
    found = Calls()
    for (file, _, name), (_, num_calls, *_) in stats.items():
        package = next((one for one in PACKAGES if f"/{one}/" in file), "")
        if package:
            found[file[file.rindex(package) :], name] += num_calls
    return found


def main() -> int:
    if sys.argv[1:2] == ["serve"]:
        return serve(sys.argv[2:])
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--blocks", type=int, default=1)
    options.add_argument("--by-file", action="store_true")
    options.add_argument("--each", action="store_true")
    chosen = options.parse_args()
    way = set[str]()
    for kind in ("store", "hit"):
        calls = count(kind, chosen.blocks)
        named = Calls({key: n for key, n in calls.items() if "<" not in key[1]})
        files = Counter[str]()
        for (file, _), number in named.items():
            files[file] += number
        regular = [file for file, number in files.items() if number >= COUNTED]
        way |= set(regular)
        print(
            f"{kind} of {chosen.blocks} blocks: {named.total() / COUNTED:.0f} calls, "
            f"{(calls - named).total() / COUNTED:.0f} of comprehensions, in {len(regular)} files"
        )
        for file, number in files.most_common() if chosen.by_file else ():
            print(f"{number / COUNTED:7.1f}  {file}")
        for (file, name), number in named.most_common() if chosen.each else ():
            print(f"{number / COUNTED:7.1f}  {file}: {name}")
    print(f"a block's way through the server: {len(way)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
