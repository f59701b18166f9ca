"""What vLLM's sources define, found on their syntax trees: names of modules, members and bases of
classes, parameters, annotated types.

Nothing is imported or run. What can't be told (names from other packages, unannotated values) is
None, and nobody checks it.
"""

import ast
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tools.vllm_sources import Source

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
        """What a full name such as `vllm.config.VllmConfig` stands for; None if there is nothing,
        or it comes from another package."""
        module, _, last = name.rpartition(".")
        return self.lookup(module, last) or (
            Found(name, tree) if (tree := self.module(name)) is not None else None
        )

    def lookup(
        self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()
    ) -> Found | None:
        """A name in a module's scope, followed to where it is defined; None for those of other
        packages. `seen`: names on the way."""
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
        """A class and its bases of vLLM's, nearest first."""
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
        """A class's method, field or attribute, its bases' included."""
        for one in self.bases(cls):
            if (node := own_members(one.node).get(name)) is not None:
                return Found(one.module, node)
        return None

    def member_of_kin(self, cls: Found, name: str) -> Found | None:
        """As `member`; also that of a subclass in the class's own module, for values whose
        annotation names the base."""
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
        """The type that an annotation in a module names."""
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
        """The type of a member that is read: of a field, a property, an annotated attribute."""
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
    """The assignment of an attribute; with the annotation of the parameter that it keeps."""
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
    """How a method is called: `method`, `property`, `classmethod` or `staticmethod`."""
    names = {ast.unparse(decorator).rpartition(".")[2] for decorator in function.decorator_list}
    if names & {"property", "cached_property"}:
        return "property"
    return next(iter(names & {"classmethod", "staticmethod"}), "method")


def _targets(target: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
