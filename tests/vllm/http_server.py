"""vLLM's HTTP server as a child process, started with the command that README gives."""

import contextlib
import ctypes
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.vllm.nursery import PR_SET_PDEATHSIG
from tests.vllm.tiny import BLOCK_TOKENS, COMMON, MODELS, write_model
from tests.vllm.tokenizer import write_tokenizer

README = Path(__file__).parents[2] / "README.md"


def readme_command() -> list[str]:
    """The command of README's chapter on vLLM, in the form for vLLM's CPU package."""
    chapter = README.read_text().partition("## Give it to vLLM")[2].partition("\n## ")[0]
    command = next(block for block in chapter.split("\n\n") if block.startswith("    vllm serve MODEL"))
    module = re.search(r"`python (-m \S+ --model MODEL)`", chapter)
    assert module is not None, "README does not say how to start vLLM's CPU package"
    return [sys.executable, *module[1].split(), *shlex.split(command)[3:]]


def write_weights(folder: Path) -> Path:
    """Writes the tiny Llama with its weights as a safetensors file and a tokenizer. Returns the folder."""
    write_tokenizer(write_model(folder, "llama"))
    config = COMMON | MODELS["llama"]
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"model.embed_tokens": (config["vocab_size"], hidden), "lm_head": (config["vocab_size"], hidden), "model.norm": (hidden,)}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        shapes |= {f"{layer}.self_attn.{name}_proj": (size, hidden) for name, size in (("q", queries), ("k", keys), ("v", keys))}
        shapes |= {f"{layer}.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        shapes |= {f"{layer}.self_attn.o_proj": (hidden, queries), f"{layer}.mlp.down_proj": (hidden, inner)}
        shapes |= {f"{layer}.input_layernorm": (hidden,), f"{layer}.post_attention_layernorm": (hidden,)}
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        scale = 0.05 if "embed" in name else 1.5 * shape[-1] ** -0.5
        weights[f"{name}.weight"] = values * scale if len(shape) > 1 else 1.0 + 0.1 * values
    save_file(weights, folder / "model.safetensors")
    return folder


def _end_with_the_tests() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class HttpServer:
    """`python -m vllm…` on a free port of this machine."""

    def __init__(self, model: Path, target: str, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log_path = log
        command = [str(model) if word == "MODEL" else word.replace("unix:/run/hotkv/grpc.sock", target) for word in readme_command()]
        assert any(target in word for word in command)
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "tiny", "--enable-prompt-tokens-details"]
        command += ["--dtype", "float32", "--block-size", str(BLOCK_TOKENS), "--max-model-len", "2048", "--enforce-eager"]
        command += ["--kv-cache-memory-bytes", str(64 << 20)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "INFO"}
        self._log = log.open("ab")
        self.process = subprocess.Popen(command, env=environment, stdout=self._log, stderr=self._log, preexec_fn=_end_with_the_tests)

    def ready(self, timeout_s: float = 480.0) -> "HttpServer":
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            assert self.process.poll() is None, f"vLLM ended:\n{self.log()[-3000:]}"
            try:
                self.get("/health")
                return self
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        raise AssertionError(f"vLLM did not answer:\n{self.log()[-3000:]}")

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            text: str = answer.read().decode()
        return text

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._post(path, body))
        return answer

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a streamed answer; the last one holds the usage."""
        text = self._post(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def metrics(self) -> dict[str, float]:
        """Samples of vLLM's /metrics, by name, and by name and `source` where they have one."""
        found: dict[str, float] = {}
        for line in self.get("/metrics").splitlines():
            if line.startswith("vllm:"):
                name, _, value = line.rpartition(" ")
                source = re.search(r'source="(\w+)"', name)
                found[name.partition("{")[0] + (f" {source[1]}" if source else "")] = float(value)
        return found

    def _post(self, path: str, body: dict[str, Any]) -> str:
        data = json.dumps({"model": "tiny", **body}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            text: str = answer.read().decode()
        return text

    def kill(self) -> None:
        """kill -9 of all of vLLM, as a service manager does: vLLM's engine process outlives a server that is killed alone."""
        for pid in _family(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(30)
        self._log.close()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()
        self._log.close()


def _family(pid: int) -> list[int]:
    """A process and its descendants, but for Python's resource trackers: they unlink the shared memory of those that were killed."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        is_tracker = b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
    return ([] if is_tracker else [pid]) + [member for child in children for member in _family(child)]
