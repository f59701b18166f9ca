"""Builds the files of a release into a folder.

    python -m tools.release [--out DIR] [--tag vVERSION] [PART …]

Parts, by default all in this order:

- `packages`: sdist and wheel;
- `chart`: the Helm chart's package;
- `deploy`: an archive of systemd units, settings, manifests and dashboards;
- `sbom`: a CycloneDX list of the image's Python packages, with this build's versions;
- `notes`: this version's section of CHANGELOG.md;
- `image`: an OCI archive for this processor, by buildah from the Dockerfile; without buildah a
  message;
- `checksums`: of all files of the folder.

`--tag` refuses unless tag, version and the dated section of CHANGELOG.md agree and the working
tree has no changes.
"""

import argparse
import ast
import gzip
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools import check_dist, helm

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "deploy" / "helm" / "hotkv"
DEPLOYED = ("deploy", "compose.yaml", "compose.gpu.yaml", "compose.offloading.yaml", "LICENSE")
IMAGE_EXTRAS = "server,events,s3,otel"
"""The Dockerfile's extras for its variant `cpu`."""
SUMS, NOTES = "SHA256SUMS", "NOTES.md"
UNDATED = "not released yet"
PROCESSORS = {"x86_64": "amd64", "aarch64": "arm64"}
"""Images' names by the kernel's."""


class ReleaseError(Exception):
    """The release can't be made; says why."""


@dataclass(frozen=True, slots=True)
class Release:
    """buildah: the command.
    bud: options of `buildah bud`.
    """

    version: str
    out: Path
    buildah: tuple[str, ...] = ("buildah",)
    bud: tuple[str, ...] = ()
    epoch_s: int = field(default_factory=lambda: int(git("log", "-1", "--format=%ct")))
    """Of the last commit. Archives carry it as their files' time: the same commit gives the same
    bytes."""

    @property
    def wheel(self) -> Path:
        return self.out / f"hotkv-{self.version}-py3-none-any.whl"

    @property
    def sdist(self) -> Path:
        return self.out / f"hotkv-{self.version}.tar.gz"

    @property
    def chart(self) -> Path:
        """Named as Helm names it."""
        return self.out / f"hotkv-{self.version}.tgz"

    @property
    def deploy(self) -> Path:
        return self.out / f"hotkv-{self.version}-deploy.tar.gz"

    @property
    def sbom(self) -> Path:
        return self.out / f"hotkv-{self.version}.cdx.json"

    @property
    def notes(self) -> Path:
        return self.out / NOTES

    @property
    def image(self) -> Path:
        return self.out / f"hotkv-{self.version}-image-{processor()}.oci.tar"

    @property
    def image_name(self) -> str:
        return f"hotkv:{self.version}"


def processor() -> str:
    """The name that images use."""
    return PROCESSORS.get(platform.machine(), platform.machine())


def git(*arguments: str) -> str:
    """Output of git in this repository."""
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def run(*command: str | Path, **environment: str) -> None:
    """Raises ReleaseError with the end of its output."""
    words = [str(word) for word in command]
    variables = {**os.environ, **environment}
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=variables)
    if done.returncode:
        end = "\n".join((done.stdout + done.stderr).splitlines()[-25:])
        raise ReleaseError(f"{shlex.join(words)}: status {done.returncode}\n{end}")


def version_of(source: str) -> str:
    """`__version__` of a module's source. Raises ReleaseError."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise ReleaseError("hotkv_proto names no __version__")


def section(changelog: str, version: str) -> tuple[str, str]:
    """Heading and text. Raises ReleaseError if missing or empty."""
    parts = re.split(r"^## +(.*)$", changelog, flags=re.MULTILINE)
    for heading, text in zip(parts[1::2], parts[2::2], strict=True):
        if heading.partition(",")[0].strip() == version and text.strip():
            return heading.strip(), text.strip() + "\n"
    raise ReleaseError(f"CHANGELOG.md has no section of {version}")


def check_tag(tag: str, version: str, heading: str, changes: str) -> None:
    """Raises ReleaseError unless the tag fits the version, the section has a date, and nothing
    is changed. changes: of `git status`."""
    if tag != f"v{version}":
        raise ReleaseError(f"the tag is {tag}, the version {version}: expected v{version}")
    if UNDATED in heading:
        raise ReleaseError(f'CHANGELOG.md says "{heading}": give the section its date')
    if changes:
        raise ReleaseError(f"the working tree has changes:\n{changes}")


def packages(release: Release) -> None:
    run(
        *(sys.executable, "-m", "build", "--outdir", release.out, ROOT),
        SOURCE_DATE_EPOCH=str(release.epoch_s),
    )
    for archive in (release.wheel, release.sdist):
        check_dist.check_contents(archive)


def chart(release: Release) -> None:
    """Raises ReleaseError if the chart has another version, or Helm refuses it."""
    named = dict(
        re.findall(r"^(version|appVersion): (\S+)$", (CHART / "Chart.yaml").read_text(), re.M)
    )
    if set(named.values()) != {release.version} or len(named) != 2:
        raise ReleaseError(f"deploy/helm/hotkv/Chart.yaml has {named}, expected {release.version}")
    program = helm.find()
    run(program, "lint", "--strict", CHART)
    run(program, "package", CHART, "--destination", release.out)


def deploy(release: Release) -> None:
    """Packs what the Python package does not have."""
    names = git("ls-files", "--", *DEPLOYED).splitlines()
    head = f"hotkv-{release.version}-deploy"

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = "root"
        entry.mtime = release.epoch_s
        return entry

    with (
        release.deploy.open("wb") as sink,
        gzip.GzipFile(filename="", fileobj=sink, mode="wb", mtime=release.epoch_s) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for name in sorted(names):
            archive.add(ROOT / name, f"{head}/{name}", filter=plain)


def sbom(release: Release) -> None:
    """Of the wheel with the image's extras in a new environment, without the image's Debian
    packages."""
    with tempfile.TemporaryDirectory(prefix="hotkv-sbom-") as folder:
        venv.create(folder, with_pip=False)
        python = Path(folder) / "bin" / "python"
        wanted = f"{release.wheel}[{IMAGE_EXTRAS}]"
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
        run(*pip, "--disable-pip-version-check", wanted)
        # The SBOM tool needs the version as text, not computed.
        project = Path(folder) / "pyproject.toml"
        text = (ROOT / "pyproject.toml").read_text()
        project.write_text(text.replace('dynamic = ["version"]', f'version = "{release.version}"'))
        options = ("--output-reproducible", "--validate", "--output-file", release.sbom)
        lister = (sys.executable, "-m", "cyclonedx_py", "environment", *options)
        run(*lister, "--pyproject", project, python)


def notes(release: Release) -> None:
    release.notes.write_text(section((ROOT / "CHANGELOG.md").read_text(), release.version)[1])


def image(release: Release) -> None:
    """Without buildah, prints a message."""
    if shutil.which(release.buildah[0]) is None:
        say("image", "none: buildah is not installed (Debian's package buildah)")
        return
    version = f"--build-arg=VERSION={release.version}"
    name = f"--tag={release.image_name}"
    run(*release.buildah, "bud", "--quiet", *release.bud, version, name, ROOT)
    release.image.unlink(missing_ok=True)
    target = f"oci-archive:{release.image}:{release.image_name}"
    run(*release.buildah, "push", "--quiet", release.image_name, target)


def checksums(release: Release) -> None:
    """In the format of `sha256sum --check`."""
    lines = []
    for path in sorted(release.out.iterdir()):
        if path.name != SUMS:
            lines.append(f"{check_dist.digest(path)}  {path.name}\n")
    (release.out / SUMS).write_text("".join(lines))


PARTS: dict[str, Callable[[Release], None]] = {
    "packages": packages,
    "chart": chart,
    "deploy": deploy,
    "sbom": sbom,
    "notes": notes,
    "image": image,
    "checksums": checksums,
}


def say(part: str, came: str) -> None:
    print(f"release: {part}: {came}", flush=True)


def empty(out: Path) -> None:
    """Of an earlier run. Raises ReleaseError, and removes nothing, if something else is there."""
    out.mkdir(parents=True, exist_ok=True)
    files = list(out.iterdir())
    foreign = [
        one.name
        for one in files
        if one.is_dir() or not (one.name.startswith("hotkv-") or one.name in (SUMS, NOTES))
    ]
    if foreign:
        raise ReleaseError(f"{out}: {foreign[0]} is of no release: name another folder")
    for one in files:
        one.unlink()


def make(release: Release, parts: Sequence[str]) -> None:
    """Raises ReleaseError or helm.HelmError."""
    for part in parts:
        before = {path.name: path.stat().st_mtime_ns for path in release.out.iterdir()}
        PARTS[part](release)
        for path in sorted(release.out.iterdir()):
            if before.get(path.name) != path.stat().st_mtime_ns:
                say(part, f"{path.name}, {path.stat().st_size / 1e6:.2f} MB")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=ROOT / "release", help="where files go")
    parser.add_argument("--tag", default="", help="the tag that this is the release of")
    parser.add_argument("--buildah", default="buildah", help="the command, with global options")
    parser.add_argument("--bud", default="", help="options of `buildah bud`")
    flags = parser.parse_args(arguments)
    if unknown := set(flags.parts) - PARTS.keys():
        parser.error(f"no part {', '.join(sorted(unknown))}: {', '.join(PARTS)}")
    try:
        version = version_of((ROOT / "proto" / "hotkv_proto" / "__init__.py").read_text())
        heading, _ = section((ROOT / "CHANGELOG.md").read_text(), version)
        if flags.tag:
            check_tag(flags.tag, version, heading, git("status", "--porcelain"))
        if flags.parts:
            flags.out.mkdir(parents=True, exist_ok=True)
        else:
            empty(flags.out)
        commands = (tuple(shlex.split(flags.buildah)), tuple(shlex.split(flags.bud)))
        make(Release(version, flags.out.resolve(), *commands), flags.parts or list(PARTS))
    except (ReleaseError, helm.HelmError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    say("all", f"{heading}, in {flags.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
