"""Shows that connector and server run without sparse decode and residency.

Copies the tree without `sparse/` and `tests/sparse`. Imports every module that is left, then runs
TESTS there.

    python -m tools.without_sparse
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("proto", "client", "server", "connector_vllm")
LEFT_OUT = ("sparse", "tests/sparse")
TESTS = (
    *(
        f"tests/vllm/test_{name}.py"
        for name in (
            *("admission", "callbacks", "end_to_end", "events", "hit_finder", "hybrid"),
            *("life_cycle", "load_choice", "metadata", "misses", "ranks_together", "rekeying"),
            *("reset", "revocations", "scheduler_books", "seams", "setup"),
            *("sides", "store_planner", "stress", "worker_loads", "worker_stores"),
        )
    ),
    "tests/offloading/test_tier.py",
    "tests/wire/test_table_reader.py",
    *(f"tests/server/test_{name}.py" for name in ("transfers", "flush", "ranks", "fence")),
)
PATHS = """
import sys
from pathlib import Path

sys.path[:] = [one for one in sys.path if not Path(one, "hotkv_sparse").is_dir()]
"""
"""A `sitecustomize` that hides the packages of an editable installation."""
IMPORTS = """
import importlib, importlib.util, pkgutil, sys

assert importlib.util.find_spec("hotkv_sparse") is None, "hotkv_sparse is still there"
count = 0
for package in ("hotkv_proto", "hotkv_client", "hotkv_server", "hotkv_vllm"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
            count += 1
print(f"{count} modules are imported without sparse decode")
"""


def copy(folder: Path) -> None:
    """Tracked files, and those that git does not ignore."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    named = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, named.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(tuple(f"{one}/" for one in LEFT_OUT)):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / "sitecustomize.py").write_text(PATHS)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run connector and server without sparse decode.")
    parser.add_argument("pytest", nargs="*", help="in place of the chosen tests")
    chosen = parser.parse_args().pytest or [*TESTS, "-m", "not long"]
    with tempfile.TemporaryDirectory(prefix="hotkv-without-sparse-") as made:
        folder = Path(made).resolve()
        copy(folder)
        paths = [str(folder), *(str(folder / name) for name in PACKAGES)]
        # Another vLLM may lie before this one.
        others = os.environ.get("PYTHONPATH", "").split(":")
        paths = [*(one for one in others if one and Path(one, "vllm").is_dir()), *paths]
        environment = {**os.environ, "PYTHONPATH": ":".join(paths)}
        pytest = ("-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider")
        for arguments in (("-c", IMPORTS), (*pytest, *chosen)):
            done = subprocess.run((sys.executable, *arguments), cwd=folder, env=environment)
            if done.returncode:
                return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
