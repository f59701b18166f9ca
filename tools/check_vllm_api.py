"""Compares the connector's uses of vLLM's API with every supported version: the installed vLLM and
the package index's source distributions.

On syntax trees: imported names, attributes and calls of vLLM's objects as far as annotations allow,
signatures of overridden callbacks. Each callback of vLLM's base class is overridden or in
`NOT_OVERRIDDEN`. Without the index, the missing versions are printed and the rest checked.

Only `FREE` reads vLLM's internals; others import only `PUBLIC`.
import-linter sees vLLM as one package, so it can't check this.
"""

import ast
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "connector_vllm")]

from hotkv_vllm.compat.uses import DOORS, OFFLOADING, OWN, TESTED, Line, span  # noqa: E402
from tools.vllm_definitions import Sources  # noqa: E402
from tools.vllm_sources import (  # noqa: E402
    Source,
    Unreachable,
    installed,
    lines,
    release,
)
from tools.vllm_uses import Uses, callbacks_of, pauses_by  # noqa: E402

PACKAGE = ROOT / "connector_vllm" / "hotkv_vllm"
COMPANION = ROOT / "sparse" / "hotkv_sparse" / "vllm"
"""Belongs to `HotKVConnector`."""
PROGRAMS = (COMPANION / "calibrate.py",)
"""Run vLLM themselves; no engine imports them."""
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
CACHE = Path(os.environ.get("HOTKV_VENV", str(ROOT / ".venv"))) / ".vllm"
OLDEST: Line = (0, 31)
"""Line to compare, such as (0, 31) for 0.31.x. If one between this and the tested ones would not
work, `LEFT_OUT` says why."""
LEFT_OUT: Mapping[str, Mapping[Line, str]] = {
    OWN: {(0, 31): "no CacheHitSource; KVCacheConfig lacks hash_block_size"},
    OFFLOADING: {(0, 31): "KVCacheConfig lacks hash_block_size"},
}
"""Older lines with which a door can't work, and why."""
FEWEST_CHECKED = 150
"""With fewer uses found, the check itself must be wrong, and fails."""

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
"""And why. For a new callback, read what it demands, then override it or list it."""

FREE = {
    PACKAGE / "worker" / "layout.py",
    COMPANION / "attention_layers.py",
    COMPANION / "block_manager.py",
    COMPANION / "device_pool.py",
    COMPANION / "cpu" / "backend.py",
    COMPANION / "cpu" / "key_pages.py",
    COMPANION / "cuda" / "backend.py",
    *(PACKAGE / "compat").glob("*.py"),
}
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
"""That all modules may import: base classes, callbacks' values, vLLM's API for programs. A name
includes its submodules."""


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full name of each import from vLLM."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "vllm")


def internal_imports() -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {name} is internal to vLLM: reach it through "
        "hotkv_vllm.compat or .worker.layout"
        for path in sorted([*PACKAGE.rglob("*.py"), *COMPANION.rglob("*.py")])
        if path not in FREE
        for line, name in imported(ast.parse(path.read_text()))
        if not any(name == public or name.startswith(public + ".") for public in PUBLIC)
    ]


def modules(door: str) -> list[Path]:
    """HotKVConnector: all but `offloading`, and its companion. HotKVOffloadingConnector:
    `offloading` and what it imports."""
    everything = sorted(PACKAGE.rglob("*.py"))
    within = [path for path in everything if OFFLOADING in path.relative_to(PACKAGE).parts[:1]]
    if door == OWN:
        own = [path for path in everything if path not in within]
        return [*own, *sorted(COMPANION.rglob("*.py"))]
    found, new = set(within), set(within)
    while new:
        new = {one for path in new for one in _imported_modules(path)} - found
        found |= new
    return sorted(found)


def _imported_modules(path: Path) -> Iterator[Path]:
    """Of `hotkv_vllm`, at a module's top or inside functions."""
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
    """Lines, such as (0, 33), with which a door is tested."""
    first, last = TESTED[door]
    return tuple((first[0], minor) for minor in range(first[1], last[1] + 1))


def sources(tested: tuple[Line, ...]) -> Iterator[tuple[Source, bool]]:
    """With True for the newest of the lines. Prints those that can't be fetched."""
    yield installed(), False
    for line in tested:
        try:
            yield release(line, CACHE), line == tested[-1]
        except Unreachable as error:
            print(f"NOT CHECKED against vLLM {line[0]}.{line[1]}: {error}")


def uses_of(names: Sources, paths: Iterable[Path]) -> Iterator[Uses]:
    """Uses in each module."""
    for path in paths:
        uses = Uses(names, str(path.relative_to(ROOT)), ast.parse(path.read_text()))
        uses.check()
        yield uses


def compare(source: Source, *, is_newest: bool, door: str = OWN) -> list[str]:
    """Returns the differences. is_newest: of the tested versions."""
    names = Sources(source)
    problems, num_checked = [], 0
    for uses in uses_of(names, modules(door)):
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
    """Lines with which a door is not tested: older ones with differences need a message in
    `LEFT_OUT`; newer ones' are printed."""
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
    """Neither overridden nor listed; for the newest version also those that are gone."""
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
