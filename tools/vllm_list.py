"""Generates `hotkv_vllm/compat/uses.json`, the names in vLLM that the connectors use, from the
tested versions' sources; engines compare it with the installed vLLM when they start.

`--check` fails if it is out of date with its versions' sources and the connectors' modules; if a
source can't be fetched, only the installed vLLM's uses are compared. `--newest` compares it with
the newest release, as an engine does.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "connector_vllm")]

from hotkv_vllm.compat.definitions import Sources  # noqa: E402
from hotkv_vllm.compat.uses import (  # noqa: E402
    DOORS,
    ENUMS,
    LIST,
    TESTED,
    ApiUses,
    Form,
    backends,
    differences,
    form_of,
    spec_classes,
)
from tools.check_vllm_api import CACHE, PACKAGE, modules, supported, uses_of  # noqa: E402
from tools.vllm_sources import Source, Unreachable, exact, installed, lines, release  # noqa: E402

CORE = "vllm.v1.engine.core"
CALLED = ("EngineCore._reset_caches", "EngineCore.reset_prefix_cache")
"""Also listed with their callers, by which `hotkv_vllm.compat.checks.is_pausing` tells a pause."""


def forms(names: Sources, door: str) -> dict[tuple[str, str], Form]:
    """By module and name, in one version: calls that the connector makes, and the signature."""
    found: dict[tuple[str, str], Form] = {}
    for uses in uses_of(names, door):
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


def made(sources: Sequence[Source]) -> str:
    """Each use with its forms in all versions; None: a version lacks it."""
    every = [Sources(source, is_whole=True) for source in sources]
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
    text = LIST.read_text()
    uses = ApiUses.read(text)
    tested = {f"{line[0]}.{line[1]}" for door in TESTED for line in supported(door)}
    if tested != {version.rpartition(".")[0] for version in uses.made_from}:
        return f"it was made from {', '.join(uses.made_from)}"
    try:
        return "" if made([exact(one, CACHE) for one in uses.made_from]) == text else "it differs"
    except Unreachable as error:
        print(f"NOT CHECKED, but for the installed vLLM: {LIST.name}: {error}")
    names = Sources(installed(), is_whole=True)
    for door in filter(modules, DOORS):
        listed = {(module, name) for module, found in uses.doors[door].items() for name in found}
        if lacking := sorted(set(forms(names, door)) - listed):
            return f"it lacks {'.'.join(lacking[0])}"
    return ""


def newest() -> list[str]:
    """Differences to the newest release."""
    source = release(lines()[-1], CACHE)
    uses = ApiUses.read(LIST.read_text())
    found = [f"{door}: {line}" for door in uses.doors for line in differences(source, door, uses)]
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
