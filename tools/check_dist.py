"""Builds the sdist and the wheel, and checks each in an otherwise empty environment.

    python -m tools.check_dist [--out DIR | --release DIR]

Both have every tracked file of the packages, with CUDA sources and `py.typed`; with the extra
`server` the server starts, and `hotkv ping` reaches it. The wheel alone gives a client of three
dependencies, which reaches that server too.

`--release` builds nothing and checks a folder of `tools.release`: also checksums, that the Helm
chart renders, that the SBOM names all installed packages, and that the server starts with the
settings file. Needs `build` and a package index; minutes. Leaves no files but DIR.
"""

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools import helm

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("proto", "sparse", "client", "server", "connector_vllm")
"""They have a Python package each."""
DEFINITIONS = "hotkv/"
"""Protobuf definitions in `proto`; only the sdist has them."""
MUST_HAVE = (".cu", ".cuh", "py.typed", ".pyi")
DEPENDENCIES = {"grpcio", "numpy", "protobuf"}
OF_DEPENDENCIES = {"typing-extensions"}
START_DEADLINE_S = 300.0
"""The first start compiles kernels."""
STOP_DEADLINE_S = 30.0


def package_files() -> set[str]:
    """Tracked files, relative to each package's folder."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    inner = (name.partition("/")[2] for name in listed.stdout.splitlines())
    return {name for name in inner if "/" in name}


def build(out: Path) -> tuple[Path, Path]:
    """The wheel from the sdist."""
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)], check=True)
    (sdist,), (wheel,) = out.glob("hotkv-*.tar.gz"), out.glob("hotkv-*.whl")
    return sdist, wheel


def check_contents(archive: Path) -> None:
    """Exits unless it has all files of the packages."""
    if archive.suffix == ".whl":
        inside = set(zipfile.ZipFile(archive).namelist())
    else:
        with tarfile.open(archive) as tar:
            paths = (name.split("/", 2) for name in tar.getnames())
            inside = {path[2] for path in paths if len(path) > 2 and path[1] in FOLDERS}
    wanted = package_files()
    if archive.suffix == ".whl":
        wanted = {name for name in wanted if not name.startswith(DEFINITIONS)}
    for ending in MUST_HAVE:
        if not any(name.endswith(ending) for name in wanted):
            raise SystemExit(f"dist: no tracked file ends in {ending}")
    if missing := sorted(wanted - inside):
        raise SystemExit(f"dist: {archive.name} lacks {', '.join(missing)}")
    print(f"dist: {archive.name} has all {len(wanted)} files of the packages", flush=True)


def install(folder: Path, wanted: str) -> Path:
    """In a new environment in `folder`; returns its programs' folder."""
    venv.create(folder, with_pip=True)
    programs = folder / "bin"
    pip = [str(programs / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, wanted], check=True)
    return programs


def installed(programs: Path) -> set[str]:
    """Packages without pip and other installers."""
    listed = run(programs / "python", "-m", "pip", "list", "--format", "freeze")
    return {plain(line.partition("==")[0]) for line in listed.splitlines()} - {"pip", "setuptools"}


def plain(name: str) -> str:
    """The name as package indexes compare it."""
    return name.lower().replace("_", "-").replace(".", "-")


def environment() -> dict[str, str]:
    """Without PYTHONPATH, which would lead to the checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(program: Path, *arguments: str, quiet: bool = False) -> str:
    """Outside of the checkout. Raises CalledProcessError; `quiet` hides the error output."""
    return subprocess.run(
        [str(program), *arguments],
        cwd=program.parent,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if quiet else None,
        text=True,
        check=True,
    ).stdout


@contextlib.contextmanager
def server(programs: Path, folder: Path, settings: Path | None = None) -> Iterator[str]:
    """Yields its address once it answers a ping."""
    target = f"unix:{folder}/run/grpc.sock"
    (folder / "run").mkdir(mode=0o700)
    flags = ["--arena.bytes", "32MiB", "--arena.dir", str(folder / "arena"), "--http.port", "-1"]
    if settings is not None:
        flags += ["--config", str(settings)]
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(
            [str(programs / "hotkv-server"), "run", "--runtime-dir", str(folder / "run"), *flags],
            cwd=folder,
            env=environment(),
            stdout=log,
            stderr=log,
        )
        try:
            deadline_s = time.monotonic() + START_DEADLINE_S
            while True:
                try:
                    run(programs / "hotkv", "ping", "--target", target, quiet=True)
                    break
                except subprocess.CalledProcessError:
                    if process.poll() is not None or time.monotonic() > deadline_s:
                        log.seek(0)
                        raise SystemExit(f"dist: the server did not start\n{log.read()}") from None
                    time.sleep(0.5)
            yield target
        finally:
            process.terminate()
            process.wait(STOP_DEADLINE_S)


def check_server(
    archive: Path, folder: Path, client: Path | None = None, settings: Path | None = None
) -> Path:
    """Returns the programs' folder. client: another installation's, which must reach the server
    too."""
    programs = install(folder / "server", f"{archive}[server]")
    print(f"dist: {archive.name}: {run(programs / 'hotkv-server', '--version').strip()}")
    places = ("--runtime-dir", str(folder / "checked"), "--http.port", "-1")
    for check in (("run", "--check", *places), ("run", "--help-settings")):
        run(programs / "hotkv-server", *check)
    with server(programs, folder, settings) as target:
        if client is not None:
            run(client / "hotkv", "ping", "--target", target)
            run(client / "hotkv", "status", "--target", target)
    print(f"dist: {archive.name}: a server starts and answers", flush=True)
    return programs


def check_client(wheel: Path, folder: Path) -> Path:
    """Exits if more is installed than the client's dependencies. Returns the programs' folder."""
    programs = install(folder, str(wheel))
    found = installed(programs)
    more = found - DEPENDENCIES - OF_DEPENDENCIES - {"hotkv"}
    if more or not found >= DEPENDENCIES:
        raise SystemExit(f"dist: the client alone needs {', '.join(sorted(found))}")
    run(programs / "python", "-c", "import hotkv_client, hotkv_sparse, hotkv_vllm")
    print(f"dist: {wheel.name}: the client alone needs {', '.join(sorted(DEPENDENCIES))}")
    return programs


def one(folder: Path, pattern: str) -> Path:
    """Exits unless exactly one file matches."""
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"dist: {folder} has {len(found)} files {pattern}, expected 1")
    return found[0]


def digest(path: Path) -> str:
    """SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_sums(folder: Path) -> None:
    """Exits unless SHA256SUMS fits each file."""
    lines = (line.split() for line in (folder / "SHA256SUMS").read_text().splitlines())
    sums = {name: value for value, name in lines}
    for path in folder.iterdir():
        if path.name == "SHA256SUMS":
            continue
        if digest(path) != sums.pop(path.name, ""):
            raise SystemExit(f"dist: {path.name} is not the file of SHA256SUMS")
    if sums:
        raise SystemExit(f"dist: SHA256SUMS names {', '.join(sums)}, which are not there")
    print(f"dist: all files of {folder} have their checksums", flush=True)


def check_chart(chart: Path, version: str) -> None:
    """Exits unless its pods use the release's image."""
    rendered = helm.render(chart)
    if f"hotkv:{version}" not in rendered or "kind: DaemonSet" not in rendered:
        raise SystemExit(f"dist: {chart.name} does not run hotkv:{version}")
    print(f"dist: {chart.name} renders", flush=True)


def check_sbom(sbom: Path, names: set[str], version: str) -> None:
    """Exits unless it is of this version and has `names`, each with version and package URL."""
    read = json.loads(sbom.read_text())
    listed = {plain(item["name"]): item for item in read["components"]}
    incomplete = [name for name, item in listed.items() if not {"version", "purl"} <= item.keys()]
    needed = names - {"hotkv"}
    if missing := sorted(needed - listed.keys()) + sorted(incomplete):
        raise SystemExit(f"dist: {sbom.name} lacks {', '.join(missing)}")
    head = read["metadata"]["component"]
    if (head["name"], head.get("version")) != ("hotkv", version):
        raise SystemExit(f"dist: {sbom.name} is not of hotkv {version}")
    print(f"dist: {sbom.name} has {len(listed)} packages, {len(needed)} of the server", flush=True)


def unpack(deploy: Path, folder: Path) -> Path:
    """Returns the deployment files' folder."""
    with tarfile.open(deploy) as archive:
        archive.extractall(folder, filter="data")
    return one(folder, "hotkv-*-deploy") / "deploy"


def check(wheel: Path, sdist: Path, folder: Path, settings: Path | None = None) -> set[str]:
    """Client and server, of wheel and sdist. Returns the packages that a server installs."""
    for archive in (wheel, sdist):
        check_contents(archive)
        (folder / archive.suffix[1:]).mkdir()
    client = check_client(wheel, folder / "client")
    programs = check_server(wheel, folder / wheel.suffix[1:], client, settings)
    check_server(sdist, folder / sdist.suffix[1:])
    return installed(programs)


def check_release(release: Path, folder: Path) -> None:
    """Checks all but the image, which `tests.deploy.image` runs."""
    check_sums(release)
    wheel, chart = one(release, "hotkv-*.whl"), one(release, "hotkv-*.tgz")
    version = wheel.name.split("-")[1]
    check_chart(chart, version)
    deployed = unpack(one(release, "hotkv-*-deploy.tar.gz"), folder)
    sdist = release / f"hotkv-{version}.tar.gz"
    needed = check(wheel, sdist, folder, deployed / "hotkv.toml")
    check_sbom(one(release, "hotkv-*.cdx.json"), needed, version)
    if not (release / "NOTES.md").read_text().strip():
        raise SystemExit("dist: NOTES.md is empty")
    images = ", ".join(path.name for path in release.glob("*.oci.tar")) or "none"
    print(f"dist: {release} installs from its files alone; images: {images}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where to put both")
    parser.add_argument("--release", type=Path, help="check this release instead")
    flags = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="hotkv-dist-") as name:
        if flags.release is not None:
            check_release(flags.release.resolve(), Path(name))
            return 0
        flags.out.mkdir(parents=True, exist_ok=True)
        for old in (*flags.out.glob("hotkv-*.tar.gz"), *flags.out.glob("hotkv-*.whl")):
            old.unlink()
        sdist, wheel = build(flags.out)
        check(wheel, sdist, Path(name))
    print(f"dist: {sdist.name} and {wheel.name} in {flags.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
