"""A Dockerfile read into stages, and its steps run on copies of this machine's file system: what a
builder would do, without one.

Knows the instructions that ours uses. `python -m tests.deploy.dockerfile FOLDER` builds the
repository's Dockerfile into folders there, runs the image, probes it with its own health check,
stops it, and prints what it saw as JSON. Needs root and a mount namespace of its own (`unshare
--mount`): each stage is an overlay over `/`, with this Python in place of the base image's, and
goes with the namespace.
"""

import contextlib
import fnmatch
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BASE_PATH = f"{sys.base_prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
READY_S = 60.0


@dataclass(slots=True)
class Stage:
    """One `FROM`. `steps`: instruction and its text, in order."""

    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def last(self, instruction: str) -> str:
        """The text that counts where an instruction may be given more than once. Raises IndexError
        where it is missing."""
        return [text for name, text in self.steps if name == instruction][-1]


def parse(text: str) -> list[Stage]:
    """The stages of a Dockerfile."""
    stages: list[Stage] = []
    lines = [
        line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")
    ]
    for line in "\n".join(lines).replace("\\\n", "").splitlines():
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(Stage(base, name))
        elif stages:
            stages[-1].steps.append((instruction, rest.strip()))
    return stages


def is_sent(path: str, ignored: str) -> bool:
    """Whether .dockerignore lets a file of the repository into the build."""
    sent = True
    parts = Path(path).parts
    heads = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    for pattern in filter(None, (line.strip() for line in ignored.splitlines())):
        plain = pattern.removeprefix("!")
        plain = plain.removeprefix("**/")
        tried = heads if plain == pattern.removeprefix("!") else list(parts)
        if any(fnmatch.fnmatchcase(head, plain) for head in tried):
            sent = pattern.startswith("!")
    return sent


class Builder:
    """Runs stages in overlays under a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._roots: dict[str, Path] = {}

    def build(self, stage: Stage) -> tuple[Path, dict[str, str]]:
        """Root and environment of the stage when all its steps have run. Raises
        CalledProcessError."""
        root = self._overlay(stage.name or "final")
        self._roots[stage.name] = root
        environment, arguments, workdir = (
            {"PATH": BASE_PATH, "HOME": "/root"},
            dict[str, str](),
            "/",
        )
        for instruction, text in stage.steps:
            if instruction == "ARG":
                name, _, value = text.partition("=")
                arguments[name] = value
            elif instruction == "ENV":
                for pair in shlex.split(text):
                    name, _, value = pair.partition("=")
                    environment[name] = value.replace("$PATH", environment["PATH"])
            elif instruction == "WORKDIR":
                workdir = text
                (root / text.strip("/")).mkdir(parents=True, exist_ok=True)
            elif instruction == "COPY":
                self._copy(root, workdir, text)
            elif instruction == "RUN":
                pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
                subprocess.run(
                    ["/bin/sh", "-c", text],
                    env={**pip, **arguments, **environment},
                    check=True,
                    **in_root(root, workdir),
                )
        return root, environment

    def _overlay(self, name: str) -> Path:
        folder = self._folder / name
        upper, work, root = (folder / part for part in ("upper", "work", "root"))
        for part in (upper, work, root):
            part.mkdir(parents=True)
        subprocess.run(
            [
                "mount",
                "-t",
                "overlay",
                "overlay",
                "-o",
                f"lowerdir=/,upperdir={upper},workdir={work}",
                str(root),
            ],
            check=True,
        )
        subprocess.run(["mount", "--rbind", "/dev", str(root / "dev")], check=True)
        subprocess.run(["mount", "-t", "proc", "proc", str(root / "proc")], check=True)
        for old in ("opt/hotkv", "run/hotkv", "var/cache/hotkv"):
            shutil.rmtree(root / old, ignore_errors=True)
        interpreter = (
            Path(sys.base_prefix)
            / "bin"
            / f"python{sys.version_info.major}.{sys.version_info.minor}"
        )
        named = root / str(interpreter.with_name("python")).strip("/")
        if not named.exists():
            named.symlink_to(interpreter)
        for parent in interpreter.parents:
            inside = root / str(parent).strip("/")
            inside.chmod(inside.stat().st_mode | 0o111)
        return root

    def _copy(self, root: Path, workdir: str, text: str) -> None:
        words = text.split()
        flags = dict(word[2:].split("=") for word in words if word.startswith("--"))
        *sources, target = [word for word in words if not word.startswith("--")]
        into = root / str(Path(workdir) / target).strip("/")
        for source in sources:
            if "from" in flags:
                shutil.copytree(
                    self._roots[flags["from"]] / source.strip("/"),
                    into,
                    symlinks=True,
                    dirs_exist_ok=True,
                )
            else:
                copy_sent(
                    source,
                    into
                    if len(sources) == 1 and not target.endswith("/")
                    else into / Path(source).name,
                )
        if "chown" in flags:
            subprocess.run(["chown", "-R", flags["chown"], str(into)], check=True)


def copy_sent(source: str, target: Path) -> None:
    """Copies a file or folder of the repository, but for what .dockerignore holds back."""
    ignored = (ROOT / ".dockerignore").read_text()
    found = (
        [ROOT / source]
        if (ROOT / source).is_file()
        else [path for path in (ROOT / source).rglob("*") if path.is_file()]
    )
    for path in found:
        if is_sent(str(path.relative_to(ROOT)), ignored):
            to = target / path.relative_to(ROOT / source)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, to)


def in_root(root: Path, workdir: str, user: int = 0) -> dict[str, Callable[[], None]]:
    """Arguments of `subprocess` for a process in an overlay."""

    def enter() -> None:
        os.chroot(root)
        os.chdir(workdir)
        if user:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)

    return {"preexec_fn": enter}


def run_image(
    root: Path, stage: Stage, environment: dict[str, str], arena: Path
) -> dict[str, object]:
    """Starts the image's entry point as its user, probes it, stops it."""
    user = int(stage.last("USER").partition(":")[0])
    arena.mkdir(mode=0o700)
    os.chown(arena, user, user)
    places = {"HOTKV_ARENA__DIR": str(arena), "HOTKV_HTTP__PORT": "-1"}
    inside = in_root(root, "/", user)
    command = [
        *json.loads(stage.last("ENTRYPOINT")),
        *json.loads(stage.last("CMD")),
        "--arena.bytes",
        "16MiB",
    ]
    checked = subprocess.run(
        [*command, "--check"], env=environment | places, capture_output=True, text=True, **inside
    )
    probe = json.loads(stage.last("HEALTHCHECK").partition("CMD ")[2])
    cached = sorted(str(path) for path in (root / "var/cache/hotkv").rglob("*"))
    before = subprocess.run(probe, env=environment, **inside, capture_output=True).returncode
    server = subprocess.Popen(
        [*command], env=environment | places, stderr=subprocess.PIPE, text=True, **inside
    )
    try:
        deadline_s = time.monotonic() + READY_S
        while time.monotonic() < deadline_s and server.poll() is None:
            status = subprocess.run(
                probe, env=environment, **inside, capture_output=True
            ).returncode
            if status == 0:
                break
            time.sleep(0.2)
        owner = (root / "run/hotkv/grpc.sock").stat().st_uid
    finally:
        server.send_signal(signal.SIGTERM)
        _, log = server.communicate(timeout=READY_S)
    return {
        "check": checked.returncode,
        "probe_before": before,
        "probe": status,
        "socket_owner": owner,
        "stopped": server.returncode,
        "kernels_compiled_at_start": len(
            sorted(str(path) for path in (root / "var/cache/hotkv").rglob("*"))
        )
        - len(cached),
        "cached_kernels": len(cached),
        "log": log,
    }


def main() -> int:
    """See the module."""
    folder = Path(sys.argv[1])
    stages = parse((ROOT / "Dockerfile").read_text())
    builder = Builder(folder)
    *_, (root, environment) = [builder.build(stage) for stage in stages]
    arena = Path(f"/dev/shm/hotkv-image-{os.getpid()}")
    try:
        seen = run_image(root, stages[-1], environment, arena)
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(arena)
    print(json.dumps(seen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
