"""Builds a small Debian root for the deployment tests, and reports a run's steps with their
times. Needs root and `mmdebstrap`."""

import contextlib
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.deploy.dockerfile import ROOT, copy_sent

WHOLE = ".whole"
CERTIFICATES = Path("/etc/ssl/certs")
PACKAGES = {"systemd-nspawn": "systemd-container", "nsenter": "util-linux"}
"""Programs whose package has another name."""


class Steps:
    def __init__(self) -> None:
        self.start_s = time.monotonic()

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[list[str]]:
        """Yields a list for findings, printed when the step ends."""
        seen: list[str] = []
        begun_s = time.monotonic()
        word = "FAILED"
        try:
            yield seen
            word = "ok"
        finally:
            took_s = time.monotonic() - begun_s
            print(f"{word:6} {took_s:7.1f} s  {what}" + "".join(f": {one}" for one in seen[:1]))
            for more in seen[1:]:
                print(f"{'':18}{more}")
            sys.stdout.flush()


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        sys.exit(f"no {name} here: make programs PROGRAMS={PACKAGES.get(name, name)}")
    return found


def run(*command: str | Path, quiet: bool = True) -> str:
    """Returns the output; exits with its end if the command fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
        raise SystemExit(f"{' '.join(words)}: status {done.returncode}\n{said}")
    return done.stdout


def make_root(folder: Path, packages: Sequence[str]) -> Path:
    """Of this machine's Debian release. A complete folder is reused."""
    if (folder / WHOLE).exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    release = platform.freedesktop_os_release()["VERSION_CODENAME"]
    include = f"--include={','.join(packages)}"
    run(program("mmdebstrap"), "--variant=minbase", include, release, folder)
    (folder / WHOLE).touch()
    return folder


def wheel(folder: Path, version: str) -> Path:
    source = folder / f"source-{version}"
    shutil.rmtree(source, ignore_errors=True)
    for part in ("pyproject.toml", "README.md", "LICENSE"):
        source.mkdir(exist_ok=True)
        shutil.copy(ROOT / part, source)
    for part in ("proto", "sparse", "client", "server", "connector_vllm"):
        copy_sent(part, source / part)
    named = source / "proto" / "hotkv_proto" / "__init__.py"
    import hotkv_proto

    named.write_text(named.read_text().replace(f'"{hotkv_proto.__version__}"', f'"{version}"'))
    target = folder / f"wheels-{version}"
    shutil.rmtree(target, ignore_errors=True)
    run(sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "-w", target, source)
    (found,) = target.glob("*.whl")
    return found
