"""The mutants of a source file, for `tools/mutate.py`: the file with a single span of bytes
replaced, which can be parsed.

Never changed:

- statements of modules and classes (constants, fields), docstrings, annotations, decorators;
- messages of exceptions and logs, and `repr`;
- assertions (`zip(strict=True)` too) and functions that check invariants;
- comparisons of times: `<` does not become `<=`.
"""

import ast
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
SWAPPED_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
QUIET_FUNCTIONS = {"__repr__", "check_invariants", "check"}
HINTS = {"prefetch", "prefetch_address"}
"""Hints to the processor: no test can tell if they are given."""
QUIET_CALLS = {"log", "logger", "say", "warnings", "print", *HINTS}
"""Output for people, and hints: no test should depend on them."""
QUIET_KEYWORDS = {"strict", "daemon"}
"""`zip(strict=True)` is an assertion; `daemon` matters only at a stuck process's end."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """start, end: of the bytes that `text` replaces.
    function: with the classes around it.
    """

    path: str
    line: int
    function: str
    start: int
    end: int
    text: str
    change: str

    @property
    def name(self) -> str:
        """For `mutate_equivalents.txt`; stays if lines above come or go."""
        return f"{self.path}:{self.function}: {self.change}"

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str, source: bytes) -> None:
        self.path = path
        self.mutants: list[Mutant] = []
        self._names: list[str] = []
        self._in_function = False
        self._text = source.decode().splitlines()
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def _add(self, node: ast.expr | ast.stmt, replacement: str) -> None:
        if not self._in_function or node.end_lineno is None or node.end_col_offset is None:
            return
        start, end = (
            self._lines[node.lineno - 1] + node.col_offset,
            self._lines[node.end_lineno - 1] + node.end_col_offset,
        )
        change = f"{' '.join(ast.unparse(node).split())} -> {replacement}"
        if isinstance(node, ast.Constant):
            change += f" in {self._text[node.lineno - 1].strip()}"
        self.mutants.append(
            Mutant(self.path, node.lineno, ".".join(self._names), start, end, replacement, change)
        )

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._names.append(node.name)
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.visit(statement)
        self._names.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in QUIET_FUNCTIONS:
            return
        before, self._in_function = self._in_function, True
        self._names.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self._names.pop()
        self._in_function = before

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        return

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        return

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add(node, "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        if isinstance(node.value, ast.Call):
            first = node.value.func
            while isinstance(first, ast.Attribute | ast.Call):
                first = first.value if isinstance(first, ast.Attribute) else first.func
            if isinstance(first, ast.Name) and first.id in QUIET_CALLS:
                return
            self._add(node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if type(node.op) in OPERATORS:
            self._add(
                node,
                ast.unparse(ast.AugAssign(node.target, OPERATORS[type(node.op)](), node.value)),
            )
        self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if all(_is_hint(statement) for statement in (*node.body, *node.orelse)):
            return
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        """Not for `==`, `is`, `in`: `visit_Compare` negates the operator."""
        if isinstance(test, ast.Compare) and isinstance(
            test.ops[0], ast.Eq | ast.NotEq | ast.Is | ast.IsNot | ast.In | ast.NotIn
        ):
            return
        self._add(test, f"(not ({ast.unparse(test)}))")

    def visit_Compare(self, node: ast.Compare) -> None:
        for at, op in enumerate(node.ops):
            if isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) and _has_seconds(node):
                continue
            ops: list[ast.cmpop] = [*node.ops[:at], COMPARISONS[type(op)](), *node.ops[at + 1 :]]
            self._add(node, f"({ast.unparse(ast.Compare(node.left, ops, node.comparators))})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_text = any(
            isinstance(side, ast.JoinedStr)
            or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
            for side in (node.left, node.right)
        )
        if type(node.op) in OPERATORS and not is_text:
            self._add(
                node,
                f"({ast.unparse(ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right))})",
            )
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other: ast.boolop = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._add(node, f"({ast.unparse(ast.BoolOp(other, node.values))})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.Invert | ast.USub) and not isinstance(
            node.operand, ast.Constant
        ):
            self._add(node, f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in SWAPPED_CALLS:
            swapped = ast.Call(
                ast.Name(SWAPPED_CALLS[node.func.id], ast.Load()), node.args, node.keywords
            )
            # It may not accept them all; `min` and `max` share `default=` and `key=`.
            self._add(node, ast.unparse(swapped))
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in QUIET_KEYWORDS:
            self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, str(not node.value))
        elif isinstance(node.value, int):
            self._add(node, str(node.value + 1))


def _is_hint(node: ast.stmt) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in HINTS


def _has_seconds(node: ast.Compare) -> bool:
    """A clock almost never shows exactly the end of a wait."""
    names = (getattr(one, "attr", getattr(one, "id", "")) for one in ast.walk(node))
    return any(name.endswith("_s") for name in names)


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return finder.mutants
