"""vLLM's Python sources without installing it: of the environment, and of wheels on the package
index.

Of a wheel only the files that are read get fetched (by range requests; CUDA wheels have hundreds of
megabytes), and kept in `cache`. Where the index can't be reached a kept wheel does; without one
`Unreachable` says why.
"""

import importlib.util
import os
import re
import urllib.parse
import urllib.request
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from remotezip import RemoteIOError, RemoteZip

INDEX = os.environ.get("PIP_INDEX_URL") or "https://pypi.org/simple"
TIMEOUT_S = 30.0
WHEEL = re.compile(r'href="([^"#]*/vllm-((\d+)\.(\d+)\.(\d+)[^-/]*)-[^/"#]*x86_64\.whl)')


class Unreachable(Exception):
    """The index does not answer, or has no such wheel."""


class Source(Protocol):
    """One version's sources."""

    name: str

    def read(self, path: str) -> str | None:
        """A file's text; None if there is no such file. `path`: from the folder that has `vllm`.
        Raises Unreachable."""


class Installed:
    """The vLLM of this environment."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            raise Unreachable("vLLM is not installed here")
        self._root = Path(spec.origin).parent.parent
        self.name = "the installed vLLM"

    def read(self, path: str) -> str | None:
        file = self._root / path
        return file.read_text() if file.is_file() else None


class Wheel:
    """The newest release of a line such as (0, 33), in the build for CUDA."""

    def __init__(self, line: tuple[int, int], cache: Path) -> None:
        self._archive: zipfile.ZipFile | None = None
        self._url = ""
        try:
            version, self._url = _newest(line)
        except OSError as error:
            kept = sorted(
                folder.parent for folder in cache.glob(f"vllm-{line[0]}.{line[1]}.*/names.txt")
            )
            if not kept:
                raise Unreachable(f"{INDEX} can't be reached ({error})") from error
            version = kept[-1].name.removeprefix("vllm-")
        self.name = f"vLLM {version}"
        self._folder = cache / f"vllm-{version}"
        self._folder.mkdir(parents=True, exist_ok=True)
        names = self._folder / "names.txt"
        if not names.exists():
            names.write_text("\n".join(self._open().namelist()))
        self._names = set(names.read_text().split("\n"))

    def read(self, path: str) -> str | None:
        if path not in self._names:
            return None
        kept = self._folder / path
        if not kept.exists():
            try:
                text = self._open().read(path)
            except (OSError, RemoteIOError) as error:
                raise Unreachable(f"{self._url} can't be read ({error})") from error
            kept.parent.mkdir(parents=True, exist_ok=True)
            part = kept.with_suffix(".part")
            part.write_bytes(text)
            part.replace(kept)
        return kept.read_text()

    def _open(self) -> zipfile.ZipFile:
        if self._archive is None:
            with suppress(RemoteIOError):
                self._archive = RemoteZip(self._url, timeout=TIMEOUT_S)
        if self._archive is None:
            # The index serves no ranges.
            whole = self._folder / "whole.whl"
            if not whole.exists():
                print(f"fetching {self._url}", flush=True)
                urllib.request.urlretrieve(self._url, whole.with_suffix(".part"))
                whole.with_suffix(".part").replace(whole)
            self._archive = zipfile.ZipFile(whole)
        return self._archive


def _newest(line: tuple[int, int]) -> tuple[str, str]:
    """Version and address of a line's newest wheel. Raises OSError, Unreachable."""
    request = urllib.request.Request(f"{INDEX.rstrip('/')}/vllm/", headers={"Accept": "text/html"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as page:
        found = WHEEL.findall(page.read().decode())
        address = page.url
    releases = [
        (int(patch), version, link)
        for link, version, major, minor, patch in found
        if (int(major), int(minor)) == line
    ]
    releases = [release for release in releases if re.fullmatch(r"[\d.]+(\.post\d+)?", release[1])]
    if not releases:
        raise Unreachable(f"{INDEX} has no wheel of vLLM {line[0]}.{line[1]}")
    _, version, link = max(releases)
    return version, urllib.parse.urljoin(address, link)
