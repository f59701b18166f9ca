"""A connector module's uses of vLLM, compared with a version's sources: imports, calls, attributes,
overridden methods.

Types come from `PARAMETERS`, annotations, assignments and loops; unknown ones are skipped,
`Uses.num_checked` counts the rest. `Uses.forms`: as in the list shipped with the connector
(`hotkv_vllm.compat.uses`).
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from hotkv_vllm.compat.uses import cannot_take, signature
from tools.vllm_definitions import (
    Definition,
    FunctionDef,
    Instance,
    Items,
    Module,
    Row,
    Scope,
    Sources,
    Type,
    call_text,
    kind_of,
    own_members,
    parameters_of,
    type_text,
)

PARAMETERS = {
    "vllm_config": "vllm.config.VllmConfig",
    "_vllm_config": "vllm.config.VllmConfig",
    "kv_cache_config": "vllm.v1.kv_cache_interface.KVCacheConfig",
    "_kv_cache_config": "vllm.v1.kv_cache_interface.KVCacheConfig",
    "request": "vllm.v1.request.Request",
    "scheduler_output": "vllm.v1.core.sched.output.SchedulerOutput",
    "connector_output": "vllm.v1.outputs.KVConnectorOutput",
    "blocks": "vllm.v1.core.kv_cache_manager.KVCacheBlocks",
}
"""vLLM's classes by names that hold their objects; these are annotated `Any`, or belong to
another object (`state.request`)."""

OWNERS = {"self", "state", "engine", "_engine"}
"""Variables of hotkv's objects, whose attributes in `PARAMETERS` hold vLLM's."""
OURS = {"KVConnectorMetadata", "KVConnectorWorkerMetadata", "KVConnectorHandshakeMetadata"}
"""Empty classes of vLLM; the values are hotkv's subclasses."""


@dataclass
class Gathered:
    """Becomes a `hotkv_vllm.compat.uses.Form`."""

    kind: str
    gives: str = ""
    calls: set[str] = field(default_factory=set)
    signature: str = ""
    abstract: list[str] = field(default_factory=list)
    callers: list[str] = field(default_factory=list)

    def entry(self) -> dict[str, Any]:
        """As JSON, without empty properties."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        values["calls"] = sorted(self.calls)
        return {name: value for name, value in values.items() if value}


def form_of(names: Sources, found: Definition, *, is_member: bool) -> Gathered:
    """Only `kind` and `gives`."""
    node = found.node
    if isinstance(node, FunctionDef):
        kind = kind_of(node) if is_member else "function"
        kind = "value" if kind == "property" else kind
    else:
        kind = "class" if isinstance(node, ast.ClassDef) else "value"
        kind = "module" if node is Module.node else kind
    given = type_text(names.given(found))
    return Gathered(kind, given if given.strip("_[]{}(), :") else "")


class Uses:
    """problems: uses that this version does not support.
    num_checked: compared uses.
    """

    def __init__(self, names: Sources, path: str, tree: ast.Module) -> None:
        self._names = names
        self._last = ("", "")
        self._path = path
        self._tree = tree
        self._imports: dict[str, str] = {}
        self.problems: list[str] = []
        self.forms: dict[tuple[str, str], Gathered] = {}
        """The uses of vLLM that exist in this version, by module and name (`Class.member`)."""
        self.num_checked = 0
        self._roots = {
            name: Instance(found)
            for name, full in PARAMETERS.items()
            if (found := names.find(full)) is not None
        }
        for name in set(PARAMETERS) - set(self._roots):
            self.problems.append(f"{PARAMETERS[name]} is not there")

    def check(self) -> None:
        for node in ast.walk(self._tree):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and node.module.split(".")[0] == "vllm"
                and not node.level
            ):
                self._check_import(node)
        self._follow(self._tree, {})
        for node in ast.walk(self._tree):
            if isinstance(node, FunctionDef):
                self._function(node)
            elif isinstance(node, ast.ClassDef):
                self._class(node)
                self._follow(node, {})

    def _use(self, module: str, name: str, found: Definition) -> tuple[str, str]:
        """Returns the key in `forms`."""
        key = (module, name)
        if key not in self.forms:
            self.forms[key] = form_of(self._names, found, is_member="." in name)
        return key

    def _problem(self, node: ast.AST, text: str) -> None:
        line = f"{self._path}:{getattr(node, 'lineno', 0)}: {text}"
        if line not in self.problems:
            self.problems.append(line)

    def _check_import(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            self.num_checked += 1
            self._imports[alias.asname or alias.name] = full
            found = self._names.find(full)
            if found is None:
                self._problem(node, f"{full} is not there")
            else:
                self._use(str(node.module), alias.name, found)

    # ------------------------------------------------------------------------------ classes of ours

    def _class(self, cls: ast.ClassDef) -> None:
        for base in cls.bases:
            found = self._names.find(self._imports.get(getattr(base, "id", ""), ""))
            if found is None or not isinstance(found.node, ast.ClassDef):
                continue
            base_name = self._imports[getattr(base, "id", "")]
            key = self._use(*base_name.rpartition(".")[::2], found)
            self.forms[key].abstract = self._names.abstract(found)
            for name, ours in own_members(cls).items():
                theirs = self._names.member(found, name)
                if (
                    name != "__init__"
                    and isinstance(ours, FunctionDef)
                    and theirs is not None
                    and isinstance(theirs.node, FunctionDef)
                ):
                    self.num_checked += 1
                    key = self._use(found.module, f"{found.node.name}.{name}", theirs)
                    self.forms[key].signature = signature(
                        kind_of(theirs.node), parameters_of(theirs.node.args)
                    )
                    if why := refuses(ours, theirs.node):
                        self._problem(ours, f"{cls.name}.{name} {why}")

    # --------------------------------------------------------------------------------------- values

    def _function(self, function: FunctionDef) -> None:
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        types: dict[str, Type] = {
            a.arg: self._roots.get(a.arg)
            for a in arguments
            if a.annotation and ast.unparse(a.annotation) == "Any"
        }
        for argument in arguments:
            named = self._names.find(self._imports.get(getattr(argument.annotation, "id", ""), ""))
            if (
                named is not None
                and isinstance(named.node, ast.ClassDef)
                and named.node.name not in OURS
            ):
                types[argument.arg] = Instance(named)
        self._follow(function, types)

    def _follow(self, scope: ast.AST, types: dict[str, Type]) -> None:
        """Infers variables' types in a function, class or module, without what is defined in it."""
        for node in self._in_order(scope):
            if isinstance(node, ast.Assign):
                value = self._type(node.value, types)
                for target in node.targets:
                    self._bind(target, value, node.value, types)
            elif isinstance(node, ast.NamedExpr):
                self._bind(node.target, self._type(node.value, types), node.value, types)
            elif isinstance(node, ast.For | ast.comprehension):
                kind = self._type(node.iter, types)
                self._bind(node.target, kind.item if isinstance(kind, Items) else None, None, types)
            elif isinstance(node, ast.Attribute | ast.Call):
                self._type(node, types)

    def _in_order(self, node: ast.AST) -> Iterator[ast.AST]:
        """As Python evaluates, so a variable's type is known before its use: a comprehension's
        loops before its element."""
        for child in sorted(
            ast.iter_child_nodes(node), key=lambda child: not isinstance(child, ast.comprehension)
        ):
            if not isinstance(child, FunctionDef | ast.ClassDef):
                yield child
                yield from self._in_order(child)

    def _bind(
        self, target: ast.AST, value: Type, expression: ast.expr | None, types: dict[str, Type]
    ) -> None:
        if isinstance(target, ast.Name):
            types[target.id] = value
        elif isinstance(target, ast.Tuple):
            items: tuple[Type, ...] = (None,) * len(target.elts)
            if isinstance(value, Row) and len(value.items) == len(items):
                items = value.items
            elif isinstance(expression, ast.Tuple) and len(expression.elts) == len(items):
                items = tuple(self._type(element, types) for element in expression.elts)
            for element, item in zip(target.elts, items, strict=True):
                self._bind(element, item, None, types)

    def _type(self, node: ast.expr, types: dict[str, Type]) -> Type:
        """Records attributes and calls that vLLM does not have."""
        if isinstance(node, ast.Name):
            return types[node.id] if node.id in types else self._imported(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, types)
        if isinstance(node, ast.Call):
            return self._call(node, types)
        if isinstance(node, ast.Subscript):
            kind = self._type(node.value, types)
            if isinstance(kind, Items):
                return kind if isinstance(node.slice, ast.Slice) else kind.mapped or kind.item
        if isinstance(node, ast.BoolOp):
            return self._type(node.values[0], types)
        return None

    def _imported(self, name: str) -> Type:
        """A class or module itself, or a variable's type."""
        full = self._imports.get(name, "")
        found = self._names.find(full) if full else None
        if found is None or isinstance(found.node, FunctionDef):
            return None
        if isinstance(found.node, ast.ClassDef | ast.Module):
            return Scope(found, full)
        return self._names.value(found)

    def _attribute(self, node: ast.Attribute, types: dict[str, Type]) -> Type:
        kind = self._type(node.value, types)
        if kind is None and _last_name(node.value) in OWNERS:
            return self._roots.get(node.attr)
        found = self._member(node, kind)
        return self._names.value(found) if found is not None else None

    def _member(self, node: ast.Attribute, kind: Type) -> Definition | None:
        """Records the use, or a problem if vLLM lacks it. None if the type is unknown."""
        if isinstance(kind, Scope) and kind.found.node is Module.node:
            owner, name = None, node.attr
            module = kind.name
            found = self._names.lookup(module, name)
        elif isinstance(kind, Instance | Scope):
            cls = kind.cls if isinstance(kind, Instance) else kind.found
            owner = self._names.owner(cls, node.attr)
            found = self._names.member(owner, node.attr) if owner is not None else None
            module = cls.module
            name = f"{(owner or cls).node.name}.{node.attr}"  # type: ignore[attr-defined]
        else:
            return None
        self.num_checked += 1
        if found is None:
            whose, _, _ = name.rpartition(".")
            self._problem(node, f"{whose or module} has no attribute {node.attr}")
            return None
        self._use(module, name, found)
        self._last = (module, name)
        return found

    def _call(self, node: ast.Call, types: dict[str, Type]) -> Type:
        called = node.func
        if isinstance(called, ast.Name):
            return self._call_of_name(node, called.id, types)
        if not isinstance(called, ast.Attribute):
            return None
        kind = self._type(called.value, types)
        if (
            isinstance(kind, Items)
            and kind.mapped is not None
            and called.attr in ("items", "values", "get")
        ):
            rows: dict[str, Type] = {
                "items": Items(Row((kind.item, kind.mapped))),
                "values": Items(kind.mapped),
                "get": kind.mapped,
            }
            return rows[called.attr]
        found = self._member(called, kind)
        if found is None or not isinstance(found.node, ast.ClassDef | FunctionDef):
            return None
        is_of_module = isinstance(kind, Scope) and kind.found.node is Module.node
        if (
            isinstance(kind, Scope)
            and isinstance(found.node, FunctionDef)
            and not is_of_module
            and kind_of(found.node) != "classmethod"
        ):
            return None
        return self._call_of(node, self._last, found, is_member=not is_of_module)

    def _call_of_name(self, node: ast.Call, name: str, types: dict[str, Type]) -> Type:
        if name in ("list", "tuple", "sorted", "reversed", "iter", "set") and node.args:
            return self._type(node.args[0], types)
        if name == "next" and node.args:
            kind = self._type(node.args[0], types)
            return kind.item if isinstance(kind, Items) else None
        if name in ("enumerate", "zip") and node.args:
            kinds = [self._type(argument, types) for argument in node.args]
            items = tuple(kind.item if isinstance(kind, Items) else None for kind in kinds)
            return Items(Row((None, *items) if name == "enumerate" else items))
        full = self._imports.get(name, "") if name not in types else ""
        found = self._names.find(full) if full else None
        if found is None:
            return None
        return self._call_of(node, full.rpartition(".")[::2], found, is_member=False)

    def _call_of(
        self, node: ast.Call, use: tuple[str, str], found: Definition, *, is_member: bool
    ) -> Type:
        """Checks and records the call; returns the result's type. use: key in `forms`.
        is_member: `self` is given.
        """
        has_self = True
        parameters: ast.arguments | None
        if isinstance(found.node, ast.ClassDef):
            parameters = self._names.constructor(found)
        elif isinstance(found.node, FunctionDef):
            if is_member and kind_of(found.node) == "property":
                return None
            has_self = is_member and kind_of(found.node) != "staticmethod"
            parameters = found.node.args
        else:
            return None
        if parameters is not None:
            self.num_checked += 1
            taken = parameters_of(parameters)[int(has_self) :]
            call = call_text(node, taken)
            self.forms[self._use(*use, found)].calls.add(call)
            if why := cannot_take(call, taken):
                self._problem(node, f"{use[1].rpartition('.')[2]} {why}")
        is_class = isinstance(found.node, ast.ClassDef)
        return Instance(found) if is_class else self._names.given(found)


def _last_name(node: ast.expr) -> str:
    """`c` of `a.b.c`; else empty."""
    return getattr(node, "id", getattr(node, "attr", ""))


def refuses(ours: FunctionDef, theirs: FunctionDef) -> str:
    """Calls that vLLM's method takes and ours does not; empty if none."""
    if kind_of(ours) != kind_of(theirs):
        return f"is a {kind_of(theirs)} in vLLM"
    mine, base = ours.args, theirs.args
    my_names = [a.arg for a in (*mine.posonlyargs, *mine.args)]
    base_names = [a.arg for a in (*base.posonlyargs, *base.args)]
    for place, name in enumerate(
        base_names[1:] if kind_of(theirs) != "staticmethod" else base_names, 1
    ):
        if my_names[place : place + 1] != [name] and not (
            mine.vararg is not None and mine.kwarg is not None
        ):
            return f"does not take {name} as vLLM's does"
    more = {a.arg for a in base.kwonlyargs} - {*my_names, *(a.arg for a in mine.kwonlyargs)}
    if more and mine.kwarg is None:
        return f"does not take {', '.join(sorted(more))}"
    if (base.vararg is not None and mine.vararg is None) or (
        base.kwarg is not None and mine.kwarg is None
    ):
        return "takes fewer arguments than vLLM's"
    needed = my_names[len(base_names) : len(my_names) - len(mine.defaults)]
    return f"needs {', '.join(needed)}, which vLLM does not pass" if needed else ""


def pauses_by(names: Sources) -> str:
    """The first assumption of `hotkv_vllm.compat.checks.is_pausing` that does not hold; empty if
    all do."""
    core = names.find("vllm.v1.engine.core.EngineCore")
    if core is None:
        return "vllm.v1.engine.core.EngineCore is not there"
    callers = {
        name: {
            node.func.attr
            for node in ast.walk(method)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        }
        for name, method in own_members(core.node).items()
        if isinstance(method, FunctionDef)
    }
    resets = {name for name, called in callers.items() if "_reset_caches" in called}
    if "reset_prefix_cache" not in callers.get("_reset_caches", ()) or resets != {
        "_finish_pause",
        "release_kv_cache_memory",
    }:
        return (
            "compat.checks.is_pausing: EngineCore._reset_caches is called by "
            f"{', '.join(sorted(resets)) or 'nobody'}"
        )
    return ""


def callbacks_of(names: Sources, cls: Definition) -> set[str]:
    """Public methods and properties, with bases', that a subclass may override."""
    return {
        name
        for one in names.bases(cls)
        for name, node in own_members(one.node).items()
        if isinstance(node, FunctionDef) and not name.startswith("_")
    }
