"""vLLM's Python sources without installing it: of the environment, and of source distributions on
the package index.

A source distribution (some 45 MB) is fetched once; its Python files are kept in `cache`. If the
index can't be reached a kept one does; without one `Unreachable` says why.
"""

import importlib.util
import os
import re
import shutil
import tarfile
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Protocol

INDEX = os.environ.get("PIP_INDEX_URL") or "https://pypi.org/simple"
TIMEOUT_S = 30.0
ARCHIVE = re.compile(r'href="([^"#]*/vllm-((\d+)\.(\d+)\.(\d+)(?:\.post\d+)?)\.tar\.gz)')


class Unreachable(Exception):
    """The index does not answer, or has no such release."""


class Source(Protocol):
    """One version's sources. A path begins with `vllm/`."""

    name: str

    def read(self, path: str) -> str | None:
        """Returns a file's text; None if there is no such file."""

    def paths(self) -> list[str]:
        """Returns the paths of all Python files, in order."""


class Folder:
    """Sources in a folder that has `vllm`."""

    def __init__(self, name: str, root: Path) -> None:
        self.name, self._root = name, root

    def read(self, path: str) -> str | None:
        file = self._root / path
        return file.read_text() if file.is_file() else None

    def paths(self) -> list[str]:
        found = (self._root / "vllm").rglob("*.py")
        return sorted(file.relative_to(self._root).as_posix() for file in found)


def installed() -> Folder:
    """Returns the vLLM of this environment. Raises Unreachable."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise Unreachable("vLLM is not installed here")
    return Folder("the installed vLLM", Path(spec.origin).parent.parent)


def release(line: tuple[int, int], cache: Path) -> Folder:
    """Returns the newest release of a line such as (0, 33). Raises Unreachable."""
    try:
        version, url = _newest(line)
        folder = cache / f"vllm-{version}"
        if not folder.exists():
            _fetch(url, folder)
    except OSError as error:
        kept = sorted(cache.glob(f"vllm-{line[0]}.{line[1]}.*[0-9]"))
        if not kept:
            raise Unreachable(f"{INDEX} can't be reached ({error})") from error
        folder = kept[-1]
    return Folder(folder.name.replace("vllm-", "vLLM "), folder)


def _fetch(url: str, folder: Path) -> None:
    """Makes a folder of a source distribution's Python files, which is there only when it is
    complete. Raises OSError."""
    print(f"fetching {url}", flush=True)
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    wanted = re.compile(rf"{re.escape(folder.name)}/vllm/.*\.py")
    try:
        with (
            urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer,
            tarfile.open(fileobj=answer, mode="r|gz") as archive,
        ):
            files = (one for one in archive if wanted.fullmatch(one.name))
            archive.extractall(part, files, filter="data")
    except tarfile.TarError as error:
        raise OSError(f"{url} can't be read: {error}") from error
    (part / folder.name).rename(folder)
    part.rmdir()


def _newest(line: tuple[int, int]) -> tuple[str, str]:
    """Returns version and address of a line's newest release. Raises OSError, Unreachable."""
    request = urllib.request.Request(f"{INDEX.rstrip('/')}/vllm/", headers={"Accept": "text/html"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as page:
        found = ARCHIVE.findall(page.read().decode())
        address = page.url
    releases = [
        (int(patch), version, link)
        for link, version, major, minor, patch in found
        if (int(major), int(minor)) == line
    ]
    if not releases:
        raise Unreachable(f"{INDEX} has no sources of vLLM {line[0]}.{line[1]}")
    _, version, link = max(releases)
    return version, urllib.parse.urljoin(address, link)
