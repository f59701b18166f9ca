"""A hotkv-server and vLLM engines as child processes.

Each child leads its own process group. Leaving its `with` block, also by Ctrl-C or, inside
`ends_cleanly`, by SIGTERM, ends the group and removes its files. If this process is killed, its
children end too.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

from demo.logs import root_lines

if TYPE_CHECKING:
    # In `typing` since Python 3.11.
    from typing import Self

ROOT = Path(__file__).resolve().parent.parent
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
START_DEADLINE_S = 150.0
"""A server whose arena is on a disk may stop for a minute, while others write as fast as the
disk can."""
STOP_DEADLINE_S = 60.0
HURRY_DEADLINE_S = 3.0
STORE_DEADLINE_S = 20.0
SHM = Path("/dev/shm")
VLLM_SETTINGS = {
    # No warm-up over many shapes; `demo.machine.warm_up` replaces it.
    "VLLM_CPU_CI_ENV": "1",
    # vLLM's default depends on the connector, but compared engines need equal cores.
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Environment variables of engines."""


class ChildError(RuntimeError):
    """A child ended or did not answer; quotes its log."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """target: of the server; empty: vLLM alone.
    extra_config: of the connector.
    engine_args: of `vllm.LLM`; they replace the defaults.
    environment: replaces the defaults.
    """

    model: str
    target: str = ""
    extra_config: dict[str, Any] = field(default_factory=dict)
    kv_cache_gib: int = 1
    engine_args: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """logprobs: per generated token, the five likeliest by id."""

    ttft_s: float
    total_s: float
    hit_tokens: int
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    text: str


def largest_logprob_difference(one: Answer, other: Answer) -> float:
    """Of tokens likely in both, up to the first position that differs, included."""
    largest = 0.0
    for position, (ours, theirs) in enumerate(zip(one.logprobs, other.logprobs, strict=True)):
        largest = max(
            [largest, *(abs(ours[token] - theirs[token]) for token in ours.keys() & theirs.keys())]
        )
        if one.token_ids[position] != other.token_ids[position]:
            break
    return largest


@contextlib.contextmanager
def ends_cleanly() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, SIGINT KeyboardInterrupt: `with` blocks are left in
    order."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def runtime_folder(needed_bytes: int) -> Iterator[Path]:
    """In shared memory if `needed_bytes` fit, else in the temporary folder. Removed at the end."""
    roomy = SHM.is_dir() and os.access(SHM, os.W_OK) and shutil.disk_usage(SHM).free > needed_bytes
    # By the tag, who kills this process finds what it leaves behind.
    prefix = f"hotkv-{os.environ.get('HOTKV_FOLDER_TAG', '')}"
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=SHM if roomy else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _end_with_parent() -> None:
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def prepare_model() -> Path:
    """The folder of `tools.smollm2`. Output is shown only if that fails."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.smollm2"], capture_output=True, text=True, cwd=ROOT
    )
    if done.returncode:
        raise ChildError(f"the model could not be prepared:\n{done.stderr}")
    return Path(done.stdout.splitlines()[-1])


def group_members(group: int) -> list[int]:
    """Living ones, without Python's resource trackers, which end by themselves."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            # State, parent and group follow the name in brackets.
            state, _, number = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if (
                int(number) == group
                and state != "Z"
                and b"resource_tracker" not in (folder / "cmdline").read_bytes()
            ):
                found.append(int(folder.name))
    return found


class Child:
    """In its own process group; for one thread."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, env: dict[str, str], pipes: bool = False
    ) -> None:
        self.name = name
        self.log = log
        pipe = subprocess.PIPE if pipes else None
        with log.open("wb") as sink:
            self.process: subprocess.Popen[str] = subprocess.Popen(
                command,
                stdin=pipe or subprocess.DEVNULL,
                stdout=pipe or sink,
                stderr=sink,
                text=True,
                cwd=ROOT,
                env={**os.environ, **env},
                start_new_session=True,
                # An engine watches its parent itself: it must also end vLLM's processes.
                preexec_fn=None if pipes else _end_with_parent,
            )

    def __repr__(self) -> str:
        return f"Child({self.name!r}, pid={self.process.pid}, returncode={self.process.poll()})"

    def error(self, what: str) -> ChildError:
        """Quotes why the process has ended."""
        lines = root_lines(self.log.read_text(errors="replace"))
        return ChildError(
            "\n".join([f"{self.name}: {what}; {self.log} says:", *(f"  | {one}" for one in lines)])
        )

    def signal_group(self, number: int, deadline_s: float) -> None:
        """Returns when all have ended, or at the deadline."""
        end_s = time.monotonic() + deadline_s
        for pid in group_members(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        while group_members(self.process.pid) and time.monotonic() < end_s:
            self.process.poll()
            time.sleep(0.02)

    def stop(self, hurry: bool = False) -> None:
        """Closes the input, SIGTERM, SIGKILL, waiting after each. `hurry`: without the first,
        and briefly."""
        try:
            if self.process.stdin and not hurry:
                with contextlib.suppress(OSError):
                    self.process.stdin.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(STOP_DEADLINE_S)
            self.signal_group(signal.SIGTERM, HURRY_DEADLINE_S if hurry else STOP_DEADLINE_S)
        finally:
            self.signal_group(signal.SIGKILL, STOP_DEADLINE_S)
            self.process.wait()
            for stream in (self.process.stdout, self.process.stdin):
                if stream:
                    with contextlib.suppress(OSError):
                        stream.close()


class Engine:
    """Use it in a `with` block. Calls block. MODULE: what the process runs."""

    MODULE = "demo.engine_process"

    def __init__(self, name: str, settings: EngineSettings, folder: Path) -> None:
        self.name = name
        env = {
            **VLLM_SETTINGS,
            **settings.environment,
        }
        # It would win over this argument.
        if "kv_cache_memory_bytes" not in settings.engine_args:
            env["VLLM_CPU_KVCACHE_SPACE"] = str(settings.kv_cache_gib)
        command = [sys.executable, "-m", self.MODULE, json.dumps(asdict(settings))]
        self._child = Child(
            name, command, folder / f"{name.replace(' ', '-')}.log", env, pipes=True
        )
        self.vllm_version = ""
        self.dtype = ""

    def __repr__(self) -> str:
        return f"Engine({self.name!r}, vllm={self.vllm_version or 'loading'})"

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self._child.stop(hurry=error_type is not None)

    def close(self) -> None:
        """May be called more than once."""
        self._child.stop()

    @property
    def log(self) -> Path:
        """Output of vLLM and the connector."""
        return self._child.log

    def wait_ready(self) -> None:
        """Takes tens of seconds. Raises ChildError."""
        ready = self._read()
        self.vllm_version, self.dtype = ready["vllm"], ready["dtype"]

    def generate(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        transfer: dict[str, Any] | None = None,
    ) -> Answer:
        """transfer: `kv_transfer_params`."""
        reply = self.ask(
            {
                "op": "generate",
                "token_ids": list(token_ids),
                "max_tokens": max_tokens,
                "transfer": transfer or {},
            }
        )
        return Answer(
            ttft_s=reply["ttft_s"],
            total_s=reply["total_s"],
            hit_tokens=reply["hit_tokens"],
            token_ids=tuple(reply["token_ids"]),
            logprobs=tuple(
                {int(token): value for token, value in step.items()} for step in reply["logprobs"]
            ),
            text=reply["text"],
        )

    def reset_prefix_cache(self) -> bool:
        """Empties vLLM's own cache, not hotkv's."""
        return bool(self.ask({"op": "reset_prefix_cache"})["done"])

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises ChildError if the process has ended."""
        stdin: IO[str] | None = self._child.process.stdin
        assert stdin is not None
        try:
            print(json.dumps(request), file=stdin, flush=True)
        except BrokenPipeError:
            raise self._child.error("ended") from None
        return self._read()

    def _read(self) -> dict[str, Any]:
        stdout = self._child.process.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            self._child.process.wait()
            raise self._child.error(f"ended with {self._child.process.returncode}")
        reply: dict[str, Any] = json.loads(line)
        return reply


class Server:
    """Runtime directory and arena are in `folder`, where the next server continues with the blocks.
    Use it in a `with` block.

    command: instead of `hotkv-server run`.
    ready_s: from start to ready; set by `wait_ready`.
    """

    ready_s: float

    def __init__(self, folder: Path, arena: str, *flags: str, command: Sequence[str] = ()) -> None:
        self.runtime_folder = folder / "run"
        self.runtime_folder.mkdir(mode=0o700, exist_ok=True)
        self.target = f"unix:{self.runtime_folder}/grpc.sock"
        self.begin_s = time.monotonic()
        command = [*(command or (sys.executable, "-m", "hotkv_server.cli", "run"))]
        command += ["--runtime-dir", str(self.runtime_folder), "--arena.dir", str(folder / "arena")]
        command += ["--arena.bytes", arena, "--http.port", "0", *flags]
        self._child = Child("hotkv-server", command, folder / "hotkv-server.log", {})

    def __repr__(self) -> str:
        return f"Server({self.target!r}, pid={self.pid})"

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *exc: object) -> None:
        self._child.stop()

    @property
    def pid(self) -> int:
        return self._child.process.pid

    @property
    def log(self) -> Path:
        return self._child.log

    def wait_ready(self, timeout_s: float = START_DEADLINE_S) -> float:
        """Until the health service says "serving". Seconds since the start. Raises ChildError."""
        import grpc
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        serving = health_pb2.HealthCheckResponse.SERVING
        deadline = self.begin_s + timeout_s
        # A gRPC channel that failed waits a second.
        while time.monotonic() < deadline and self._child.process.poll() is None:
            with grpc.insecure_channel(self.target) as channel, contextlib.suppress(grpc.RpcError):
                if (
                    health_pb2_grpc.HealthStub(channel)
                    .Check(health_pb2.HealthCheckRequest(), timeout=1.0)
                    .status
                    == serving
                ):
                    self.ready_s = time.monotonic() - self.begin_s
                    return self.ready_s
            time.sleep(0.02)
        raise self._child.error(
            "ended early"
            if self._child.process.poll() is not None
            else f"not ready in {timeout_s:g} s"
        )

    def wait_filled(self, timeout_s: float = 120.0) -> None:
        """Until the arena is prefaulted. Raises ChildError after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while self.counter("arena_capacity_bytes") < self.counter("arena_full_capacity_bytes"):
            if time.monotonic() > deadline_s:
                raise self._child.error(f"the arena is not filled in {timeout_s:g} s")
            time.sleep(0.2)

    def cli(self, *arguments: str) -> str:
        """Output of a `hotkv` command. Raises ChildError."""
        command = [
            sys.executable,
            "-m",
            "hotkv_client.command.cli",
            *arguments,
            "--target",
            self.target,
        ]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
        if done.returncode:
            raise ChildError(f"hotkv {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.cli("status", "--json"))
        return status

    def counter(self, name: str) -> float:
        """Raises KeyError if there is none."""
        return float(self.status()["counters"][name])

    def wait_for_stores(self) -> None:
        """Until a block is stored and no transfer in flight, or the deadline."""
        deadline_s = time.monotonic() + STORE_DEADLINE_S
        while time.monotonic() < deadline_s:
            counters = self.status()["counters"]
            if counters["stored_bytes_total"] and not counters["transfers_in_flight"]:
                return
            time.sleep(0.2)
