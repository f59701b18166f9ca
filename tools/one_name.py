"""Checks that a name stands for one thing: public classes that two modules of the product define,
and file names that more than three have. Exits with 1 if there are any.

    python tools/one_name.py               the check
    python tools/one_name.py --functions   also lists functions that several modules define
"""

import ast
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("proto", "sparse", "client", "server", "connector_vllm")
MAX_SAME_FILES = 3
SAME_BY_DESIGN = {"__init__", "calls", "capability", "drive", "figures", "service", "tier"}
"""Each capability, or each tier, may have them."""


def modules() -> list[Path]:
    files = (file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py")))
    return [file for file in files if "_pb2" not in file.name]


def definitions(kinds: tuple[type[ast.stmt], ...]) -> dict[str, list[Path]]:
    """Modules by the public name that they define."""
    places = defaultdict[str, list[Path]](list)
    for file in modules():
        for node in ast.parse(file.read_text()).body:
            name = getattr(node, "name", "_")
            if isinstance(node, kinds) and not name.startswith("_"):
                places[name].append(file.relative_to(ROOT))
    return places


def main(arguments: list[str]) -> int:
    files = defaultdict[str, list[Path]](list)
    for file in modules():
        files[file.stem].append(file.relative_to(ROOT))
    problems = [
        f"{name}: {', '.join(map(str, places))}"
        for name, places in sorted(definitions((ast.ClassDef,)).items())
        if len(places) > 1
    ] + [
        f"{name}.py: {', '.join(map(str, places))}"
        for name, places in sorted(files.items())
        if len(places) > MAX_SAME_FILES and name not in SAME_BY_DESIGN
    ]
    print(*(f"one name, several things: {one}" for one in problems), sep="\n", end="")
    if "--functions" in arguments:
        functions = definitions((ast.FunctionDef, ast.AsyncFunctionDef))
        for name, places in sorted(functions.items()):
            if len(places) > 1:
                print(f"function {name}: {', '.join(map(str, places))}")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
