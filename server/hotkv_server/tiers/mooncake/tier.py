"""The tier in Mooncake Store. Each thread has a child process with the native client.

Always true: at a call's time limit its child is killed and reaped before the call ends, so
nothing writes to its slots. All nodes with the same master find the blocks. It evicts without
regard to depth.
"""

import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hotkv_server.dataplane.plan import Region
from hotkv_server.settings.tiers import MooncakeSettings
from hotkv_server.tiers.compression.staged import Staged
from hotkv_server.tiers.mooncake.words import Line, quoted
from hotkv_server.tiers.protocol import (
    NO_GENERATION,
    Codes,
    Generations,
    Shown,
    TierFacts,
    TierMemory,
)
from hotkv_server.tiers.remote.calls import PART_BYTES
from hotkv_server.tiers.remote.client import LateError, LostError, UnusableError
from hotkv_server.tiers.remote.encoding import encoding
from hotkv_server.tiers.remote.tier import RemoteTier
from hotkv_server.tiers.remote.workers import Timeouts, Workers

_children: set[int] = set()
"""Process ids."""
CHILD = "hotkv_server.tiers.mooncake.child"
TIMEOUTS = Timeouts(connect_s=10.0, batch_s=5.0)
"""For a child to be ready, and until one that does not answer is killed."""
MAX_STALL_S = 5.0
"""A large block over a slow line takes more than a second, and Mooncake reports no progress."""


class MooncakeClient:
    """A `Client` over a child process, which the constructor starts by `until_s`.

    `memories`: shared mappings with the slots, from their file's start, and the file's
        descriptor.
    """

    def __init__(
        self, settings: MooncakeSettings, memories: Sequence[tuple[Region, int]], until_s: float
    ) -> None:
        self._memories = [region for region, _ in memories]
        mine, theirs = socket.socketpair()
        self._line = Line(mine)
        named = [(fd, region.num_bytes) for region, fd in memories]
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-X", "faulthandler", "-m", CHILD),
                    *map(str, (theirs.fileno(), *sum(named, ()))),
                ],
                pass_fds=(theirs.fileno(), *(fd for fd, _ in named)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"GLOG_minloglevel": "3"},
            )
        except OSError as error:
            self._line.close()
            raise UnusableError(f"can't be asked: no child process ({error.strerror})") from error
        finally:
            theirs.close()
        _children.add(self._process.pid)
        try:
            self._ask(settings.model_dump(), until_s)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"MooncakeClient(pid={self._process.pid})"

    @property
    def moved_s(self) -> float:
        return 0.0

    def is_fresh(self) -> bool:
        return self._process.poll() is None

    def probe(
        self, keys: Sequence[bytes], expected: Generations, codes: Codes, until_s: float
    ) -> Generations:
        reply = self._ask(
            {"do": "probe", "names": [*map(quoted, keys)], "generations": [*expected]}, until_s
        )
        return _settle(reply, expected, codes)

    def read(
        self,
        keys: Sequence[bytes],
        slots: Sequence[memoryview],
        expected: Generations,
        codes: Codes,
        until_s: float,
    ) -> Generations:
        reply = self._ask(
            {"do": "read", **self._rows(keys, slots), "generations": [*expected]}, until_s
        )
        return _settle(reply, expected, codes)

    def write(
        self,
        keys: Sequence[bytes],
        slots: Sequence[memoryview],
        depths: Sequence[int],
        codes: Codes,
        until_s: float,
    ) -> None:
        """Mooncake has no use for `depths`."""
        reply = self._ask({"do": "write", **self._rows(keys, slots)}, until_s)
        codes[:] = reply["codes"]

    def forget(self, keys: Sequence[bytes], until_s: float) -> None:
        self._ask({"do": "forget", "names": [*map(quoted, keys)]}, until_s)

    def generations(self, fingerprints: Sequence[str], until_s: float) -> Shown:
        return Shown(
            self._ask({"do": "generations", "fingerprints": [*fingerprints]}, until_s)[
                "generations"
            ]
        )

    def raise_generation(
        self, fingerprint: str, floor: int, until_s: float, is_retry: bool = False
    ) -> int:
        asked = {"do": "raise", "fingerprint": fingerprint, "floor": floor}
        return int(self._ask(asked, until_s)["generation"])

    def close(self) -> None:
        """Kills the child and waits for it."""
        self._line.close()
        self._process.kill()
        self._process.wait()
        _children.discard(self._process.pid)

    def _rows(self, keys: Sequence[bytes], slots: Sequence[memoryview]) -> dict[str, Any]:
        return {
            "names": [*map(quoted, keys)],
            "keys": [key.hex() for key in keys],
            "slots": [*map(self._offset_of, slots)],
            "sizes": [*map(len, slots)],
        }

    def _offset_of(self, slot: memoryview) -> int:
        """Offset through all memories, as if they followed each other."""
        begin = 0
        for region in self._memories:
            if 0 <= (offset := region.offset_of(slot)) < region.num_bytes:
                return begin + offset
            begin += region.num_bytes
        raise ValueError("a slot lies outside all memories")

    def _ask(self, message: dict[str, Any], until_s: float) -> dict[str, Any]:
        try:
            self._line.send(message, until_s)
            reply = self._line.receive(until_s)
        except TimeoutError as error:
            raise LateError("has not answered in time") from error
        except (EOFError, OSError, ValueError) as error:
            raise LostError("has lost its child process") from error
        if reply.get("is_away"):
            raise UnusableError(str(reply["error"]))
        if "error" in reply:
            raise LostError(str(reply["error"]))
        return reply


def _settle(reply: dict[str, Any], expected: Generations, codes: Codes) -> Generations:
    now: dict[str, int] = reply["generations"]
    changed = {name: at for name, at in now.items() if at != expected[name] or at == NO_GENERATION}
    if not changed:
        codes[:] = reply["codes"]
    return changed


class MooncakeTier(RemoteTier):
    def _own_memory(self) -> TierMemory:
        """Of the children, without the arena; no limit."""
        return TierMemory(sum(map(_own_bytes, list(_children))), 0)


def _own_bytes(pid: int) -> int:
    """Resident memory without shared pages; 0 if the process is gone."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def mooncake_tier(
    arena: Region,
    arena_fd: int,
    settings: MooncakeSettings,
    *,
    on_generation: Callable[[str, int], None] = lambda fingerprint, generation: None,
    staged: Staged | None = None,
    timeouts: Timeouts | None = None,
) -> RemoteTier:
    """`staged`: mapped by the children too; None: blocks are not encoded.
    `timeouts`: None: TIMEOUTS.
    """

    def connect(until_s: float) -> MooncakeClient:
        memories = [(arena, arena_fd)]
        if staged is not None:
            memory = staged.memory
            region = Region(memory.address, memory.num_bytes, "staging")
            memories.append((region, memory.fd))
        return MooncakeClient(settings, memories, until_s)

    batch_bytes = settings.children * PART_BYTES
    facts = TierFacts("mooncake", batch_bytes, max_stall_s=MAX_STALL_S)
    workers = Workers(
        f"mooncake at {settings.master}",
        settings.children,
        timeouts or TIMEOUTS,
        encoding(connect, staged),
        connects_first=True,
    )
    return MooncakeTier(facts, arena, workers, on_generation=on_generation, staged=staged)
