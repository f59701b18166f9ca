"""A server that `hotkv bench` has for itself: a process of the installed `hotkv-server`, with an
arena and sockets of its own, which go with it."""

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
from pathlib import Path
from typing import Any

from hotkv_client.admin import AdminClient
from hotkv_proto.errors import HotKVError

SHARED_MEMORY = Path("/dev/shm")
START_S, STOP_S = 120.0, 20.0
TIERS_CHECK_S = 120.0
COMMAND = (sys.executable, "-m", "hotkv_server")
PREFIX = "hotkv-bench-"
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class BenchError(Exception):
    """The benchmark can't run; the message says why and what to do."""


@contextlib.contextmanager
def own_server(arena_bytes: int, shared_memory: Path = SHARED_MEMORY) -> Iterator[str]:
    """The target of a new server with so large an arena. Raises BenchError."""
    free = shutil.disk_usage(shared_memory).free
    if free < arena_bytes + arena_bytes // 4:
        raise BenchError(
            f"{shared_memory} has {free >> 20} MiB free; the benchmark takes "
            f"{arena_bytes * 5 // 4 >> 20} MiB: make room, or give a smaller --arena-mib"
        )
    with contextlib.ExitStack() as stack:
        folder, memory = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX, dir=at)))
            for at in (None, shared_memory)
        )
        command = [*COMMAND, "run", "--runtime-dir", str(folder), "--arena.dir", f"{memory}/arena"]
        command += ["--arena.bytes", str(arena_bytes), "--arena.keep", "false", "--http.port", "-1"]
        log = folder / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(),
                preexec_fn=_die_with_parent,
            )
        stack.callback(_stop, process)
        target = f"unix:{folder}/grpc.sock"
        _wait_ready(process, target, log)
        yield target


def _environment() -> dict[str, str]:
    """Without the settings of a server in use."""
    return {name: value for name, value in os.environ.items() if not name.startswith("HOTKV_")}


def _die_with_parent() -> None:
    """Whatever ends the benchmark ends its server."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_ready(process: "subprocess.Popen[bytes]", target: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with contextlib.suppress(HotKVError), AdminClient(target, 1.0) as admin:
            if admin.ping() and _is_settled(admin.info()):
                return
        time.sleep(0.1)
    lines = log.read_text(errors="replace").strip().splitlines()
    why = lines[-1] if lines else "it said nothing"
    if "No module named" in why:
        why = "it is not installed: pip install 'hotkv[server]'"
    raise BenchError(f"hotkv-server did not start: {why}")


def _is_settled(info: dict[str, Any]) -> bool:
    return info["state"] == "ready" and not info["progress"]


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def check_tiers(flags: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """The timings of `hotkv-server tiers check` with these flags, and what is wrong with tiers."""
    command = [*COMMAND, "tiers", "check", "--json", *flags]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIERS_CHECK_S, env=_environment()
        )
    except subprocess.TimeoutExpired:
        return [], [f"tiers: no answer within {TIERS_CHECK_S:g} s"]
    if not done.stdout.strip():
        said = done.stderr.strip().splitlines()
        return [], [f"tiers: {said[-1].removeprefix('hotkv-server: ') if said else 'no answer'}"]
    answer = json.loads(done.stdout)
    return answer["timings"], [f"{name}: {why}" for name, why in answer["problems"].items()]
