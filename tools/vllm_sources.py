"""vLLM's Python sources, without importing it: the installed ones, and source distributions.

A distribution (45 MB) is fetched once; its Python files stay in `cache`, also for when the index
can't be reached. Without either: `Unreachable`.
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

from tools.vllm_definitions import Files

INDEX = os.environ.get("PIP_INDEX_URL") or "https://pypi.org/simple"
TIMEOUT_S = 30.0
Line = tuple[int, int]
ARCHIVE = re.compile(r'href="([^"#]*/vllm-((\d+)\.(\d+)\.(\d+)(?:\.post\d+)?)\.tar\.gz)')


class Unreachable(Exception):
    """The index does not answer, or lacks the release."""


class Source(Protocol):
    """Paths begin with `vllm/`."""

    name: str

    def read(self, path: str) -> str | None:
        """None if there is no such file."""

    def paths(self) -> list[str]:
        """Sorted."""


class Folder(Files):
    """Has a subfolder `vllm`."""

    def __init__(self, name: str, root: Path) -> None:
        super().__init__(root)
        self.name = name

    def paths(self) -> list[str]:
        found = (self._root / "vllm").rglob("*.py")
        return sorted(file.relative_to(self._root).as_posix() for file in found)


def installed() -> Folder:
    """Raises Unreachable."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise Unreachable("vLLM is not installed here")
    return Folder("the installed vLLM", Path(spec.origin).parent.parent)


def release(line: Line, cache: Path) -> Folder:
    """The newest of a line such as (0, 33). Raises Unreachable."""
    try:
        found = [one for one in _releases() if one[0][:2] == line]
        if not found:
            raise Unreachable(f"{INDEX} has no sources of vLLM {line[0]}.{line[1]}")
        _, version, url = max(found)
        return _kept(version, url, cache)
    except OSError as error:
        kept = sorted(cache.glob(f"vllm-{line[0]}.{line[1]}.*[0-9]"))
        if not kept:
            raise Unreachable(f"{INDEX} can't be reached ({error})") from error
        return _folder(kept[-1])


def exact(version: str, cache: Path) -> Folder:
    """Sources of a release such as 0.33.0. Raises Unreachable."""
    folder = cache / f"vllm-{version}"
    if folder.exists():
        return _folder(folder)
    try:
        urls = [url for _, one, url in _releases() if one == version]
        if not urls:
            raise Unreachable(f"{INDEX} has no sources of vLLM {version}")
        return _kept(version, urls[0], cache)
    except OSError as error:
        raise Unreachable(f"{INDEX} can't be reached ({error})") from error


def lines() -> list[Line]:
    """On the index, oldest first. Raises Unreachable."""
    try:
        return sorted({(major, minor) for (major, minor, _), _, _ in _releases()})
    except OSError as error:
        raise Unreachable(f"{INDEX} can't be reached ({error})") from error


def _kept(version: str, url: str, cache: Path) -> Folder:
    """Fetches what is not in `cache`. Raises OSError."""
    folder = cache / f"vllm-{version}"
    if not folder.exists():
        _fetch(url, folder)
    return _folder(folder)


def _folder(path: Path) -> Folder:
    return Folder(path.name.replace("vllm-", "vLLM "), path)


def _fetch(url: str, folder: Path) -> None:
    """The folder appears when it is complete. Raises OSError."""
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


def _releases() -> list[tuple[tuple[int, int, int], str, str]]:
    """Number, version and address of each. Raises OSError."""
    request = urllib.request.Request(f"{INDEX.rstrip('/')}/vllm/", headers={"Accept": "text/html"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as page:
        found = ARCHIVE.findall(page.read().decode())
        address = page.url
    return [
        ((int(major), int(minor), int(patch)), version, urllib.parse.urljoin(address, link))
        for link, version, major, minor, patch in found
    ]
