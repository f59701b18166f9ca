"""Compares the connector's uses of vLLM's API with the sources of every supported version. Uses the
sources of the installed vLLM and source distributions of the package index.

Checks, on syntax trees: imported names, attributes of vLLM's objects and calls as far as type
annotations allow, and signatures of overridden callbacks (the methods of a connector that vLLM
calls). Each callback of vLLM's base class must be overridden or be listed in `NOT_OVERRIDDEN`. If
the index can't be reached, prints the missing versions and checks the rest.

Also checks that only `hotkv_vllm.compat` and the modules in `FREE` read vLLM's internals, and that
other modules import only the names in `PUBLIC`. import-linter sees vLLM as a single package, so it
can't check this finer rule.
"""

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "connector_vllm")]

from hotkv_vllm.compat.definitions import Sources  # noqa: E402
from hotkv_vllm.compat.uses import DOORS, LEFT_OUT, OFFLOADING, OWN, TESTED, Line, span  # noqa: E402
from tools.vllm_sources import (  # noqa: E402
    Source,
    Unreachable,
    installed,
    lines,
    release,
)
from tools.vllm_uses import Uses, callbacks_of, pauses_by  # noqa: E402

PACKAGE = ROOT / "connector_vllm" / "hotkv_vllm"
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
CACHE = Path(os.environ.get("HOTKV_VENV", str(ROOT / ".venv"))) / ".vllm"
OLDEST: Line = (0, 31)
"""Oldest release line of vLLM, such as (0, 31) for 0.31.x, that is compared. Lines between this one
and the tested lines are compared too; if one would not work, `LEFT_OUT` must say why."""
FEWEST_CHECKED = 150
"""If fewer uses of vLLM than this are found in a version, the check itself must have an error, and
fails."""

NOT_OVERRIDDEN = {
    "bind_gpu_block_pool": "bind_kv_cache_manager takes its place",
    "clear_connector_metadata": "the base class drops the step's metadata, as we need it",
    "finish_forward": "stores begin in wait_for_save",
    "get_external_cache_hit_sources": "_cache_hit_source says it",
    "get_finished": "get_transfer_results takes its place",
    "get_finished_count": "each rank reports for itself",
    "get_kv_connector_kv_cache_events": "the server publishes events",
    "get_loaded_kv_cache_group_ids": "the default is right: all prefix-cacheable groups",
    "get_mem_pool_context": "the engine's own pool",
    "has_connector_metadata": "overridden by an attribute: a method costs a call per layer",
    "has_pending_push_work": "nothing waits for a step to go on",
    "register_finished_partial_tail": "partial blocks are not stored",
    "requires_piecewise_for_cudagraph": "nothing happens per layer",
    "reset_capture_state": "capturing changes nothing of ours",
    "role": "a property of the base class",
    "set_host_xfer_buffer_ops": "no host buffer of vLLM's",
    "set_xfer_handshake_metadata": "set_xfer_handshake_metadata_pp_aware takes its place",
    "supports_divergent_local_hybrid_hits": "hits of all groups end at one boundary",
    "take_events": "the server publishes events",
}
"""Callbacks (methods of vLLM's connector class) that hotkv does not override, and why. If vLLM adds
a callback, read what it demands of connectors, then override it or list it here."""

FREE = {
    "worker/layout.py",
    "sparse/backend.py",
    "residency/cuda_backend.py",
    "testing/host_copies.py",
}
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
    "vllm.v1.kv_offload.base",
    "vllm.v1.kv_offload.tiering.base",
    "vllm.v1.metrics.cache_hit_source",
    "vllm.v1.outputs",
    "vllm.v1.request",
)
"""Sources of vLLM that all modules may import: base classes, the values passed to a connector's
callbacks, and vLLM's API for programs. A name includes its submodules."""


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the line and full name of each import from vLLM."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "vllm")


def internal_imports() -> list[str]:
    """Returns a message with file and line for each import of vLLM's internals by a module that
    must not import them (see the module's docstring)."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {name} is internal to vLLM: reach it through "
        "hotkv_vllm.compat or .worker.layout"
        for path in sorted(PACKAGE.rglob("*.py"))
        if (module := path.relative_to(PACKAGE).as_posix()) not in FREE
        and not module.startswith(FREE_FOLDER)
        for line, name in imported(ast.parse(path.read_text()))
        if not any(name == public or name.startswith(public + ".") for public in PUBLIC)
    ]


def modules(door: str) -> list[Path]:
    """Returns the modules of a door (one of hotkv's two vLLM connectors). HotKVConnector has all
    modules except the folders `offloading` and `testing`. HotKVOffloadingConnector has the folder
    `offloading` and the modules that it imports."""
    doubles = PACKAGE / "testing"
    everything = sorted(path for path in PACKAGE.rglob("*.py") if doubles not in path.parents)
    within = [path for path in everything if OFFLOADING in path.relative_to(PACKAGE).parts[:1]]
    if door == OWN:
        return [path for path in everything if path not in within]
    found, new = set(within), set(within)
    while new:
        new = {one for path in new for one in _imported_modules(path)} - found
        found |= new
    return sorted(found)


def _imported_modules(path: Path) -> Iterator[Path]:
    """Yields the modules of `hotkv_vllm` that a module imports, at its top or inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == PACKAGE.name:
                place = PACKAGE.joinpath(*parts[1:])
                files = (place.with_suffix(".py"), place / "__init__.py")
                yield from (file for file in files if len(parts) > 1 and file.is_file())


def supported(door: str = OWN) -> tuple[Line, ...]:
    """Returns the release lines of vLLM, such as (0, 33), with which a connector is tested. `door`:
    one of hotkv's two vLLM connectors."""
    first, last = TESTED[door]
    return tuple((first[0], minor) for minor in range(first[1], last[1] + 1))


def sources(tested: tuple[Line, ...]) -> Iterator[tuple[Source, bool]]:
    """Yields the sources of the installed vLLM, and those of the release lines `tested` that can be
    fetched. Each comes with True if it is the newest of these lines. Prints the lines that can't be
    fetched."""
    yield installed(), False
    for line in tested:
        try:
            yield release(line, CACHE), line == tested[-1]
        except Unreachable as error:
            print(f"NOT CHECKED against vLLM {line[0]}.{line[1]}: {error}")


def uses_of(names: Sources, door: str) -> Iterator[Uses]:
    """Yields, for each module of a connector, its uses of vLLM, compared with the vLLM version
    whose names are in `names`. `door`: one of hotkv's two vLLM connectors."""
    for path in modules(door):
        uses = Uses(names, str(path.relative_to(ROOT)), ast.parse(path.read_text()))
        uses.check()
        yield uses


def compare(source: Source, *, is_newest: bool, door: str = OWN) -> list[str]:
    """Compares a vLLM version with the uses of vLLM by a connector. Returns the differences.

    source: the version's sources.
    is_newest: whether it is the newest tested version.
    door: one of hotkv's two vLLM connectors.
    """
    names = Sources(source, is_whole=True)
    problems, num_checked = [], 0
    for uses in uses_of(names, door):
        problems += uses.problems
        num_checked += uses.num_checked
    if door == OWN:
        problems += [why] if (why := pauses_by(names)) else []
        problems += callback_problems(names, is_newest=is_newest)
    if door == OWN and num_checked < FEWEST_CHECKED:
        problems.append(
            f"only {num_checked} uses of vLLM were found, where at least {FEWEST_CHECKED} were "
            "expected"
        )
    print(
        f"{source.name}, {door}: {num_checked} imports, attributes, calls and overrides compared, "
        f"{len(problems)} problems"
    )
    return sorted(set(problems))


def others(door: str) -> list[str]:
    """Compares the release lines of vLLM with which a door (one of hotkv's two vLLM connectors) is
    not tested. Each older line with differences must have a message in `LEFT_OUT`. Differences of
    newer lines are only printed."""
    first, last = TESTED[door]
    try:
        newer = [line for line in lines() if line > last]
    except Unreachable as error:
        print(f"NOT CHECKED against versions newer than {last[0]}.{last[1]}: {error}")
        newer = []
    older = [(OLDEST[0], minor) for minor in range(OLDEST[1], first[1])]
    found = []
    for line in [*older, *newer]:
        try:
            source = release(line, CACHE)
        except Unreachable as error:
            print(f"NOT CHECKED against vLLM {line[0]}.{line[1]}: {error}")
            continue
        problems = compare(source, is_newest=False, door=door)
        if line > last:
            print("\n".join(f"newer, {source.name}: {problem}" for problem in problems))
        elif bool(problems) != (line in LEFT_OUT[door]):
            found.append(f"{source.name}, {door}: LEFT_OUT does not say why: {problems}")
    return found


def callback_problems(names: Sources, *, is_newest: bool) -> list[str]:
    """Returns a message for each callback (method of vLLM's connector class) that is neither
    overridden nor listed in `NOT_OVERRIDDEN`. For the newest version, also for overridden and
    listed callbacks that no longer exist."""
    found = [
        cls
        for name in ("KVConnectorBase_V1", "SupportsHMA")
        if (cls := names.find(f"{BASE}.{name}")) is not None
    ]
    theirs = {callback for cls in found for callback in callbacks_of(names, cls)}
    tree = ast.parse((PACKAGE / "connector.py").read_text())
    connector = next(
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "HotKVConnector"
    )
    ours = {
        node.name
        for node in connector.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }
    problems = [
        f"{BASE}: {callback} is neither overridden nor in NOT_OVERRIDDEN"
        for callback in sorted(theirs - ours - set(NOT_OVERRIDDEN))
    ]
    if is_newest:
        problems += [
            f"connector.py: {callback} is no callback of vLLM's any more"
            for callback in sorted(ours - theirs)
        ]
        problems += [
            f"NOT_OVERRIDDEN: {callback} is no callback of vLLM's"
            for callback in sorted(set(NOT_OVERRIDDEN) - theirs)
        ]
    return problems


def main() -> int:
    said = f"vLLM {span(OWN)}"
    found = internal_imports()
    if said not in (ROOT / "README.md").read_text():
        found.append(f"README.md does not say {said!r}, as hotkv_vllm/compat/uses.py does")
    for door in DOORS:
        if not modules(door):
            continue
        for source, is_newest in sources(supported(door)):
            problems = compare(source, is_newest=is_newest, door=door)
            found += [f"{source.name}, {door}: {problem}" for problem in problems]
        found += others(door)
    print("\n".join(found), end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
