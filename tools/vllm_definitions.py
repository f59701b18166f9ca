"""Finds definitions in vLLM's source files: modules, classes with members and bases, functions with
parameters, annotated types.

It reads syntax trees, and imports or runs nothing of vLLM. What can't be determined (names of other
packages, values without annotation) is None, and is not checked.
"""

import ast
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Readable(Protocol):
    """Source files of one version of vLLM. Paths begin with `vllm/`."""

    def read(self, path: str) -> str | None:
        """None if there is no such file."""


class Files:
    """In a folder that contains the folder `vllm`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, path: str) -> str | None:
        try:
            return (self._root / path).read_text(encoding="utf-8")
        except OSError:
            return None


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
class Definition:
    """module: that contains the definition, or the module itself.
    node: of the class, function or assignment; `Module.node` for a module.
    """

    module: str
    node: ast.AST


@dataclass(frozen=True)
class Instance:
    """Type of a value: an instance of `cls`."""

    cls: Definition


@dataclass(frozen=True)
class Items:
    """Type of a collection or mapping.

    item: of the items, or of the keys.
    mapped: of a mapping's values; None for a collection.
    """

    item: "Type"
    mapped: "Type" = None


@dataclass(frozen=True)
class Row:
    """Type of a tuple of fixed length."""

    items: tuple["Type", ...]


@dataclass(frozen=True)
class Scope:
    """Type of an expression that is itself a class or a module.

    name: by which it was found.
    """

    found: Definition
    name: str


Type = Instance | Items | Row | Scope | None


def type_text(kind: Type) -> str:
    """Such as `Request`, `[Request]`, `{Key: Request}` or `(Request, _)`, with `_` for unknown."""
    if isinstance(kind, Instance):
        assert isinstance(kind.cls.node, ast.ClassDef)
        return kind.cls.node.name
    if isinstance(kind, Items):
        both = (type_text(kind.item), type_text(kind.mapped))
        return "{{{}: {}}}".format(*both) if kind.mapped is not None else f"[{both[0]}]"
    return f"({', '.join(map(type_text, kind.items))})" if isinstance(kind, Row) else "_"


def statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements, with those of all branches; conditions are not evaluated."""
    for node in body:
        yield node
        if isinstance(node, ast.Match):
            yield from statements([line for case in node.cases for line in case.body])
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
            handlers = [line for handler in getattr(node, "handlers", ()) for line in handler.body]
            yield from statements(
                [
                    *node.body,
                    *getattr(node, "orelse", ()),
                    *getattr(node, "finalbody", ()),
                    *handlers,
                ]
            )


class Module:
    """A parsed source file.

    node: empty, the `Definition.node` of every module.
    is_package: an `__init__.py`.
    """

    node = ast.Module([], [])

    def __init__(self, text: str, *, is_package: bool) -> None:
        """Raises SyntaxError."""
        self.is_package = is_package
        self._lines = list(statements(ast.parse(text).body))

    def top(self) -> Iterator[ast.stmt]:
        """Top-level statements in order, also in branches."""
        yield from self._lines

    def classes(self) -> Iterator[ast.ClassDef]:
        """Not inside other classes or functions."""
        yield from (node for node in self._lines if isinstance(node, ast.ClassDef))


class Sources:
    """Definitions in one version of vLLM. Methods raise SyntaxError."""

    def __init__(self, source: Readable) -> None:
        self._source = source
        self._modules: dict[str, Module | None] = {}
        self._found: dict[tuple[str, str], Definition | None] = {}
        self._members: dict[ast.AST, dict[str, ast.AST]] = {}
        self._set: dict[ast.AST, dict[str, ast.AST]] = {}
        self._calls: dict[ast.AST, dict[str, set[str]]] = {}

    def module(self, name: str) -> Module | None:
        if name not in self._modules:
            path = name.replace(".", "/")
            text, is_package = self._source.read(f"{path}.py"), False
            if text is None:
                text, is_package = self._source.read(f"{path}/__init__.py"), True
            self._modules[name] = None if text is None else Module(text, is_package=is_package)
        return self._modules[name]

    def find(self, name: str) -> Definition | None:
        """By full name, such as `vllm.config.VllmConfig`."""
        module, _, last = name.rpartition(".")
        return self.lookup(module, last) or (
            Definition(name, Module.node) if self.module(name) is not None else None
        )

    def lookup(
        self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()
    ) -> Definition | None:
        """In a module's scope, also if imported from another module of vLLM.

        seen: (module, name) pairs on the way, so that a loop of imports ends.
        """
        if seen:
            return self._lookup(module, name, seen)
        if (module, name) not in self._found:
            self._found[module, name] = self._lookup(module, name, seen)
        return self._found[module, name]

    def _lookup(
        self, module: str, name: str, seen: frozenset[tuple[str, str]]
    ) -> Definition | None:
        scope = self.module(module)
        if scope is None or (module, name) in seen:
            return None
        seen |= {(module, name)}
        for node in scope.top():
            if isinstance(node, ast.ClassDef | FunctionDef) and node.name == name:
                return Definition(module, node)
            if isinstance(node, ast.Assign) and any(
                name in _targets(target) for target in node.targets
            ):
                return Definition(module, node)
            if isinstance(node, ast.AnnAssign) and name in _targets(node.target):
                return Definition(module, node)
            if (
                isinstance(node, ast.ImportFrom)
                and (found := self._imported(module, node, name, seen)) is not None
            ):
                return found
        return None

    def _imported(
        self, module: str, node: ast.ImportFrom, name: str, seen: frozenset[tuple[str, str]]
    ) -> Definition | None:
        origin = node.module or ""
        if node.level:
            is_package = (scope := self.module(module)) is not None and scope.is_package
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
                return self.lookup(origin, alias.name, seen) or (
                    Definition(full, Module.node) if self.module(full) is not None else None
                )
        return None

    # -------------------------------------------------------------------------------------- classes

    def bases(self, cls: Definition) -> list[Definition]:
        """The class and its bases in vLLM, nearest first."""
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

    def member(self, cls: Definition, name: str) -> Definition | None:
        """Method, field or attribute of the class or its bases."""
        bases = self.bases(cls)
        for members in (self._body_members, self._set_members):
            for one in bases:
                if (node := members(one).get(name)) is not None:
                    return Definition(one.module, node)
        return None

    def _body_members(self, cls: Definition) -> dict[str, ast.AST]:
        if cls.node not in self._members:
            self._members[cls.node] = body_members(cls.node)
        return self._members[cls.node]

    def _set_members(self, cls: Definition) -> dict[str, ast.AST]:
        if cls.node not in self._set:
            self._set[cls.node] = set_members(cls.node)
        return self._set[cls.node]

    def owner(self, cls: Definition, name: str) -> Definition | None:
        """`cls` if it has the member, else a subclass in the same module, of which an annotated
        value may be."""
        if self.member(cls, name) is not None:
            return cls
        module = self.module(cls.module)
        for node in module.classes() if module is not None else ():
            kin = Definition(cls.module, node)
            if cls in self.bases(kin) and self.member(kin, name) is not None:
                return kin
        return None

    def constructor(self, cls: Definition) -> ast.arguments | None:
        """A dataclass's from its fields; None if unknown."""
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

    def abstract(self, cls: Definition) -> list[str]:
        """Names of the methods that subclasses must define."""
        found: dict[str, bool] = {}
        for one in self.bases(cls):
            for name, node in body_members(one.node).items():
                decorators = node.decorator_list if isinstance(node, FunctionDef) else []
                is_abstract = any("abstract" in ast.unparse(one) for one in decorators)
                found.setdefault(name, is_abstract)
        return sorted(name for name, is_abstract in found.items() if is_abstract)

    def callers(self, cls: Definition, name: str) -> list[str]:
        """Methods in the class's own body that call a method of this name on any object."""
        if cls.node not in self._calls:
            self._calls[cls.node] = {
                method: {
                    one.func.attr
                    for one in ast.walk(node)
                    if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute)
                }
                for method, node in body_members(cls.node).items()
                if isinstance(node, FunctionDef)
            }
        return sorted(method for method, called in self._calls[cls.node].items() if name in called)

    # ---------------------------------------------------------------------------------------- types

    def annotated(self, module: str, annotation: ast.expr | None) -> Type:
        """Type of an annotation in a module."""
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

    def value(self, found: Definition) -> Type:
        """Type that code gets when it reads the field, property, attribute or variable."""
        if isinstance(found.node, ast.AnnAssign):
            return self.annotated(found.module, found.node.annotation)
        if isinstance(found.node, FunctionDef) and kind_of(found.node) == "property":
            return self.annotated(found.module, found.node.returns)
        return None

    def given(self, found: Definition) -> Type:
        """Type of a function's result; else as `value`."""
        if isinstance(found.node, FunctionDef):
            return self.annotated(found.module, found.node.returns)
        return self.value(found)


def own_members(cls: ast.AST) -> dict[str, ast.AST]:
    """Members of the body, and attributes that methods set."""
    assert isinstance(cls, ast.ClassDef)
    return set_members(cls) | body_members(cls)


def body_members(cls: ast.AST) -> dict[str, ast.AST]:
    assert isinstance(cls, ast.ClassDef)
    members: dict[str, ast.AST] = {}
    for line in statements(cls.body):
        if isinstance(line, ast.ClassDef | FunctionDef):
            members.setdefault(line.name, line)
        elif isinstance(line, ast.AnnAssign | ast.Assign):
            for target in [line.target] if isinstance(line, ast.AnnAssign) else line.targets:
                members |= dict.fromkeys(_targets(target), line)
    return members


def set_members(cls: ast.AST) -> dict[str, ast.AST]:
    """Assignments to attributes in methods."""
    assert isinstance(cls, ast.ClassDef)
    members: dict[str, ast.AST] = {}
    for method in [line for line in statements(cls.body) if isinstance(line, FunctionDef)]:
        arguments = {argument.arg: argument for argument in method.args.args}
        for node in statements(method.body):
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
    """The assignment, with the parameter's annotation if it assigns one."""
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
    """`method`, `property`, `classmethod` or `staticmethod`."""
    names = {ast.unparse(decorator).rpartition(".")[2] for decorator in function.decorator_list}
    if names & {"property", "cached_property"}:
        return "property"
    return next(iter(names & {"classmethod", "staticmethod"}), "method")


def _targets(target: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


# ------------------------------------------------------------------------------------------- calls


def call_text(node: ast.Call, parameters: Sequence[inspect.Parameter]) -> str:
    """As in `hotkv_vllm.compat.uses.Form.calls`, with `?` for a positional argument that is not
    accepted.

    parameters: without `self` or `cls`.
    """
    kinds = {one.kind for one in parameters}
    places = [one.name for one in parameters if one.kind in POSITIONAL]
    given = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
    more = "*" if inspect.Parameter.VAR_POSITIONAL in kinds else "?"
    keywords = sorted(f"{one.arg}=" for one in node.keywords if one.arg is not None)
    is_open = len(given) < len(node.args) or any(one.arg is None for one in node.keywords)
    positional = [*places, *[more] * len(given)][: len(given)]
    return ", ".join([*positional, *keywords, *(["..."] if is_open else [])])


POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def parameters_of(given: ast.arguments) -> list[inspect.Parameter]:
    """Defaults are `...`."""
    only, either, by_name, star, stars = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    )
    places = [*((one, only) for one in given.posonlyargs), *((one, either) for one in given.args)]
    first = len(places) - len(given.defaults)
    found = [
        inspect.Parameter(one.arg, kind, default=... if place >= first else inspect.Parameter.empty)
        for place, (one, kind) in enumerate(places)
    ]
    found += [inspect.Parameter(given.vararg.arg, star)] if given.vararg is not None else []
    found += [
        inspect.Parameter(
            one.arg, by_name, default=inspect.Parameter.empty if default is None else ...
        )
        for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    return found + ([inspect.Parameter(given.kwarg.arg, stars)] if given.kwarg is not None else [])
