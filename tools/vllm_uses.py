"""What a module of the connector uses of vLLM, compared with one version's sources: imports, calls,
attributes, overridden methods.

Types are followed from the names in `PARAMETERS` through annotations, assignments and loops. A
value whose type can't be told is passed over; `num_checked` says how much was not.
"""

import ast
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tools.vllm_sources import Source

# ----------------------------------------------------------------------- What vLLM's sources define
# Names of modules, members and bases of classes, parameters, annotated types, found on syntax
# trees. Nothing is imported or run. What can't be told (names from other packages, unannotated
# values) is None, and nobody checks it.

FunctionDef = ast.FunctionDef | ast.AsyncFunctionDef
SEQUENCES = {
    "list",
    "List",
    "Sequence",
    "Iterable",
    "Iterator",
    "set",
    "Set",
    "frozenset",
    "deque",
    "Collection",
    "Generator",
}
MAPPINGS = {"dict", "Dict", "Mapping", "MutableMapping", "defaultdict", "OrderedDict"}


@dataclass(frozen=True)
class Found:
    """A definition: a class, a function, a variable's assignment, or (node is its tree) a module.
    `module` is where it stands."""

    module: str
    node: ast.AST


@dataclass(frozen=True)
class Instance:
    """The type of a value: an instance of a class of vLLM's."""

    cls: Found


@dataclass(frozen=True)
class Items:
    """The type of a value that is iterated; `mapped` is that of a mapping's values."""

    item: "Type"
    mapped: "Type" = None


@dataclass(frozen=True)
class Row:
    """The type of a tuple of fixed length."""

    items: tuple["Type", ...]


Type = Instance | Items | Row | None


def statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, also those in its branches; TYPE_CHECKING counts as true."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
            handlers = [line for handler in getattr(node, "handlers", ()) for line in handler.body]
            yield from statements(
                [
                    *node.body,
                    *getattr(node, "orelse", ()),
                    *getattr(node, "finalbody", ()),
                    *handlers,
                ]
            )


class Names:
    """Definitions in one version's sources."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._trees: dict[str, ast.Module | None] = {}
        self._found: dict[tuple[str, str], Found | None] = {}

    def module(self, name: str) -> ast.Module | None:
        if name not in self._trees:
            path = name.replace(".", "/")
            text = self._source.read(f"{path}.py")
            text = self._source.read(f"{path}/__init__.py") if text is None else text
            self._trees[name] = ast.parse(text) if text is not None else None
        return self._trees[name]

    def find(self, name: str) -> Found | None:
        """Returns what a full name such as `vllm.config.VllmConfig` stands for; None if there is
        nothing, or it comes from another package."""
        module, _, last = name.rpartition(".")
        return self.lookup(module, last) or (
            Found(name, tree) if (tree := self.module(name)) is not None else None
        )

    def lookup(
        self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()
    ) -> Found | None:
        """Returns a name in a module's scope, followed to where it is defined; None for those of
        other packages. `seen`: names on the way."""
        if seen:
            return self._lookup(module, name, seen)
        if (module, name) not in self._found:
            self._found[module, name] = self._lookup(module, name, seen)
        return self._found[module, name]

    def _lookup(self, module: str, name: str, seen: frozenset[tuple[str, str]]) -> Found | None:
        tree = self.module(module)
        if tree is None or (module, name) in seen:
            return None
        seen |= {(module, name)}
        for node in statements(tree.body):
            if isinstance(node, ast.ClassDef | FunctionDef) and node.name == name:
                return Found(module, node)
            if isinstance(node, ast.Assign) and any(
                name in _targets(target) for target in node.targets
            ):
                return Found(module, node)
            if isinstance(node, ast.AnnAssign) and name in _targets(node.target):
                return Found(module, node)
            if (
                isinstance(node, ast.ImportFrom)
                and (found := self._imported(module, node, name, seen)) is not None
            ):
                return found
        return None

    def _imported(
        self, module: str, node: ast.ImportFrom, name: str, seen: frozenset[tuple[str, str]]
    ) -> Found | None:
        origin = node.module or ""
        if node.level:
            is_package = self._source.read(f"{module.replace('.', '/')}/__init__.py") is not None
            parts = module.split(".")
            origin = ".".join(
                [
                    *parts[: len(parts) - node.level + is_package],
                    *([node.module] if node.module else []),
                ]
            )
        if origin.split(".")[0] != "vllm":
            return None
        for alias in node.names:
            if alias.name == "*" and (found := self.lookup(origin, name, seen)) is not None:
                return found
            if (alias.asname or alias.name) == name:
                full = f"{origin}.{alias.name}"
                tree = self.module(full)
                return self.lookup(origin, alias.name, seen) or (
                    Found(full, tree) if tree is not None else None
                )
        return None

    # -------------------------------------------------------------------------------------- classes

    def bases(self, cls: Found) -> list[Found]:
        """Returns a class and its bases of vLLM's, nearest first."""
        assert isinstance(cls.node, ast.ClassDef)
        found = [cls]
        for base in cls.node.bases:
            expression = base.value if isinstance(base, ast.Subscript) else base
            if (
                isinstance(expression, ast.Name)
                and (one := self.lookup(cls.module, expression.id)) is not None
            ):
                found += self.bases(one) if isinstance(one.node, ast.ClassDef) else []
        return found

    def member(self, cls: Found, name: str) -> Found | None:
        """Returns a class's method, field or attribute, its bases' included."""
        for one in self.bases(cls):
            if (node := own_members(one.node).get(name)) is not None:
                return Found(one.module, node)
        return None

    def member_of_kin(self, cls: Found, name: str) -> Found | None:
        """Returns what `member` does; also that of a subclass in the class's own module, for values
        whose annotation names the base."""
        if (found := self.member(cls, name)) is not None:
            return found
        tree = self.module(cls.module)
        for node in tree.body if tree is not None else ():
            kin = Found(cls.module, node)
            if (
                isinstance(node, ast.ClassDef)
                and cls in self.bases(kin)
                and (found := self.member(kin, name)) is not None
            ):
                return found
        return None

    def constructor(self, cls: Found) -> ast.arguments | None:
        """Parameters of a class's constructor, a dataclass's fields included; None if they can't be
        told."""
        init = self.member(cls, "__init__")
        if init is not None and isinstance(init.node, FunctionDef):
            return init.node.args
        fields = [
            line
            for one in reversed(self.bases(cls))
            for line in one.node.body  # type: ignore[attr-defined]
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        ]
        if not any(
            "dataclass" in ast.unparse(d) or "config" in ast.unparse(d)
            for d in cls.node.decorator_list  # type: ignore[attr-defined]
        ):
            return None
        names = [ast.arg("self"), *(ast.arg(field.target.id) for field in fields)]  # type: ignore[union-attr]
        return ast.arguments(
            [],
            names,
            None,
            [],
            [],
            None,
            [field.value for field in fields if field.value is not None],
        )

    # ---------------------------------------------------------------------------------------- types

    def annotated(self, module: str, annotation: ast.expr | None) -> Type:
        """Returns the type that an annotation in a module names."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.BinOp):
            return self.annotated(module, annotation.left) or self.annotated(
                module, annotation.right
            )
        if isinstance(annotation, ast.Name):
            found = self.lookup(module, annotation.id)
            return (
                Instance(found)
                if found is not None and isinstance(found.node, ast.ClassDef)
                else None
            )
        if not isinstance(annotation, ast.Subscript):
            return None
        name = annotation.value.id if isinstance(annotation.value, ast.Name) else ""
        parts = (
            list(annotation.slice.elts)
            if isinstance(annotation.slice, ast.Tuple)
            else [annotation.slice]
        )
        types = tuple(self.annotated(module, part) for part in parts)
        if name in SEQUENCES or (
            name == "tuple" and len(parts) == 2 and ast.unparse(parts[1]) == "..."
        ):
            return Items(types[0])
        if name == "tuple":
            return Row(types)
        if name in MAPPINGS and len(types) == 2:
            return Items(types[0], types[1])
        return types[0] if name in ("Optional", "Final", "ClassVar", "type") else None

    def value(self, found: Found) -> Type:
        """Returns the type of a member that is read: of a field, a property, an annotated
        attribute."""
        if isinstance(found.node, ast.AnnAssign):
            return self.annotated(found.module, found.node.annotation)
        if isinstance(found.node, FunctionDef) and kind_of(found.node) == "property":
            return self.annotated(found.module, found.node.returns)
        return None


@functools.cache
def own_members(cls: ast.AST) -> dict[str, ast.AST]:
    """Members that a class's own body defines; attributes that its methods set too."""
    assert isinstance(cls, ast.ClassDef)
    members: dict[str, ast.AST] = {}
    for line in statements(cls.body):
        if isinstance(line, ast.ClassDef | FunctionDef):
            members.setdefault(line.name, line)
        elif isinstance(line, ast.AnnAssign | ast.Assign):
            for target in [line.target] if isinstance(line, ast.AnnAssign) else line.targets:
                members |= dict.fromkeys(_targets(target), line)
    for method in [node for node in members.values() if isinstance(node, FunctionDef)]:
        arguments = {argument.arg: argument for argument in method.args.args}
        for node in ast.walk(method):
            if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                continue
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for one in ast.walk(target):
                    if (
                        isinstance(one, ast.Attribute)
                        and isinstance(one.value, ast.Name)
                        and one.value.id in ("self", "cls")
                    ):
                        members.setdefault(one.attr, _typed(one, node, arguments))
    return members


def _typed(target: ast.Attribute, node: ast.AST, arguments: dict[str, ast.arg]) -> ast.AST:
    """Returns the assignment of an attribute; with the annotation of the parameter that it
    keeps."""
    value = getattr(node, "value", None)
    argument = (
        arguments.get(value.id)
        if isinstance(node, ast.Assign) and isinstance(value, ast.Name)
        else None
    )
    if argument is None or argument.annotation is None:
        return node
    return ast.AnnAssign(target, argument.annotation, None, 0)


def kind_of(function: FunctionDef) -> str:
    """Returns how a method is called: `method`, `property`, `classmethod` or `staticmethod`."""
    names = {ast.unparse(decorator).rpartition(".")[2] for decorator in function.decorator_list}
    if names & {"property", "cached_property"}:
        return "property"
    return next(iter(names & {"classmethod", "staticmethod"}), "method")


def _targets(target: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


# ----------------------------------------------------------------------- What a module uses of that

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
"""Classes of parameters and attributes that are annotated `Any`, or of another object's attribute
of that name (`state.request`)."""

OWNERS = {"self", "state", "engine", "_engine"}
"""Names of objects of ours whose attributes of these names hold objects of vLLM's."""
OURS = {"KVConnectorMetadata", "KVConnectorWorkerMetadata", "KVConnectorHandshakeMetadata"}
"""Empty classes of vLLM's whose values are instances of our subclasses."""


class Uses:
    """Compares one module. `problems` has a line for each difference."""

    def __init__(self, names: Names, path: str, tree: ast.Module) -> None:
        self._names = names
        self._path = path
        self._tree = tree
        self._imports: dict[str, str] = {}
        self.problems: list[str] = []
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
        for node in ast.walk(self._tree):
            if isinstance(node, FunctionDef):
                self._function(node)
            elif isinstance(node, ast.ClassDef):
                self._class(node)

    def _problem(self, node: ast.AST, text: str) -> None:
        line = f"{self._path}:{getattr(node, 'lineno', 0)}: {text}"
        if line not in self.problems:
            self.problems.append(line)

    def _check_import(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            self.num_checked += 1
            self._imports[alias.asname or alias.name] = full
            if self._names.find(full) is None:
                self._problem(node, f"{full} is not there")

    # ------------------------------------------------------------------------------ classes of ours

    def _class(self, cls: ast.ClassDef) -> None:
        for base in cls.bases:
            found = self._names.find(self._imports.get(getattr(base, "id", ""), ""))
            if found is None or not isinstance(found.node, ast.ClassDef):
                continue
            for name, ours in own_members(cls).items():
                theirs = self._names.member(found, name)
                if (
                    name != "__init__"
                    and isinstance(ours, FunctionDef)
                    and theirs is not None
                    and isinstance(theirs.node, FunctionDef)
                ):
                    self.num_checked += 1
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
        for node in self._in_order(function):
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
        """Nodes as Python meets them: the loops of a comprehension before its element."""
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
        """Returns the type of an expression; notes attributes and calls that vLLM does not have."""
        if isinstance(node, ast.Name):
            return types.get(node.id)
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

    def _attribute(self, node: ast.Attribute, types: dict[str, Type]) -> Type:
        kind = self._type(node.value, types)
        if kind is None and _last_name(node.value) in OWNERS:
            return self._roots.get(node.attr)
        if not isinstance(kind, Instance):
            return None
        self.num_checked += 1
        found = self._names.member_of_kin(kind.cls, node.attr)
        if found is None:
            self._problem(node, (f"{kind.cls.node.name} has no attribute {node.attr}"))  # type: ignore[attr-defined]
            return None
        return self._names.value(found)

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
        if not isinstance(kind, Instance):
            return None
        found = self._names.member_of_kin(kind.cls, called.attr)
        if (
            found is None
            or not isinstance(found.node, FunctionDef)
            or kind_of(found.node) == "property"
        ):
            return None
        self._check_call(
            node, called.attr, found.node.args, has_self=kind_of(found.node) != "staticmethod"
        )
        return self._names.annotated(found.module, found.node.returns)

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
        found = self._names.find(self._imports.get(name, ""))
        if found is None:
            return None
        if isinstance(found.node, ast.ClassDef):
            parameters = self._names.constructor(found)
            if parameters is not None:
                self._check_call(node, name, parameters, has_self=True)
            return Instance(found)
        if not isinstance(found.node, FunctionDef):
            return None
        self._check_call(node, name, found.node.args, has_self=False)
        return self._names.annotated(found.module, found.node.returns)

    def _check_call(
        self, node: ast.Call, name: str, parameters: ast.arguments, *, has_self: bool
    ) -> None:
        self.num_checked += 1
        if why := cannot_take(node, parameters, has_self=has_self):
            self._problem(node, f"{name} {why}")


def _last_name(node: ast.expr) -> str:
    """Returns `c` of `a.b.c`; empty for other expressions."""
    return getattr(node, "id", getattr(node, "attr", ""))


def cannot_take(call: ast.Call, parameters: ast.arguments, *, has_self: bool) -> str:
    """Returns why a function does not accept a call; empty if it does."""
    positional = [a.arg for a in (*parameters.posonlyargs, *parameters.args)][int(has_self) :]
    keywords = {*positional, *(a.arg for a in parameters.kwonlyargs)}
    required = (
        positional[: len(positional) - len(parameters.defaults)]
        if parameters.defaults
        else list(positional)
    )
    required += [
        a.arg
        for a, default in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)
        if default is None
    ]
    is_open = any(isinstance(a, ast.Starred) for a in call.args) or any(
        k.arg is None for k in call.keywords
    )
    if len(call.args) > len(positional) and parameters.vararg is None:
        return f"takes {len(positional)} arguments, and gets {len(call.args)}"
    named = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
    if parameters.kwarg is None and named - keywords:
        return f"has no parameter {', '.join(sorted(named - keywords))}"
    lacking = [
        name for name in required if name not in named and name not in positional[: len(call.args)]
    ]
    return f"needs {', '.join(lacking)}" if lacking and not is_open else ""


def refuses(ours: FunctionDef, theirs: FunctionDef) -> str:
    """Returns which calls a method of vLLM's accepts and its override does not; else empty."""
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


def pauses_by(names: Names) -> str:
    """Returns what `hotkv_vllm.compat.checks.is_pausing` builds on, where it is not so; empty if it
    is."""
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


def hooks_of(names: Names, cls: Found) -> set[str]:
    """Methods and properties that a class offers to override."""
    return {
        name
        for one in names.bases(cls)
        for name, node in own_members(one.node).items()
        if isinstance(node, FunctionDef) and not name.startswith("_")
    }
