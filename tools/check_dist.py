"""Builds the sdist and the wheel, and checks each in an environment that has nothing else.

    python -m tools.check_dist [--out DIR]

For both: every tracked file of the packages is inside, CUDA sources and `py.typed` among them; it
installs with the extra `server`; the server starts, and `hotkv ping` reaches it. The wheel also
installs without extras: then the client has three dependencies, and reaches that server too. Needs
the package `build` and a package index; takes minutes. Leaves only DIR.
"""

import argparse
import contextlib
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

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("proto", "sparse", "client", "server", "connector_vllm")
"""Each has one package."""
MUST_HAVE = (".cu", ".cuh", "py.typed", ".proto", ".pyi")
DEPENDENCIES = {"grpcio", "numpy", "protobuf"}
OF_DEPENDENCIES = {"typing-extensions"}
START_DEADLINE_S = 300.0
"""The first start compiles kernels."""
STOP_DEADLINE_S = 30.0


def package_files() -> set[str]:
    """Returns tracked files of the packages, by their paths in a wheel."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    inner = (name.partition("/")[2] for name in listed.stdout.splitlines())
    return {name for name in inner if "/" in name}


def build(out: Path) -> tuple[Path, Path]:
    """Returns the sdist and the wheel; the wheel is built from the sdist."""
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)], check=True)
    (sdist,), (wheel,) = out.glob("hotkv-*.tar.gz"), out.glob("hotkv-*.whl")
    return sdist, wheel


def check_contents(archive: Path) -> None:
    """Exits unless the archive has all that the packages have."""
    if archive.suffix == ".whl":
        inside = set(zipfile.ZipFile(archive).namelist())
    else:
        with tarfile.open(archive) as tar:
            paths = (name.split("/", 2) for name in tar.getnames())
            inside = {path[2] for path in paths if len(path) > 2 and path[1] in FOLDERS}
    wanted = package_files()
    for ending in MUST_HAVE:
        if not any(name.endswith(ending) for name in wanted):
            raise SystemExit(f"dist: no tracked file ends in {ending}")
    if missing := sorted(wanted - inside):
        raise SystemExit(f"dist: {archive.name} lacks {', '.join(missing)}")
    print(f"dist: {archive.name} has all {len(wanted)} files of the packages", flush=True)


def install(folder: Path, wanted: str) -> Path:
    """Returns the programs of a fresh environment that has `wanted` and what it asks for."""
    venv.create(folder, with_pip=True)
    programs = folder / "bin"
    pip = [str(programs / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, wanted], check=True)
    return programs


def environment() -> dict[str, str]:
    """This process's, without the checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(program: Path, *arguments: str, quiet: bool = False) -> str:
    """Returns the output of an installed program, run away from the checkout. Raises
    CalledProcessError; `quiet`: what it says then is not shown."""
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
def server(programs: Path, folder: Path) -> Iterator[str]:
    """Gives the target of a small server that has answered a ping; ends it."""
    target = f"unix:{folder}/run/grpc.sock"
    (folder / "run").mkdir(mode=0o700)
    flags = ["--arena.bytes", "32MiB", "--arena.dir", str(folder / "arena"), "--http.port", "-1"]
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


def check_server(archive: Path, folder: Path, client: Path | None = None) -> None:
    """Installs the archive with the extra `server`, starts one, and pings it; also with `client`'s
    programs."""
    programs = install(folder / "server", f"{archive}[server]")
    print(f"dist: {archive.name}: {run(programs / 'hotkv-server', '--version').strip()}")
    places = ("--runtime-dir", str(folder / "checked"), "--http.port", "-1")
    for check in (("run", "--check", *places), ("run", "--help-settings")):
        run(programs / "hotkv-server", *check)
    with server(programs, folder) as target:
        if client is not None:
            run(client / "hotkv", "ping", "--target", target)
            run(client / "hotkv", "status", "--target", target)
    print(f"dist: {archive.name}: a server starts and answers", flush=True)


def check_client(wheel: Path, folder: Path) -> Path:
    """Installs the wheel without extras; exits if that brings more than the client's
    dependencies. Returns the programs."""
    programs = install(folder, str(wheel))
    listed = run(programs / "python", "-m", "pip", "list", "--format", "freeze")
    found = {line.partition("==")[0].lower().replace("_", "-") for line in listed.splitlines()}
    more = found - DEPENDENCIES - OF_DEPENDENCIES - {"hotkv", "pip", "setuptools"}
    if more or not found >= DEPENDENCIES:
        raise SystemExit(f"dist: the client alone needs {', '.join(sorted(found))}")
    run(programs / "python", "-c", "import hotkv_client, hotkv_sparse, hotkv_vllm")
    print(f"dist: {wheel.name}: the client alone needs {', '.join(sorted(DEPENDENCIES))}")
    return programs


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where to put both")
    flags = parser.parse_args(arguments)
    flags.out.mkdir(parents=True, exist_ok=True)
    for old in (*flags.out.glob("hotkv-*.tar.gz"), *flags.out.glob("hotkv-*.whl")):
        old.unlink()
    sdist, wheel = build(flags.out)
    with tempfile.TemporaryDirectory(prefix="hotkv-dist-") as name:
        folder = Path(name)
        for archive in (wheel, sdist):
            check_contents(archive)
            (folder / archive.suffix[1:]).mkdir()
        client = check_client(wheel, folder / "client")
        check_server(wheel, folder / wheel.suffix[1:], client)
        check_server(sdist, folder / sdist.suffix[1:])
    print(f"dist: {sdist.name} and {wheel.name} in {flags.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
