"""Does what an operator does (`make walk`), while a vLLM engine with a real model sends
requests. `--release DIR` uses the wheel there. Ends with status 1 at the first failure.
Prometheus is optional (`make programs`)."""

import argparse
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from demo import prompts
from demo.processes import (
    ROOT,
    VLLM_SETTINGS,
    Engine,
    EngineSettings,
    ends_cleanly,
    prepare_model,
    runtime_folder,
)
from tests.deploy.prometheus_process import RULES, Prometheus
from tests.support.ports import free_port
from tests.support.waiting import wait_for
from tests.vllm.http_server import HttpServer

ARENA_BYTES = 256 << 20
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 6, 300, 4
QUESTIONS = ("Is it working?", "Does it pay?", "What limits it?")
SHORTEST_WAY = (
    "vllm.entrypoints.openai.api_server",
    *("--kv-transfer-config.kv_connector", "HotKVConnector"),
    *("--kv-transfer-config.kv_role", "kv_both"),
)
WAIT_S = 90.0
MAX_ASKS = 5
wait = functools.partial(wait_for, within_s=WAIT_S)


def say(step: str, came: str) -> None:
    print(f"walk: {step}: {came}", flush=True)


class Installed:
    """Hotkv's wheel, of this tree or of a release."""

    def __init__(self, folder: Path, release: Path | None) -> None:
        self.bin = folder / "environment" / "bin"
        began_s = time.monotonic()
        subprocess.run([sys.executable, "-m", "venv", self.bin.parent], check=True)
        if release is None:
            release = folder / "wheel"
            build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(release)]
            subprocess.run([*build, str(ROOT)], check=True, capture_output=True)
        (self.wheel,) = release.glob("*.whl")
        self.pip(f"{self.wheel}[server]")
        say("install", f"pip install {self.wheel.name}[server], {time.monotonic() - began_s:.0f} s")

    def pip(self, *arguments: str) -> None:
        subprocess.run([self.bin / "pip", "install", "-qq", *arguments], check=True)

    def hotkv(self, *arguments: str, status: int | None = 0) -> str:
        """The command's output. Another exit status than `status` raises AssertionError; None
        allows all."""
        command = [self.bin / "hotkv", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
        said = f"hotkv {' '.join(arguments)} ended with {done.returncode}: {done.stderr}"
        assert status in (None, done.returncode), said
        return done.stdout


class Service:
    """The installed server, which the walk restarts as a service manager would."""

    def __init__(self, installed: Installed, folder: Path) -> None:
        self.installed, self.folder, self.port = installed, folder, free_port()
        self.target = f"unix:{folder}/run/grpc.sock"
        self.url = f"http://127.0.0.1:{self.port}"
        (folder / "run").mkdir(mode=0o700)
        self.config = folder / "hotkv.toml"
        self.config.write_text(
            f'runtime_dir = "{folder}/run"\n'
            f'[arena]\nbytes = {ARENA_BYTES}\ndir = "{folder}/arena"\n'
            f"[http]\nport = {self.port}\n"
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        command = [self.installed.bin / "hotkv-server", "run", "--config", str(self.config)]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        wait(lambda: self.asks("/readyz") == 200, "the server is ready")

    def ended(self, seconds: float = WAIT_S) -> int:
        assert self._process is not None
        return self._process.wait(seconds)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(60)

    def asks(self, path: str) -> int:
        """HTTP status; 0: no answer."""
        url = self.url + path
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as reply:
            return int(reply.status)
        return 0

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=10) as reply:
            body: bytes = reply.read()
            return body

    def num_blocks(self) -> int:
        spaces = json.loads(self.hotkv("status", "--json"))["key_spaces"]
        return sum(space["block_count"] for space in spaces)

    def hotkv(self, *arguments: str, status: int | None = 0) -> str:
        return self.installed.hotkv("--target", self.target, *arguments, status=status)


class Traffic:
    """Sends one request after the other. A prompt must always get the same answer."""

    def __init__(self, engine: Engine, model: Path) -> None:
        self._engine = engine
        self.prompts = [prompts.token_ids(model, seed, PROMPT_TOKENS) for seed in range(PROMPTS)]
        self._expected: dict[int, tuple[int, ...]] = {}
        self.num_requests = self.num_hits = 0
        self.failures: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        number = 0
        while not self._over.is_set():
            at = number % len(self.prompts)
            number += 1
            try:
                # So that only hotkv can serve a hit.
                self._engine.reset_prefix_cache()
                answer = self._engine.generate(self.prompts[at], ANSWER_TOKENS)
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                return
            self.num_requests += 1
            self.num_hits += answer.hit_tokens > 0
            if self._expected.setdefault(at, answer.token_ids) != answer.token_ids:
                self.failures.append(f"prompt {at} was answered otherwise than before")

    @contextlib.contextmanager
    def flowing(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join(60)

    def goes_on(self, what: str) -> None:
        """Raises AssertionError if a request fails."""
        before = self.num_requests
        self._wait(lambda: self.num_requests >= before + 3, what)

    def hits_again(self, what: str) -> None:
        before = self.num_hits
        self._wait(lambda: self.num_hits > before, what)

    def _wait(self, holds: Callable[[], bool], what: str) -> None:
        wait(lambda: holds() or bool(self.failures), what)
        assert not self.failures, "; ".join(self.failures)


def heads(service: Service, engine: Engine) -> None:
    """The engine logs once that hotkv is on; `hotkv status` begins with answers to QUESTIONS."""

    def lines() -> list[str]:
        text = engine.log.read_text(errors="replace").splitlines()
        return [line.partition("hotkv on: ")[2] for line in text if "hotkv on: " in line]

    wait(lambda: bool(lines()), "the engine says that hotkv is on")
    assert len(lines()) == 1, f"the engine says it more than once: {lines()}"
    said = service.hotkv("status").splitlines()[: len(QUESTIONS)]
    asked = [line.partition("?")[0] + "?" for line in said]
    assert asked == list(QUESTIONS), f"hotkv status does not open with its sentences: {said}"
    say("engine's log", f"hotkv on: {lines()[0]}")
    say("status", " / ".join(" ".join(line.partition("?")[2].split()) for line in said))


def shortest_way(service: Service, model: Path, folder: Path) -> None:
    """The README's command without JSON."""
    command = [*SHORTEST_WAY, "--model", str(model), "--served-model-name", "tiny"]
    command += ["--enable-prompt-tokens-details", "--enforce-eager", "--max-model-len", "2048"]
    environment = {"HOTKV_TARGET": service.target, "VLLM_SERVER_DEV_MODE": "1"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", **VLLM_SETTINGS}
    server = HttpServer(command, folder / "http.log", is_forked=False, environment=environment)
    ask = {"prompt": prompts.token_ids(model, 99, PROMPT_TOKENS), "temperature": 0}
    try:
        server.ready()
        answers, hits = [], [0]
        before = service.num_blocks()
        # Until it hits: on a busy machine the connector may stop waiting for a lookup.
        while not hits[-1] and len(answers) < MAX_ASKS:
            answers.append(server.post("/v1/completions", max_tokens=ANSWER_TOKENS, **ask))
            details = answers[-1]["usage"]["prompt_tokens_details"] or {}
            hits.append(int(details.get("cached_tokens") or 0))
            wait(lambda: service.num_blocks() > before, "the prompt is stored")
            wait(lambda: server.post("/reset_prefix_cache")["success"], "vLLM's cache is emptied")
    finally:
        server.stop()
    assert not hits[1], "a new prompt hit"
    assert hits[-1], "the prompt did not hit"
    texts = {answer["choices"][0]["text"] for answer in answers}
    assert len(texts) == 1, f"the answers differ: {texts}"
    say("shortest way", f"{' '.join(SHORTEST_WAY[1:])}: {hits[-1]} of {PROMPT_TOKENS} tokens hit")


def look(service: Service) -> None:
    findings = json.loads(service.hotkv("doctor", "--json", status=None))
    say("doctor", f"{len(findings)} findings")
    top = service.hotkv("top", "--count", "1", "--interval", "0.5")
    assert "host" in top and "tokens/s" in top, f"top shows no tier or engine: {top}"
    say("top", top.splitlines()[1].strip())
    savings = service.hotkv("savings")
    assert "saved" in savings, savings
    say("savings", savings.splitlines()[1])
    page = service.get("/").decode()
    assert "<title>" in page, "the page is missing"
    say("page", f"{len(page) / 1000:.0f} KB")


@contextlib.contextmanager
def watched(service: Service, folder: Path) -> Iterator[Prometheus | None]:
    """With hotkv's alert rules, which wait only a second. None if Prometheus is not installed."""
    if shutil.which("prometheus") is None:
        say("prometheus", "left out: no prometheus here")
        yield None
        return
    rules = folder / "rules.yml"
    rules.write_text(re.sub(r"^(\s*for: ).*$", r"\g<1>1s", RULES.read_text(), flags=re.MULTILINE))
    watching = Prometheus(folder, service.port, rules)
    try:
        wait(watching.is_ready, "Prometheus answers")
        wait(lambda: watching.values('up{job="hotkv"}') == [1.0], "Prometheus sees the server")
        say("prometheus", "scrapes the server, with hotkv's rules")
        yield watching
    finally:
        watching.close()


def alert(service: Service, traffic: Traffic, watching: Prometheus | None) -> None:
    """An alert fires and resolves; requests are answered, and hit after the restart."""

    def firing() -> set[str]:
        assert watching is not None
        found = watching.ask("alerts")["alerts"]
        return {a["labels"]["alertname"] for a in found if a["state"] == "firing"}

    os.kill(service.pid, signal.SIGKILL)
    service.ended()
    if watching is not None:
        wait(lambda: "HotKVDown" in firing(), "the alert fires")
    traffic.goes_on("requests are answered while the server is dead")
    service.start()
    if watching is not None:
        wait(lambda: "HotKVDown" not in firing(), "the alert resolves")
    traffic.hits_again("requests hit again")
    fired = "HotKVDown fired and resolved; " if watching is not None else ""
    say("kill -9", f"{fired}engines went on, and hit again after the restart")


def upgrade(service: Service, traffic: Traffic) -> None:
    """Requests are answered meanwhile, and the cache is kept."""
    before = json.loads(service.hotkv("status", "--json"))
    service.hotkv("drain")
    assert service.ended() == 0, "a drained server ends with status 0"
    service.installed.pip("--force-reinstall", "--no-deps", str(service.installed.wheel))
    traffic.goes_on("requests are answered while the server is upgraded")
    service.start()
    after = json.loads(service.hotkv("status", "--json"))
    assert after["epoch"] == before["epoch"], "the cache was lost"
    traffic.hits_again("requests hit again")
    say(
        "upgrade",
        f"drained, reinstalled, started; the cache is kept ({service.num_blocks()} blocks)",
    )


def reload(service: Service) -> None:
    service.config.write_text('log_level = "debug"\n' + service.config.read_text())
    os.kill(service.pid, signal.SIGHUP)
    log = service.folder / "log"
    wait(lambda: "settings reloaded changed=log_level" in log.read_text(), "the settings are read")
    say("reload", "log_level = debug without a restart")


def walk(folder: Path, shared_memory: Path, release: Path | None) -> None:
    installed = Installed(folder, release)
    bench = json.loads(installed.hotkv("bench", "--seconds", "3", "--arena-mib", "256", "--json"))
    load = next(row for row in bench["rows"] if row["what"] == "load")
    say("bench", f"loads {load['value']:.1f} {load['unit']}; {load['means']}")
    service = Service(installed, shared_memory)
    model = prepare_model()
    with contextlib.ExitStack() as stack:
        stack.callback(service.stop)
        service.start()
        say("start", f"ready, {service.target}")
        settings = EngineSettings(str(model), service.target)
        engine = stack.enter_context(Engine("vllm", settings, folder))
        engine.wait_ready()
        traffic = Traffic(engine, model)
        with traffic.flowing():
            traffic.goes_on("requests are answered")
            traffic.hits_again("requests hit")
            heads(service, engine)
            look(service)
            with watched(service, folder) as watching:
                alert(service, traffic, watching)
                upgrade(service, traffic)
            reload(service)
        assert not traffic.failures, "; ".join(traffic.failures)
        say("traffic", f"{traffic.num_requests} requests, {traffic.num_hits} hits, 0 failed")
        shortest_way(service, model, folder)


def main() -> int:
    parser = argparse.ArgumentParser(description="An operator's walk.")
    parser.add_argument("--release", type=Path, help="take the wheel of this folder")
    options = parser.parse_args()
    with (
        ends_cleanly(),
        tempfile.TemporaryDirectory(prefix="hotkv-walk-") as folder,
        runtime_folder(ARENA_BYTES + (1 << 29)) as shared_memory,
    ):
        try:
            walk(Path(folder), shared_memory, options.release)
        except (AssertionError, subprocess.SubprocessError) as error:
            print(f"walk: {error}", file=sys.stderr)
            log = shared_memory / "log"
            if log.exists():
                print("\n".join(log.read_text().splitlines()[-15:]), file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
