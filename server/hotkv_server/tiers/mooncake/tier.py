"""The tier in Mooncake Store. Each thread of the tier has a child process with Mooncake's native
client (`mooncake.child`).

Always true: if a call exceeds its time limit, its child is killed and reaped before the call ends,
so nothing writes to the call's slots (places in the arena) afterwards. All nodes with the same
Mooncake master find the written blocks. The master evicts blocks, without regard to their positions
in a sequence.
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
from hotkv_server.tiers.remote.workers import RemoteLimits, Workers

_children: set[int] = set()
"""Process ids of the running children."""
CHILD = "hotkv_server.tiers.mooncake.child"
MAX_STALL_S = 5.0
"""The store counts as hanging if a call takes longer than this time. A large block over a slow line
takes more than a second, and Mooncake does not report progress."""


class MooncakeClient:
    """A `Client` (connection of a tier to its store) whose requests a child process executes. The
    constructor starts the child process.

    `memories`: the memories that contain the slots (places in the arena). Each is a pair: a shared
        mapping of a file, from the file's start, and the file's descriptor. The child maps the same
        files.
    `until_s`: time limit of the constructor, a time of time.monotonic.
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
        """Returns 0, because Mooncake's client does not report progress; see `Client.moved_s`."""
        return 0.0

    def is_fresh(self) -> bool:
        """Returns False if the child process has ended; see `Client.is_fresh`."""
        return self._process.poll() is None

    def probe(
        self, keys: Sequence[bytes], expected: Generations, codes: Codes, until_s: float
    ) -> Generations:
        """Asks the store which keys exist; see `Client.probe`."""
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
        """Reads blocks into their slots; see `Client.read`."""
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
        """Writes blocks under their keys; see `Client.write`. Ignores `depths`, because Mooncake
        can't use them for eviction."""
        reply = self._ask({"do": "write", **self._rows(keys, slots)}, until_s)
        codes[:] = reply["codes"]

    def forget(self, keys: Sequence[bytes], until_s: float) -> None:
        """Deletes the values of the keys; see `Client.forget`."""
        self._ask({"do": "forget", "names": [*map(quoted, keys)]}, until_s)

    def generations(self, fingerprints: Sequence[str], until_s: float) -> Shown:
        """Returns the key spaces' generations (numbers that each flush raises); see
        `Client.generations`."""
        return Shown(
            self._ask({"do": "generations", "fingerprints": [*fingerprints]}, until_s)[
                "generations"
            ]
        )

    def raise_generation(
        self, fingerprint: str, floor: int, until_s: float, is_retry: bool = False
    ) -> int:
        """Raises the generation (number that each flush raises) of a key space (a model in a
        configuration), which flushes its blocks in the store; see `Client.raise_generation`."""
        asked = {"do": "raise", "fingerprint": fingerprint, "floor": floor}
        return int(self._ask(asked, until_s)["generation"])

    def close(self) -> None:
        """Kills the child process, and blocks until it is gone; see `Client.close`."""
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
        """Returns the byte offset by which requests to the child process name a slot (place in the
        arena). Offsets count through all memories, as if the memories followed each other."""
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
    """A `RemoteTier` whose store is Mooncake Store; see the module."""

    def _own_memory(self) -> TierMemory:
        """Returns the memory that the child processes use, not counting the arena, which they map.
        This memory has no limit."""
        return TierMemory(sum(map(_own_bytes, list(_children))), 0)


def _own_bytes(pid: int) -> int:
    """Returns the resident memory of a process without shared pages, in bytes; 0 if the process is
    gone."""
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
) -> RemoteTier:
    """Opens a tier in Mooncake Store.

    `arena_fd`: descriptor of the arena's file.
    `on_generation`: called with a key space's fingerprint and its generation in the store (a number
        that each flush raises), if a call has expected another generation.
    `staged`: staging memory for encoded (compressed) blocks, which the child processes map too;
        None if the tier does not encode blocks.
    """

    def connect(until_s: float) -> MooncakeClient:
        memories = [(arena, arena_fd)]
        if staged is not None:
            memory = staged.memory
            region = Region(memory.address, memory.num_bytes, "staging")
            memories.append((region, memory.fd))
        return MooncakeClient(settings, memories, until_s)

    batch_bytes = settings.children * PART_BYTES
    facts = TierFacts("mooncake", False, batch_bytes, max_stall_s=MAX_STALL_S)
    workers = Workers(
        f"mooncake at {settings.master}",
        RemoteLimits(settings.children, settings.connect_timeout_s, settings.timeout_s),
        encoding(connect, staged),
        connects_first=True,
    )
    return MooncakeTier(facts, arena, workers, on_generation=on_generation, staged=staged)
