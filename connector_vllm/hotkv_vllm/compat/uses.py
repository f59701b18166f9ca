"""Checks whether an untested vLLM still has the API that hotkv uses.

`uses.json` lists it per door, and the reviewed attention backends and KV cache specs. `make fix`
makes it from the tested versions' sources (`tools/vllm_list.py`). At an engine's start it is
compared with an untested vLLM's sources, in less than 0.2 s, and nightly with vLLM's releases.

vLLM is not imported; only files in the list are read. Nothing is written to disk.

`python -m hotkv_vllm.compat.uses VERSION` prints as JSON whether each door works with the
installed vLLM; `hotkv doctor` runs it.
"""

import ast
import gc
import importlib.util
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from time import perf_counter
from typing import Any

from hotkv_vllm.compat.definitions import (
    Call,
    Definition,
    Files,
    FunctionDef,
    Module,
    Readable,
    Sources,
    cannot_take,
    kind_of,
    signature,
    type_text,
)

# ----------------------------------------------------------------------------------- What is tested

OWN, OFFLOADING = "own", "offloading"
DOORS = (OWN, OFFLOADING)
"""`HotKVConnector` and `HotKVOffloadingConnector`."""

Line = tuple[int, int]
TESTED: Mapping[str, tuple[Line, Line]] = {
    OWN: ((0, 32), (0, 33)),
    OFFLOADING: ((0, 32), (0, 33)),
}
"""First and last tested release line (major, minor), with their patch releases."""

LEFT_OUT: Mapping[str, Mapping[Line, str]] = {
    OWN: {(0, 31): "no CacheHitSource; KVCacheConfig lacks hash_block_size"},
    OFFLOADING: {(0, 31): "KVCacheConfig lacks hash_block_size"},
}
"""Older lines with which a door can't work, and why; `make check` compares them too."""


def span(door: str) -> str:
    """Such as `0.32 to 0.33`."""
    first, last = TESTED[door]
    return f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"


def is_tested(door: str, version: str) -> bool:
    """False for a build between releases: vLLM's main after 0.33.0, which becomes 0.34, names
    its builds `0.33.1rc1.dev268`."""
    release = re.match(r"(\d+)\.(\d+)(?!.*dev)", version)
    first, last = TESTED[door]
    return release is not None and first <= (int(release[1]), int(release[2])) <= last


# --------------------------------------------------------------------------------------- The list

LIST = Path(__file__).with_name("uses.json")
SPECS = "vllm.v1.kv_cache_interface"
SPEC = "KVCacheSpec"
"""Base of all KV cache specs, in `SPECS`."""
REGISTRY = "vllm.v1.attention.backends.registry"
ENUMS = ("AttentionBackendEnum", "MambaAttentionBackendEnum")


@dataclass
class Form:
    """What hotkv relies on in a name of vLLM; empty properties do not count.

    kind: `class`, `function`, `module`, `value`, `method`, `classmethod` or `staticmethod`.
    gives: type of the value or result, if hotkv uses its members.
    calls: of hotkv, each a `Call` as text.
    signature: of a method that hotkv overrides.
    abstract: methods that hotkv's subclasses must define.
    callers: methods of the class that call this one, if hotkv looks for one on the call stack.
    """

    kind: str
    gives: str = ""
    calls: set[str] = field(default_factory=set)
    signature: str = ""
    abstract: list[str] = field(default_factory=list)
    callers: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> "Form":
        return cls(**{**entry, "calls": set(entry.get("calls", ()))})

    def entry(self) -> dict[str, Any]:
        """As JSON, without empty properties."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        values["calls"] = sorted(self.calls)
        return {name: value for name, value in values.items() if value}


@dataclass(frozen=True)
class ApiUses:
    """The contents of `uses.json`.

    made_from: versions of vLLM.
    specs: reviewed.
    backends: reviewed, by vLLM's enumeration.
    doors: by door, module and name, the forms in `made_from`; None for versions without the
        name.
    """

    made_from: tuple[str, ...]
    specs: frozenset[str]
    backends: Mapping[str, frozenset[str]]
    doors: Mapping[str, Mapping[str, Mapping[str, tuple[Form | None, ...]]]]

    @classmethod
    def read(cls, text: str) -> "ApiUses":
        told = json.loads(text)
        return cls(
            tuple(told["made_from"]),
            frozenset(told["specs"]),
            {name: frozenset(members) for name, members in told["backends"].items()},
            {
                door: {
                    module: {
                        name: tuple(Form.read(entry) if entry else None for entry in entries)
                        for name, entries in names.items()
                    }
                    for module, names in modules.items()
                }
                for door, modules in told["doors"].items()
            },
        )


def form_of(names: Sources, found: Definition, *, is_member: bool) -> Form:
    """Only `kind` and `gives`."""
    node = found.node
    if isinstance(node, FunctionDef):
        kind = kind_of(node) if is_member else "function"
        kind = "value" if kind == "property" else kind
    else:
        kind = "class" if isinstance(node, ast.ClassDef) else "value"
        kind = "module" if node is Module.node else kind
    given = type_text(names.given(found))
    return Form(kind, given if given.strip("_[]{}(), :") else "")


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


# --------------------------------------------------------------------------------- The comparison


def differences(source: Readable, door: str, uses: ApiUses) -> list[str]:
    """A line per difference: unlisted KV cache specs and attention backends, and what the door
    uses in an unlisted form. Raises SyntaxError."""
    names = Sources(source, is_whole=False)
    found = {**changed_uses(source, names, door, uses), **unknown_kinds(names, uses)}
    return list(found)


def changed_uses(source: Readable, names: Sources, door: str, uses: ApiUses) -> dict[str, None]:
    """A dict of lines, in the list's order.

    names: parses parts of files; what differs is looked up again in whole files.
    """
    whole = Sources(source, is_whole=True)
    found: dict[str, None] = {}
    for module, entries in uses.doors[door].items():
        for name, forms in entries.items():
            if _differs(names, module, name, forms) and (
                why := _differs(whole, module, name, forms)
            ):
                found[why] = None
    return found


def unknown_kinds(names: Sources, uses: ApiUses) -> dict[str, None]:
    """A dict of lines about KV cache specs and attention backends that are not listed."""
    found: dict[str, None] = {}
    for name in sorted(spec_classes(names) - uses.specs):
        found[f"{name} is a KV cache spec that nobody has looked at"] = None
    for enum in ENUMS:
        for name in sorted(backends(names, enum) - uses.backends[enum]):
            found[f"{name} is an attention backend that nobody has looked at"] = None
    return found


def _differs(names: Sources, module: str, name: str, forms: Sequence[Form | None]) -> str:
    """Difference from the last form; empty if one of the forms fits."""
    problems = [_differs_from(names, module, name, form) for form in forms]
    return next(one for one in reversed(problems) if one) if all(problems) else ""


def _differs_from(names: Sources, module: str, name: str, form: Form | None) -> str:
    """name: in the module, such as `Class.member`.
    form: None: the name must be missing.
    """
    first, _, member = name.partition(".")
    found = names.find(f"{module}.{first}")
    if form is None:
        cls = found if found is not None and isinstance(found.node, ast.ClassDef) else None
        is_gone = names.member(cls, member) is None if cls is not None and member else found is None
        return "" if is_gone else f"{name} is there"
    if found is None:
        return f"{module}.{first} is not there"
    if member:
        if not isinstance(found.node, ast.ClassDef):
            return f"{module}.{first} is no class"
        cls, found = found, names.member(found, member)
        if found is None:
            return f"{first} has no attribute {member}"
        if form.callers and (callers := names.callers(cls, member)) != form.callers:
            return f"{name} is called by {', '.join(callers) or 'nobody'}"
    there = form_of(names, found, is_member=bool(member))
    if there.kind != form.kind:
        return f"{name} is a {there.kind}, and was a {form.kind}"
    if form.gives and there.gives != form.gives:
        return f"{name} gives {there.gives or 'an unknown type'}, and gave {form.gives}"
    if form.signature and isinstance(found.node, FunctionDef):
        theirs = signature(found.node)
        if theirs != form.signature:
            return f"{name} is now {theirs}, and was {form.signature}"
    if form.kind == "class" and (more := set(names.abstract(found)) - set(form.abstract)):
        return f"{name} asks for {', '.join(sorted(more))}" if form.abstract else ""
    return _refuses(names, name, found, form)


def _refuses(names: Sources, name: str, found: Definition, form: Form) -> str:
    """Why one of hotkv's calls is not accepted; empty if all are."""
    if not form.calls:
        return ""
    if isinstance(found.node, FunctionDef):
        parameters: ast.arguments | None = found.node.args
    else:
        parameters = names.constructor(found)
    if parameters is None:
        return f"nobody can tell the parameters of {name}"
    has_self = form.kind not in ("function", "staticmethod")
    for text in sorted(form.calls):
        if why := cannot_take(Call.read(text), parameters, has_self=has_self):
            return f"{name} {why}"
    return ""


# -------------------------------------------------------------------------------------- The answer


@dataclass(frozen=True)
class Answer:
    """Whether a door works with a vLLM, and why.

    changed: a line per difference; None for a tested version, which is not compared.
    num_uses: compared.
    """

    door: str
    version: str
    changed: tuple[str, ...] | None = None
    num_uses: int = 0
    took_s: float = 0.0

    @property
    def is_on(self) -> bool:
        return not self.changed

    def __str__(self) -> str:
        if self.changed is None:
            return f"vLLM {self.version} is tested"
        if not self.changed:
            return (
                f"vLLM {self.version} is not tested, but all {self.num_uses} uses of its API "
                f"check out ({self.took_s:.2f} s)"
            )
        more = len(self.changed) - 3
        return (
            f"it is tested with vLLM {span(self.door)}, and this is {self.version}: "
            f"{'; '.join(self.changed[:3])}{f'; and {more} more' if more > 0 else ''}"
        )


def installed() -> Readable | None:
    """Without importing vLLM; None if it is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    return Files(Path(spec.origin).parent.parent)


def answer(door: str, version: str, source: Readable | None = None) -> Answer:
    """Compares only untested versions.

    source: None: the installed vLLM.
    """
    if is_tested(door, version):
        return Answer(door, version)
    started_s = perf_counter()
    was_collecting = gc.isenabled()
    # It would double the time and find nothing: syntax trees have many objects but no cycles.
    gc.disable()
    try:
        source = source or installed()
        uses = ApiUses.read(LIST.read_text(encoding="utf-8"))
        num_uses = sum(map(len, uses.doors.get(door, {}).values()))
        if source is None:
            changed = ["its sources can't be found"]
        elif door not in uses.doors:
            changed = ["nobody has listed what is used of it"]
        else:
            changed = differences(source, door, uses)
    except (OSError, SyntaxError, UnicodeDecodeError, RecursionError) as error:
        num_uses, changed = 0, [f"its sources can't be read ({error})"]
    finally:
        if was_collecting:
            gc.enable()
    return Answer(door, version, tuple(changed), num_uses, perf_counter() - started_s)


def main(version: str) -> None:
    doors = ApiUses.read(LIST.read_text(encoding="utf-8")).doors
    answers = [answer(door, version) for door in DOORS if door in doors]
    last = TESTED[OWN][1]
    rows = [{"door": one.door, "is_on": one.is_on, "says": str(one)} for one in answers]
    print(json.dumps({"last": f"{last[0]}.{last[1]}", "doors": rows}))


if __name__ == "__main__":
    main(sys.argv[1])
