"""Real servers and vLLM engines as child processes."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from demo.logs import root_lines
from hotkv_client.admin import AdminClient
from hotkv_proto.errors import HotKVError
from tests.support.daemons import ForkedServer, start_server
from tests.support.waiting import wait_for
from tests.vllm.nursery import nursery
from tests.vllm.tiny import engine_args, transfer_config


class Daemon:
    """A restart keeps the arena."""

    def __init__(self, folder: Path, arena: str = "64MiB") -> None:
        self.flags: list[str] = []
        self.folder = folder
        self.target = f"unix:{folder}/grpc.sock"
        self._arena = arena
        memory = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else folder
        self._arena_folder = memory / f"hotkv-test-{uuid.uuid4().hex[:8]}"
        self.process: ForkedServer | subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self, timeout_s: float = 180.0) -> "Daemon":
        arguments = ["--runtime-dir", str(self.folder), "--arena.dir", str(self._arena_folder)]
        arguments += ["--arena.bytes", self._arena, "--http.port", "0", *self.flags]
        self.process = start_server(*arguments)
        process = self.process

        def answers() -> bool:
            assert process.poll() is None, f"hotkv-server ended with {process.returncode}"
            with contextlib.suppress(HotKVError), AdminClient(self.target, 1.0) as admin:
                return bool(admin.info())
            return False

        wait_for(answers, "hotkv-server", timeout_s)
        return self

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)

    def overwrite_arena(self) -> None:
        """Its first 64 MiB with zeros, under a running server."""
        with (self._arena_folder / "arena").open("r+b") as file:
            file.write(bytes(64 << 20))

    def lose_arena(self) -> None:
        """As a reboot does."""
        self.kill()
        shutil.rmtree(self._arena_folder)

    def stop(self) -> None:
        """By SIGTERM, as a service manager."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()
        shutil.rmtree(self._arena_folder, ignore_errors=True)

    def counter(self, name: str) -> float:
        return float(self.admin("info")["counters"][name])

    def admin(self, what: str, **arguments: Any) -> Any:
        with AdminClient(self.target, 5.0) as client:
            return getattr(client, what)(**arguments)


@contextlib.contextmanager
def own_daemon() -> Iterator[Daemon]:
    """Not started. A short folder: a Unix socket's path has at most 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="hotkv-"))
    one = Daemon(folder / "run")
    try:
        yield one
    finally:
        one.stop()
        shutil.rmtree(folder, ignore_errors=True)


PATIENT = {"hotkv_vllm.worker.rank_stores.FLUSH_TIMEOUT_S": 5.0}
"""For `constants` of an engine: on a busy machine, too, no store is revoked."""


class EngineProcess:
    """target: None: no connector.
    vllm: folder of another vLLM.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        target: str | None,
        *,
        connector: dict[str, Any] | None = None,
        driver: str = "engine_driver.py",
        vllm: Path | None = None,
        **arguments: Any,
    ) -> None:
        settings = engine_args(model, **arguments)
        if target is not None:
            ours = {"lookup_timeout_s": 30.0, **(connector or {})}
            settings["kv_transfer_config"] = transfer_config(target=target, **ours)
        self.log_path = log
        self._log = log.open("wb")
        self.process = nursery(vllm).fork(driver, self._log)
        self._send(settings)
        self._ready: dict[str, Any] | None = None
        self._is_stopping = False

    def ready(self) -> "EngineProcess":
        if self._ready is None:
            self._ready = self.answer()
        return self

    def ask(self, operation: str, **arguments: Any) -> dict[str, Any]:
        self.begin(operation, **arguments)
        return self.answer()

    def ask_each(self, prompts: list[list[int]], max_tokens: int) -> dict[str, list[Any]]:
        """In a batch bfloat16 is rounded differently, which can change a token."""
        answers = [self.ask("generate", prompts=[p], max_tokens=max_tokens) for p in prompts]
        names = ("tokens", "logprobs", "cached")
        return {name: [answer[name][0] for answer in answers] for name in names}

    def begin(self, operation: str, **arguments: Any) -> None:
        self.ready()
        self._send({"op": operation, **arguments})

    def answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        assert line, f"the engine ended ({self.process.wait(10)}):\n{self._why()}"
        answer: dict[str, Any] = json.loads(line)
        assert "error" not in answer, f"{answer['error']}\n{self._why()}"
        return answer

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def _why(self) -> str:
        return "\n".join(root_lines(self.log()))

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        self._log.close()

    def begin_stop(self) -> None:
        """An engine that refuses to start closes its pipe just before it ends."""
        if not self._is_stopping and self.process.poll() is None:
            self._is_stopping = True
            with contextlib.suppress(BrokenPipeError):
                self._send({"op": "stop"})

    def stop(self) -> None:
        self.begin_stop()
        if self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        self.kill()

    def _send(self, value: dict[str, Any]) -> None:
        self.process.stdin.write(json.dumps(value).encode() + b"\n")
        self.process.stdin.flush()


class Engines:
    """`start` doesn't wait."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: list[EngineProcess] = []

    def __iter__(self) -> Iterator[EngineProcess]:
        return iter(self._made)

    def start(self, model: Path, target: str | None, **settings: Any) -> EngineProcess:
        log = self._folder / f"engine{len(self._made)}.log"
        self._made.append(EngineProcess(model, log, target, **settings))
        return self._made[-1]

    def stop(self) -> None:
        for one in self._made:
            one.begin_stop()
        for one in self._made:
            one.stop()
