"""Generates the Python code of the gRPC messages from proto/hotkv/v1/*.proto.

`--check`: is the committed code up to date? Runs in a small environment of `make proto` and
`make check`: the oldest protobuf that vLLM allows can't load newer generated code.
"""

import argparse
import difflib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "proto"
PACKAGE = Path("hotkv/v1")
"""Of the protobuf files. Generated code is in `hotkv_proto.v1`, as other products are imported
as `hotkv`."""
MODULES = Path("hotkv_proto/v1")
IMPORTS = re.compile(r"\bhotkv\.v1(?=\.\w+_pb2\b| import )")
"""Generated modules import each other so."""
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def generated_files(root: Path) -> Iterator[Path]:
    """Relative to `root`, sorted."""
    for path in sorted((root / MODULES).iterdir()):
        if path.name.endswith(SUFFIXES):
            yield path.relative_to(root)


def generate(target: Path) -> None:
    """Below `target`. Raises CalledProcessError if protoc refuses a file."""
    sources = sorted(str(path.relative_to(SOURCE)) for path in (SOURCE / PACKAGE).glob("*.proto"))
    outputs = [
        f"--{plugin}_out={target}" for plugin in ("python", "grpc_python", "mypy", "mypy_grpc")
    ]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{SOURCE}", *outputs, *sources]
    # protoc's mypy plugins are there.
    plugins = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    subprocess.run(command, check=True, cwd=SOURCE, env={**os.environ, "PATH": plugins})
    (target / MODULES).parent.mkdir()
    (target / PACKAGE).rename(target / MODULES)
    for path in (target / MODULES).iterdir():
        path.write_text(IMPORTS.sub(".".join(MODULES.parts), path.read_text()))
    for source in (SOURCE / PACKAGE).glob("*.proto"):
        if not re.search(r"^service ", source.read_text(), re.MULTILINE):
            for suffix in ("_pb2_grpc.py", "_pb2_grpc.pyi"):
                (target / MODULES / f"{source.stem}{suffix}").unlink()


def read(path: Path) -> str:
    """Empty if there is no file."""
    return path.read_text() if path.exists() else ""


def stale(fresh: Path) -> list[Path]:
    """Committed files that differ from `fresh`, are missing, or have no source."""
    names = sorted({*generated_files(fresh), *generated_files(SOURCE)})
    return [name for name in names if read(fresh / name) != read(SOURCE / name)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail if committed code is out of date"
    )
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        generate(fresh)
        changed = stale(fresh)
        for name in changed:
            if check:
                lines = difflib.unified_diff(
                    read(SOURCE / name).splitlines(),
                    read(fresh / name).splitlines(),
                    lineterm="",
                    n=0,
                )
                print(f"{SOURCE.name}/{name} is out of date:", *list(lines)[2:8], sep="\n  ")
            elif (fresh / name).exists():
                (SOURCE / name).write_text(read(fresh / name))
                print(f"wrote {SOURCE.name}/{name}")
            else:
                (SOURCE / name).unlink()
                print(f"removed {SOURCE.name}/{name}")
    if check and changed:
        print("run `make proto` and commit what it writes")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
