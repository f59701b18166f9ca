"""Only `hotkv_vllm.compat`, `.worker.layout`, `.sparse.backend` and `.residency.cuda_backend` read
vLLM's internals; the rest keeps to the modules named here.

import-linter sees vLLM as one package, so the finer rule is checked on the syntax tree.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "connector_vllm" / "hotkv_vllm"
FREE = {"worker/layout.py", "sparse/backend.py", "residency/cuda_backend.py"}
FREE_FOLDER = "compat/"
PUBLIC = (
    "vllm.LLM",
    "vllm.SamplingParams",
    "vllm.__version__",
    "vllm.config",
    "vllm.distributed.kv_events",
    "vllm.distributed.kv_transfer.kv_connector.v1",
    "vllm.envs",
    "vllm.forward_context",
    "vllm.logger",
    "vllm.v1.core.kv_cache_manager",
    "vllm.v1.core.sched.output",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.metrics.cache_hit_source",
    "vllm.v1.outputs",
    "vllm.v1.request",
)
"""Base classes, the values passed to a connector's hooks, and what vLLM offers to programs; a name
covers its submodules."""


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported from vLLM."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "vllm")


def main() -> int:
    """Command line."""
    found = False
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name in FREE or name.startswith(FREE_FOLDER):
            continue
        for line, name in imported(ast.parse(path.read_text())):
            if not any(name == public or name.startswith(public + ".") for public in PUBLIC):
                print(
                    f"{path.relative_to(ROOT)}:{line}: {name} is internal to vLLM: reach it "
                    "through hotkv_vllm.compat or .worker.layout"
                )
                found = True
    return int(found)


if __name__ == "__main__":
    sys.exit(main())
