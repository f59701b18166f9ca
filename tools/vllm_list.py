"""Generates `hotkv_vllm/compat/uses.json`, the names in vLLM that the connectors use, from the
tested versions' sources; engines compare an untested vLLM with it when they start.

`--check` fails if it is out of date with its versions' sources and the connectors' modules; if a
source can't be fetched, only the installed vLLM's uses are compared. `--newest` compares it with
the newest release, more closely than an engine does.
"""

import argparse
import ast
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "connector_vllm")]

from hotkv_vllm.compat.uses import (  # noqa: E402
    DOORS,
    ENUMS,
    LIST,
    REGISTRY,
    SPEC,
    SPECS,
    TESTED,
    read_list,
)
from tools.check_vllm_api import CACHE, PACKAGE, PROGRAMS, modules, supported, uses_of  # noqa: E402
from tools.vllm_definitions import Definition, Sources  # noqa: E402
from tools.vllm_sources import Source, Unreachable, exact, installed, lines, release  # noqa: E402
from tools.vllm_uses import Gathered, form_of  # noqa: E402

CORE = "vllm.v1.engine.core"
CALLED = ("EngineCore._reset_caches", "EngineCore.reset_prefix_cache")
"""Also listed with their callers, by which `hotkv_vllm.compat.checks.is_pausing` tells a pause."""


def forms(names: Sources, door: str) -> dict[tuple[str, str], Gathered]:
    """By module and name, in one version: what an engine with this door uses."""
    found: dict[tuple[str, str], Gathered] = {}
    for uses in uses_of(names, (path for path in modules(door) if path not in PROGRAMS)):
        for key, form in uses.forms.items():
            known = found.setdefault(key, form)
            known.calls |= form.calls
            known.signature = known.signature or form.signature
            known.abstract = known.abstract or form.abstract
    if PACKAGE / "compat" / "checks.py" in modules(door):
        cls = names.find(f"{CORE}.EngineCore")
        for name in CALLED if cls is not None else ():
            member = name.partition(".")[2]
            method = names.member(cls, member)  # type: ignore[arg-type]
            if method is not None:
                form = found.setdefault((CORE, name), form_of(names, method, is_member=True))
                form.callers = names.callers(cls, member)  # type: ignore[arg-type]
    return found


def spec_classes(names: Sources) -> set[str]:
    module = names.module(SPECS)
    classes = module.classes() if module is not None else ()
    return {
        node.name
        for node in classes
        if any(
            isinstance(base.node, ast.ClassDef) and base.node.name == SPEC
            for base in names.bases(Definition(SPECS, node))
        )
    }


def backends(names: Sources, enum: str) -> set[str]:
    found = names.lookup(REGISTRY, enum)
    body = found.node.body if found is not None and isinstance(found.node, ast.ClassDef) else ()
    targets = [line.targets[0] for line in body if isinstance(line, ast.Assign)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def made(sources: Sequence[Source]) -> str:
    """Each use with its forms in all versions; None: a version lacks it."""
    every = [Sources(source) for source in sources]
    doors: dict[str, dict[str, dict[str, list[Any]]]] = {}
    for door in filter(modules, DOORS):
        of_versions = [forms(names, door) for names in every]
        listed: dict[str, dict[str, list[Any]]] = {}
        for module, name in sorted(set().union(*of_versions)):
            entries: list[Any] = []
            for found in of_versions:
                entry = found[module, name].entry() if (module, name) in found else None
                if entry not in entries:
                    entries.append(entry)
            listed.setdefault(module, {})[name] = entries
        doors[door] = listed
    return written(
        {
            "made_from": [source.name.removeprefix("vLLM ") for source in sources],
            "specs": sorted({name for names in every for name in spec_classes(names)}),
            "backends": {
                enum: sorted({name for names in every for name in backends(names, enum)})
                for enum in ENUMS
            },
            "doors": doors,
        }
    )


def written(value: dict[str, Any]) -> str:
    """One use per line, so that a diff shows changed uses."""
    text = json.dumps({**value, "doors": {}}, indent=1).removesuffix("{}\n}")
    doors = []
    for door, listed in value["doors"].items():
        rows = []
        for module, names in listed.items():
            entries = [f"   {json.dumps(name)}: {json.dumps(one)}" for name, one in names.items()]
            rows.append(f"  {json.dumps(module)}: {{\n" + ",\n".join(entries) + "\n  }")
        doors.append(f"{json.dumps(door)}: {{\n" + ",\n".join(rows) + "\n }")
    return text + "{\n " + ",\n ".join(doors) + "\n}}\n"


def stale() -> str:
    """Why `uses.json` is out of date; empty if it is not."""
    told = read_list()
    tested = {f"{line[0]}.{line[1]}" for door in TESTED for line in supported(door)}
    if tested != {version.rpartition(".")[0] for version in told["made_from"]}:
        return f"it was made from {', '.join(told['made_from'])}"
    try:
        is_fresh = made([exact(one, CACHE) for one in told["made_from"]]) == LIST.read_text()
        return "" if is_fresh else "it differs"
    except Unreachable as error:
        print(f"NOT CHECKED, but for the installed vLLM: {LIST.name}: {error}")
    names = Sources(installed())
    for door in filter(modules, DOORS):
        listed = {(module, name) for module, found in told["doors"][door].items() for name in found}
        if lacking := sorted(set(forms(names, door)) - listed):
            return f"it lacks {'.'.join(lacking[0])}"
    return ""


def differences(source: Source) -> list[str]:
    """A line per use that a version has in an unlisted form, and per unlisted attention backend
    and KV cache spec."""
    told, names = read_list(), Sources(source)
    found = [f"{one} is new" for one in sorted(spec_classes(names).difference(told["specs"]))]
    for enum in ENUMS:
        new = backends(names, enum).difference(told["backends"][enum])
        found += [f"{enum}.{one} is new" for one in sorted(new)]
    for door, listed in told["doors"].items():
        there = forms(names, door)
        for module, entries in listed.items():
            for name, known in entries.items():
                one = there.get((module, name))
                entry = one.entry() if one is not None else None
                if entry not in known:
                    found.append(f"{door}: {module}: {name} is {entry}, and was {known[-1]}")
    return found


def newest() -> list[str]:
    """Differences to the newest release."""
    source = release(lines()[-1], CACHE)
    found = differences(source)
    print(f"{source.name}: {len(found)} differences from {LIST.name}")
    return found


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--check", action="store_true")
    options.add_argument("--newest", action="store_true")
    given = options.parse_args()
    if given.newest:
        found = newest()
    elif given.check:
        why = stale()
        found = [f"{LIST.relative_to(ROOT)} is stale ({why}): make fix"] if why else []
    else:
        tested = sorted({line for door in TESTED for line in supported(door)})
        LIST.write_text(made([release(line, CACHE) for line in tested]))
        found = []
    print("\n".join(found), end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
