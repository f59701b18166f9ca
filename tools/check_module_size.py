"""Fails if a module or a class is too long: a module is about one idea.

Limits in lines: 400 for modules and 250 for classes of the packages, 600 for modules of tests,
benchmarks, tools and the demonstration. Generated code doesn't count.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("proto", "sparse", "client", "server", "connector_vllm")
OTHERS = ("tools", "demo", "bench", "tests")
GENERATED = ("_pb2.py", "_pb2_grpc.py")
MODULE_LINES = 400
CLASS_LINES = 250
OTHER_MODULE_LINES = 600


def modules(folders: tuple[str, ...]) -> Iterator[Path]:
    """Written Python files of these folders, in order."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.name.endswith(GENERATED):
                yield path


def too_long(path: Path, module_lines: int, class_lines: int | None) -> Iterator[str]:
    """Names what is beyond a limit in one module."""
    source, name = path.read_text(), path.relative_to(ROOT)
    num_lines = len(source.splitlines())
    if num_lines > module_lines:
        yield f"{name}: {num_lines} lines (limit {module_lines})"
    if class_lines is None:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > class_lines:
                yield f"{name}: class {node.name} has {num_lines} lines (limit {class_lines})"


def main() -> int:
    """Command line."""
    found = [
        *(line for path in modules(PACKAGES) for line in too_long(path, MODULE_LINES, CLASS_LINES)),
        *(line for path in modules(OTHERS) for line in too_long(path, OTHER_MODULE_LINES, None)),
    ]
    print("\n".join(found), end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
