"""Checks whether an untested vLLM still has the API that hotkv uses.

`uses.json` lists it per door, and the reviewed attention backends and KV cache specs. `make fix`
makes it from the tested versions' sources (`tools/vllm_list.py`). At an engine's start an untested
vLLM's modules, which the engine has loaded, are compared with it in less than 0.1 s. `make check`
and a nightly workflow compare the sources of vLLM's releases more closely.

`python -m hotkv_vllm.compat.uses VERSION` prints as JSON whether each door works with the
installed vLLM; `hotkv doctor` runs it.
"""

import contextlib
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter
from types import CodeType, ModuleType
from typing import Any, get_args

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


@dataclass(frozen=True, slots=True)
class Form:
    """What hotkv relies on in a name of vLLM; empty properties do not count.

    kind: `class`, `function`, `module`, `value`, `method`, `classmethod` or `staticmethod`.
    gives: type of the value or result, if hotkv uses its members.
    calls: of hotkv: names of parameters with positional arguments, `name=` for keywords, `*` for
        an argument that goes to `*args`, `...` if it also passes `*` or `**`.
    signature: of a method that hotkv overrides.
    abstract: methods that hotkv's subclasses must define.
    callers: methods of the class that call this one, if hotkv looks for one on the call stack.
    """

    kind: str
    gives: str = ""
    calls: tuple[str, ...] = ()
    signature: str = ""
    abstract: tuple[str, ...] = ()
    callers: tuple[str, ...] = ()


def read_list() -> dict[str, Any]:
    """`specs`, `backends` by enumeration, and `doors`: by door, module and name the forms in the
    tested versions, null for versions without the name. Raises OSError, ValueError."""
    told: dict[str, Any] = json.loads(LIST.read_text(encoding="utf-8"))
    return told


# --------------------------------------------------------------------------------- The comparison

MISSING, SET = object(), object()
"""No such name; an attribute that only the class's objects have."""


def changed_uses(listed: Mapping[str, Mapping[str, Sequence[Any]]]) -> dict[str, None]:
    """A dict of lines, in the list's order. A module that can't be imported because this machine
    lacks a library is left out: hotkv can't use it here either."""
    found: dict[str, None] = {}
    for module, names in listed.items():
        try:
            scope = _module(module)
        except ImportError:
            continue
        for name, entries in names.items():
            whys = [_difference(module, scope, name, entry) for entry in entries]
            if all(whys):
                found[whys[-1]] = None
    return found


def unknown_kinds(specs: Sequence[str], backends: Mapping[str, Sequence[str]]) -> dict[str, None]:
    """A dict of lines about KV cache specs and attention backends that are not listed."""
    found: dict[str, None] = {}
    scope = _module(SPECS)
    base = getattr(scope, SPEC, None)
    there = {
        name
        for name, cls in getattr(scope, "__dict__", {}).items()
        if inspect.isclass(cls) and cls.__module__ == SPECS and base in cls.__mro__
    }
    for name in sorted(there.difference(specs)):
        found[f"{name} is a KV cache spec that nobody has looked at"] = None
    for enum in ENUMS:
        members = getattr(getattr(_module(REGISTRY), enum, None), "__members__", {})
        for name in sorted(set(members).difference(backends[enum])):
            found[f"{name} is an attention backend that nobody has looked at"] = None
    return found


def _module(name: str) -> ModuleType | None:
    """None if vLLM has no such module. Raises ImportError if it can't be imported here."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return None


def _difference(
    module: str, scope: ModuleType | None, name: str, entry: Mapping[str, Any] | None
) -> str:
    """name: in the module, such as `Class.member`.
    entry: a `Form`; None: the name must be missing.
    """
    first, _, member = name.partition(".")
    found: Any = getattr(scope, first, MISSING)
    cls: Any = None
    if found is MISSING and hasattr(scope, "__path__"):
        found = _module(f"{module}.{first}") or MISSING
    why = f"{module}.{first} is not there"
    if member and found is not MISSING:
        cls, found = found, _member(found, member) if inspect.isclass(found) else MISSING
        why = f"{first} has no attribute {member}"
    if entry is None:
        return "" if found is MISSING else f"{name} is there"
    return why if found is MISSING else _differs_from(name, cls, found, Form(**entry))


def _differs_from(name: str, cls: type | None, found: Any, form: Form) -> str:
    """cls: whose member was found."""
    member = name.rpartition(".")[2]
    if form.callers and (callers := _callers(cls, member)) != list(form.callers):
        return f"{name} is called by {', '.join(callers) or 'nobody'}"
    kind = _kind(found, is_member=cls is not None)
    if kind != form.kind:
        return f"{name} is a {kind}, and was a {form.kind}"
    given = _given(cls, member, found)
    if given and not _words(form.gives) <= _words(given) and not _words(given) & PLACEHOLDERS:
        return f"{name} gives {given}, and gave {form.gives}"
    if form.signature:
        shown = "property" if isinstance(found, property) else kind
        theirs = signature(shown, _parameters(found))
        if theirs != form.signature:
            return f"{name} is now {theirs}, and was {form.signature}"
    abstract = getattr(found, "__abstractmethods__", ()) if form.abstract else ()
    if more := set(abstract).difference(form.abstract):
        return f"{name} asks for {', '.join(sorted(more))}"
    parameters = _parameters(found) if form.calls else []
    has_self = kind in ("method", "classmethod")
    whys = (cannot_take(call, parameters[int(has_self) :]) for call in form.calls)
    return next((f"{name} {why}" for why in whys if why), "")


def _member(cls: type, name: str) -> Any:
    """As the class or its nearest base defines it; SET; MISSING."""
    for one in cls.__mro__:
        if name in vars(one):
            return vars(one)[name]
    is_set = any(
        name in _annotations(one) or any(name in _names(code) for code in _codes(one).values())
        for one in cls.__mro__
    )
    return SET if is_set else MISSING


def _annotations(owner: Any) -> Mapping[str, Any]:
    """Of a class's own body or a function."""
    found: Mapping[str, Any] = getattr(owner, "__dict__", {}).get("__annotations__", {})
    return found if inspect.isclass(owner) else getattr(owner, "__annotations__", {})


def _parameters(found: Any) -> list[inspect.Parameter]:
    """With `self` or `cls`."""
    return list(inspect.signature(_function(found)).parameters.values())


def _function(found: Any) -> Any:
    """A method without its decorator; a property's getter."""
    if isinstance(found, property):
        return found.fget
    if isinstance(found, cached_property):
        return found.func
    return found.__func__ if isinstance(found, classmethod | staticmethod) else found


def _codes(cls: type) -> dict[str, CodeType]:
    """Of the methods in the class's own body."""
    functions = {name: inspect.unwrap(_function(one)) for name, one in vars(cls).items()}
    return {name: one.__code__ for name, one in functions.items() if inspect.isfunction(one)}


def _names(code: CodeType) -> set[str]:
    """Of the attributes that a method reads, sets or calls."""
    inner = [_names(one) for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*inner)


def _callers(cls: Any, name: str) -> list[str]:
    return sorted(method for method, code in _codes(cls).items() if name in _names(code))


def _kind(found: Any, *, is_member: bool) -> str:
    """As in `Form.kind`."""
    if inspect.ismodule(found) or inspect.isclass(found):
        return "module" if inspect.ismodule(found) else "class"
    if isinstance(found, classmethod | staticmethod):
        return type(found).__name__
    if not isinstance(found, cached_property) and inspect.isroutine(found):
        return "method" if is_member else "function"
    return "value"


def _given(cls: type | None, member: str, found: Any) -> str:
    """Annotated type of a value or result, as text; empty if there is no annotation."""
    given = _annotations(_function(found)).get("return")
    for one in cls.__mro__ if cls is not None else ():
        # What `__init__` sets it mostly gets in a parameter of this name.
        for owner in (one, vars(one).get("__init__")):
            given = given if given is not None else _annotations(owner).get(member)
    is_plain = inspect.isclass(given) and not get_args(given)
    return "" if given is None else given.__name__ if is_plain else str(given)


PLACEHOLDERS = {"object", "Any"}
"""In the place of types that vLLM imports for type checkers only."""


def _words(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z]\w*", text))


# ------------------------------------------------------------------------------------------- Calls

EMPTY = inspect.Parameter.empty


def signature(kind: str, parameters: Iterable[inspect.Parameter]) -> str:
    """Kind and parameters: `method(self, a, b=, *, c)`."""
    bare = [
        one.replace(annotation=EMPTY, default=EMPTY if one.default is EMPTY else ...)
        for one in parameters
    ]
    return f"{kind}{inspect.Signature(bare)}".replace("=Ellipsis", "=")


def cannot_take(call: str, parameters: Sequence[inspect.Parameter]) -> str:
    """Why a function can't be called so; empty if it can. It may not accept the arguments, or
    take a positional one as another parameter than listed.

    call: as in `Form.calls`.
    parameters: without `self` or `cls`.
    """
    words = [word for word in call.split(", ") if word]
    positional = [word for word in words if word[-1] not in "=."]
    keywords = {word[:-1] for word in words if word[-1] == "="}
    kinds = {one.kind for one in parameters}
    places = [
        one.name
        for one in parameters
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    named = {*places, *(one.name for one in parameters if one.kind is one.KEYWORD_ONLY)}
    if len(positional) > len(places) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        return f"takes {len(places)} arguments, and gets {len(positional)}"
    for place, name in zip(places, positional, strict=False):
        if name not in (place, "*"):
            return f"takes {place} in the place of {name}"
    if inspect.Parameter.VAR_KEYWORD not in kinds and (unknown := keywords - named):
        return f"has no parameter {', '.join(sorted(unknown))}"
    given = keywords.union(places[: len(positional)])
    lacking = [
        one.name
        for one in parameters
        if one.name in named and one.default is EMPTY and one.name not in given
    ]
    return f"needs {', '.join(lacking)}" if lacking and "..." not in words else ""


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


def answer(door: str, version: str) -> Answer:
    """Compares only untested versions."""
    if is_tested(door, version):
        return Answer(door, version)
    started_s = perf_counter()
    try:
        told = read_list()
    except (OSError, ValueError) as error:
        return Answer(door, version, (f"the list of what is used of it can't be read ({error})",))
    found = {
        **changed_uses(told["doors"][door]),
        **unknown_kinds(told["specs"], told["backends"]),
    }
    num_uses = sum(map(len, told["doors"][door].values()))
    return Answer(door, version, tuple(found), num_uses, perf_counter() - started_s)


def main(version: str) -> None:
    # vLLM logs to standard output.
    with contextlib.redirect_stdout(sys.stderr):
        answers = [answer(door, version) for door in DOORS]
    last = TESTED[OWN][1]
    rows = [{"door": one.door, "is_on": one.is_on, "says": str(one)} for one in answers]
    print(json.dumps({"last": f"{last[0]}.{last[1]}", "doors": rows}))


if __name__ == "__main__":
    main(sys.argv[1])
