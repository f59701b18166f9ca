"""Tests compose.yaml with a real vLLM: a long prompt, restart of the engine, kill of the server,
stop. `python -m tests.deploy.compose [--folder DIR] [--keep]`.

Docker Compose runs the unchanged file with podman (`podman.py`), without a registry: small
Debian images replace `python:3.12-slim` and vLLM's (`vllm_base.py`). Needs root, `podman`,
`docker-compose`, `mmdebstrap`, `iptables`, the package index, minutes, and 9 GB in DIR, removed
without `--keep`.
"""

import argparse
import contextlib
import functools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.processes import prepare_model
from tests.deploy import debian, image, podman, vllm_base
from tests.deploy.debian import Steps, program
from tests.deploy.dockerfile import ROOT
from tests.deploy.podman import Podman
from tests.support.waiting import wait_for

BASE, VLLM_BASE = image.BASE, "docker.io/library/vllm-stands-in:cpu"
HOTKV, VLLM, DIRECTORIES = "hotkv_hotkv_1", "hotkv_vllm_1", "hotkv_directories_1"
"""As Compose 1.29 names its containers."""
MODEL, USER = "/smollm2", 10001
ARENA = Path("/dev/shm/hotkv")
LONG = " ".join(
    f"Item {n} costs {n * 7 % 101} coins and weighs {n * 13 % 89} grams." for n in range(150)
)
UP_S, STEP_S = 300.0, 60.0
SMALL = {
    # As in the demo: no warm-up, no compilation; with several cores, one is left to others.
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def override(model: Path) -> dict[str, Any]:
    build, volumes = {"network": "host"}, [f"{model}:{MODEL}:ro"]
    services = {
        "directories": {"build": build},
        "hotkv": {"ulimits": podman.hard_limits()},
        "vllm": {"build": build, "environment": SMALL, "volumes": volumes},
    }
    return {"services": services}


def left_out() -> list[str]:
    found = list(podman.LEFT_OUT)
    memlock = podman.hard_limits()["memlock"]
    if memlock != resource.RLIM_INFINITY:
        found.append(f"hotkv's ulimits.memlock: {memlock} bytes, this machine's most, not -1")
    changed = " ".join(f"{name}={value}" for name, value in SMALL.items())
    found.append(f"vLLM's image: a Debian with vllm-cpu, no triton; {changed}")
    found.append("hotkv's base: Debian with its Python, not python:3.12-slim")
    return found


class Compose:
    def __init__(self, machine: Podman, folder: Path, model: Path) -> None:
        self.podman = machine
        added = folder / "run" / "override.json"
        added.write_text(json.dumps(override(model)))
        files = [f"--file={ROOT / 'compose.yaml'}", f"--file={added}"]
        self._command = [program("docker-compose"), "--project-name=hotkv", *files]
        self._command.append(f"--project-directory={ROOT}")
        self._environment = {
            **machine.environment,
            "DOCKER_HOST": f"unix://{machine.socket}",
            "MODEL": MODEL,
            "HOTKV_ARENA": "512MiB",
            "VLLM_BASE": VLLM_BASE,
        }

    def __call__(self, *arguments: str) -> str:
        """Exits with the containers' logs if the command fails."""
        done = subprocess.run(
            [*self._command, *arguments], capture_output=True, text=True, env=self._environment
        )
        if done.returncode:
            said = done.stdout[-3000:] + done.stderr[-3000:]
            self.fail(f"compose {' '.join(arguments)}: status {done.returncode}\n{said}")
        return done.stdout.strip()

    def fail(self, what: str) -> None:
        said = [what]
        for name in (HOTKV, VLLM):
            words = [*self.podman.command, "logs", "--tail=40", name]
            done = subprocess.run(words, capture_output=True, text=True)
            said.append(f"--- {name}\n{done.stdout}{done.stderr}")
        raise SystemExit("\n".join(said))

    def state(self, container: str) -> dict[str, Any]:
        return dict(self.podman.inspect(container)["State"])

    def counters(self) -> dict[str, float]:
        status = json.loads(self("exec", "-T", "hotkv", "hotkv", "status", "--json"))
        return {name: float(value) for name, value in status["counters"].items()}

    def is_healthy(self) -> bool:
        words = [*self.podman.command, "healthcheck", "run", HOTKV]
        return subprocess.run(words, capture_output=True).returncode == 0


def get(url: str, body: dict[str, object] | None = None, **headers: str) -> str:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=STEP_S) as answer:
        text: str = answer.read().decode()
    return text


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    prompt_tokens: int
    took_s: float


def ask(prompt: str, max_tokens: int = 40) -> Answer:
    begun_s = time.monotonic()
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    answer = json.loads(get("http://127.0.0.1:8000/v1/completions", body))
    took_s = time.monotonic() - begun_s
    return Answer(answer["choices"][0]["text"], answer["usage"]["prompt_tokens"], took_s)


def metric(url: str, name: str) -> float:
    lines = [line for line in get(url).splitlines() if line.startswith(name)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def vllm_answers() -> bool:
    with contextlib.suppress(OSError):
        get("http://127.0.0.1:8000/health")
        return True
    return False


def make_bases(machine: Podman, folder: Path, steps: Steps) -> None:
    root = folder / "root"
    certificates = "ca-certificates.crt"

    def debian_root(*more: str) -> None:
        debian.make_root(root, (*image.PACKAGES, *more))
        python = root / "usr/bin/python"
        python.unlink(missing_ok=True)
        python.symlink_to("python3")
        # Else builds can't reach the package index here.
        trusted = (debian.CERTIFICATES / certificates).read_bytes()
        (root / "etc/ssl/certs" / certificates).write_bytes(trusted)

    with steps.step("a small Debian, in place of python:3.12-slim") as seen:
        if not machine.has(BASE):
            debian_root()
            import_image(machine, BASE, functools.partial(vllm_base.pack, root, packages={}))
        seen.append(machine("image", "inspect", "--format={{.Size}}", BASE) + " bytes")
    with steps.step("and one with vLLM, in place of vLLM's image") as seen:
        if not machine.has(VLLM_BASE):
            shutil.rmtree(root, ignore_errors=True)
            debian_root("libnuma1")
            vllm_base.make_environment(root, folder)
            packages = vllm_base.closure()
            changes = [f"--change=ENV {k}={v}" for k, v in vllm_base.ENVIRONMENT.items()]
            write = functools.partial(vllm_base.pack, root, packages=packages)
            import_image(machine, VLLM_BASE, write, *changes)
            seen.append(f"{len(packages)} packages")
        seen.append(machine("image", "inspect", "--format={{.Size}}", VLLM_BASE) + " bytes")
    shutil.rmtree(root, ignore_errors=True)


def import_image(machine: Podman, name: str, write: Callable[[Any], None], *changes: str) -> None:
    words = [*machine.command, "import", "--quiet", *changes, "-", name]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as importing:
        assert importing.stdin is not None
        with importing.stdin:
            write(importing.stdin)
    if importing.returncode:
        raise SystemExit(f"podman import {name}: status {importing.returncode}")


def owner(path: Path) -> str:
    found = path.stat()
    return f"{found.st_uid}:{found.st_gid} {found.st_mode & 0o7777:04o}"


def check_files(compose: Compose) -> str:
    """Returns owners and modes as text."""
    volume = compose.podman("volume", "inspect", "--format={{.Mountpoint}}", "hotkv_sockets")
    sockets = Path(volume)
    found = {
        "arena's directory": (owner(ARENA), f"{USER}:{USER} 0700"),
        "arena": (owner(ARENA / "arena"), f"{USER}:{USER} 0600"),
        "sockets' directory": (owner(sockets), f"{USER}:{USER} 0755"),
        "grpc.sock": (owner(sockets / "grpc.sock"), f"{USER}:{USER} 0660"),
    }
    for name, (is_so, should_be) in found.items():
        assert is_so == should_be, f"{name}: {is_so}, not {should_be}"
    groups = compose("exec", "-T", "vllm", "id", "-G").split()
    assert str(USER) in groups, f"vLLM's groups: {groups}"
    reached = sorted(path.name for path in sockets.glob("*.sock"))
    assert "admin.sock" not in reached, f"vLLM's container has {reached}"
    return ", ".join(f"{name} {is_so}" for name, (is_so, _) in found.items())


def check_rights(compose: Compose) -> str:
    lines = Path(f"/proc/{compose.state(HOTKV)['Pid']}/status").read_text().splitlines()
    status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    none = ["0" * 16]
    wanted = {"Uid": [str(USER)] * 4, "CapEff": none, "CapBnd": none, "NoNewPrivs": ["1"]}
    for name, value in wanted.items():
        assert status[name] == value, f"the server's {name}: {status[name]}"
    write = [*compose.podman.command, "exec", "--user=0", HOTKV, "touch", "/opt/x"]
    written = subprocess.run(write, capture_output=True)
    assert b"Read-only" in written.stderr, "its root can be written"
    filtered = f"seccomp mode {status['Seccomp'][0]}"
    return f"user {USER}, no capability, no new privileges, read-only root, {filtered}"


def walk(compose: Compose, steps: Steps) -> None:
    with steps.step("compose up: directories, then hotkv healthy, then vLLM") as seen:
        with compose.podman.health_checks(HOTKV):
            compose("up", "-d")
        first = compose.state(DIRECTORIES)
        assert first["ExitCode"] == 0, f"directories ended with {first['ExitCode']}"
        started = [compose.state(name)["StartedAt"] for name in (HOTKV, VLLM)]
        times = [first["FinishedAt"], *started]
        assert times == sorted(times), f"they started in another order: {times}"
        seen.append(" < ".join(one[11:19] for one in times))
        begun_s = time.monotonic()
        wait_for(vllm_answers, "vLLM answers", UP_S)
        seen.append(f"vLLM answers {time.monotonic() - begun_s:.0f} s after that")
    with steps.step("owners, modes and rights of arena, sockets and server") as seen:
        seen += [check_files(compose), check_rights(compose)]
    with steps.step("the status page opens with the token of the volume"):
        token = compose("exec", "-T", "hotkv", "cat", "/page/token")
        page = "http://127.0.0.1:9433/api/v1/status"
        assert "verdicts" in json.loads(get(page, Authorization=f"Bearer {token}"))
        try:
            get(page)
        except urllib.error.HTTPError as refused:
            assert refused.code == 401, refused
        else:
            raise AssertionError("the page opens without a token")
    with steps.step("a long prompt over 127.0.0.1:8000") as seen:
        cold = ask(LONG)
        wait_for(lambda: is_stored(compose, cold), "its blocks are stored", STEP_S)
        stored = compose.counters()["stored_blocks_total"]
        seen.append(f"{cold.prompt_tokens} tokens, {cold.took_s:.1f} s, {stored:.0f} blocks stored")
    with steps.step("again, by vLLM's own cache") as seen:
        # The first answer may differ by rounding (larger batches); the reference used vLLM's own
        # cache.
        own = ask(LONG)
        seen.append(f"{own.took_s:.1f} s: {own.text!r}, before: {cold.text!r}")
    with steps.step("vLLM's container restarts; the prompt's blocks come from hotkv") as seen:
        seen.append(again(compose, own))
    with steps.step("kill -9 of the server: Compose's policy restarts it, vLLM goes on") as seen:
        seen += kill(compose, stored)
    with steps.step("another engine loads from the server that was restarted") as seen:
        seen.append(again(compose, own))
    with steps.step("compose down: both end by themselves") as seen:
        seen.append(down(compose))
    with steps.step("compose up again: a new container goes on with the arena") as seen:
        with compose.podman.health_checks(HOTKV):
            compose("up", "-d", "hotkv")
            wait_for(compose.is_healthy, "hotkv is healthy", STEP_S)
        restored = compose.counters()["restored_blocks_total"]
        assert restored >= stored, f"{restored:.0f} blocks of {stored:.0f}"
        seen.append(f"{restored:.0f} blocks restored")
        compose("down", "--volumes")


def is_stored(compose: Compose, answer: Answer) -> bool:
    metrics = get("http://127.0.0.1:8000/metrics")
    (size,) = re.findall(r'^vllm:cache_config_info.*\bblock_size="(\d+)"', metrics, re.MULTILINE)
    counters = compose.counters()
    has_all = counters["stored_blocks_total"] >= answer.prompt_tokens // int(size)
    return has_all and not counters["transfers_in_flight"]


def again(compose: Compose, before: Answer) -> str:
    hits = "vllm:external_prefix_cache_hits_total"
    before_blocks = metric("http://127.0.0.1:9433/metrics", "hotkv_loaded_blocks_total")
    begun_s = time.monotonic()
    compose("restart", "vllm")
    stopped_s = time.monotonic() - begun_s
    wait_for(vllm_answers, "vLLM answers", UP_S)
    assert metric("http://127.0.0.1:8000/metrics", hits) == 0, "vLLM has hits already"
    answer = ask(LONG)
    assert answer.text == before.text, f"{answer} is not {before}"
    loaded = metric("http://127.0.0.1:9433/metrics", "hotkv_loaded_blocks_total") - before_blocks
    hit, tokens = metric("http://127.0.0.1:8000/metrics", hits), answer.prompt_tokens
    assert loaded > 0 and hit > tokens * 0.9, f"{loaded:.0f} blocks, {hit:.0f} tokens hit"
    came = f"{loaded:.0f} blocks loaded, {hit:.0f} of {tokens} tokens hit"
    return f"restarted in {stopped_s:.1f} s; same text in {answer.took_s:.1f} s, {came}"


def kill(compose: Compose, stored: float) -> list[str]:
    """Kills the server while requests run: each is answered, and the server comes back with its
    `stored` blocks."""
    ended = threading.Event()
    answered: list[str] = []

    def go_on() -> None:
        while not ended.is_set():
            try:
                answered.append(f"ok {ask(f'{len(answered)} and some more of it', 4).text}")
            except (OSError, ValueError) as error:
                answered.append(f"failed: {error}")

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        wait_for(lambda: bool(answered), "vLLM answers", STEP_S)
        pid = compose.state(HOTKV)["Pid"]
        os.kill(pid, signal.SIGKILL)
        count, begun_s = len(answered), time.monotonic()

        def is_back() -> bool:
            state = compose.state(HOTKV)
            return state["Running"] and state["Pid"] not in (0, pid) and compose.is_healthy()

        wait_for(is_back, "the server is healthy again", STEP_S)
        took_s = time.monotonic() - begun_s
        wait_for(lambda: len(answered) > count + 1, "vLLM answers on", STEP_S)
    finally:
        ended.set()
        thread.join()
    failed = [one for one in answered if one.startswith("failed")]
    assert not failed, f"vLLM: {failed}"
    assert compose.podman.inspect(HOTKV)["RestartCount"] == 1, "not by the policy"
    restored = compose.counters()["restored_blocks_total"]
    assert restored >= stored, f"{restored:.0f} blocks of {stored:.0f}"
    return [
        f"healthy after {took_s:.1f} s, {restored:.0f} blocks restored",
        f"{len(answered)} requests answered, {len(answered) - count} of them after the kill",
    ]


def down(compose: Compose) -> str:
    waits = ([*compose.podman.command, "wait", name] for name in (HOTKV, VLLM))
    waiting = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for words in waits]
    begun_s = time.monotonic()
    compose("down")
    took_s = time.monotonic() - begun_s
    statuses = [process.communicate()[0].strip() for process in waiting]
    assert statuses == ["0", "0"], f"statuses: {statuses}"
    assert (ARENA / "arena").exists(), "the arena is gone"
    return f"{took_s:.1f} s, status 0 of both"


def inside(folder: Path) -> None:
    machine, steps = Podman(folder), Steps()
    machine.forget()
    print("left out:", *(f"  {one}" for one in left_out()), sep="\n", flush=True)
    with steps.step("SmolLM2"):
        model = prepare_model()
    make_bases(machine, folder, steps)
    compose = Compose(machine, folder, model)
    with machine.service(), steps.step("compose build: hotkv, and vLLM with the connector") as seen:
        compose("build")
        form = "{{.Repository}}:{{.Tag}} {{.Size}}"
        seen += sorted(
            line for line in machine("images", f"--format={form}").splitlines() if "hotkv" in line
        )
    podman.leave_network()
    with machine.service():
        try:
            walk(compose, steps)
        except (AssertionError, OSError) as error:
            compose.fail(repr(error))
    print("all of it works")


def main() -> int:
    parser = argparse.ArgumentParser(description="Brings compose.yaml up.")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "hotkv-compose"
    )
    parser.add_argument("--keep", action="store_true", help="leave the images for the next run")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = options.folder.resolve()
    if os.environ.get(podman.INSIDE):
        inside(folder)
        return 0
    for name in ("podman", "docker-compose", "mmdebstrap", "iptables"):
        program(name)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return podman.enter(folder, "tests.deploy.compose", sys.argv[1:])
    finally:
        if not options.keep:
            shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
