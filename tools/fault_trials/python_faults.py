"""Possible faults of a Python file, found in its syntax tree. Each edit replaces an exact span of the source."""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import CodeType

from fault_trials.fault import Fault, change, identified

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "ceil": "floor", "floor": "ceil"}
NAMES |= {"SUM": "MAX", "MAX": "SUM", "MIN": "MAX", "amax": "amin", "zeros_like": "ones_like", "sum": "max"}
LARGEST = 64  # larger integer constants are sizes of buffers and the like, where one more makes no difference
# Calls whose arguments are messages, and keywords that only concern messages, time or memory.
MESSAGE = re.compile(
    r"^(print|warn|say)$|^((?!math|torch|np)\w+\.)*_?(log|logger|console|warnings|parser)(\.\w+)?$|\.std(err|out)\."
)
QUIET = set(
    "indent timeout stacklevel width maxsize interval buffering errors encoding help strict daemon repr".split()
)
TYPE_TESTS = {"isinstance", "issubclass", "getattr", "setattr", "hasattr", "cast", "zip", "range", "super", *NAMES}
PATHS = re.compile(r"(path|folder|root|dir|directory|file|name|home|cache|place|target|parent|parents\[\d\])\)?$", re.I)
UNSEEN = {"__repr__", "__str__", "__dir__"}
CONTEXT = 16  # a report shows an expression of at least this many characters around a change


def python_faults(file: str, source: bytes) -> list[Fault]:
    """Return all possible faults of a file. `file` is its path in reports."""
    finder = _Finder(file, source)
    finder.visit(finder.tree)
    return identified(finder.faults, source)


def same_code(one: bytes, other: bytes) -> bool | None:
    """Return True if two sources compile to the same instructions, None if the second does not compile."""
    try:
        return _shape(compile(one, "one", "exec")) == _shape(compile(other, "one", "exec"))
    except (SyntaxError, ValueError):
        return None


def _shape(code: CodeType) -> tuple[object, ...]:
    constants = [_shape(each) if isinstance(each, CodeType) else (type(each), each) for each in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants


class _Finder(ast.NodeVisitor):
    """Collects the faults of a module in the order of the source."""

    def __init__(self, file: str, source: bytes):
        self.tree = ast.parse(source)
        self.faults: list[Fault] = []
        self._file, self._source = file, source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._scope: list[str] = []
        self._around: list[ast.expr | ast.stmt] = []  # statement and expressions around the current node
        self._functions = 0  # functions around the current node
        self._lines = (1, 1)

    # ---- positions and results

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self._span(node)
        return self._source[start:end].decode()

    def _add(self, operator: str, edit: tuple[int, int, str], shown: ast.expr | ast.stmt) -> None:
        span = self._span(shown)
        for node in reversed(self._around):
            compound = isinstance(node, ast.stmt) and hasattr(node, "body")
            if compound or span[1] - span[0] >= CONTEXT:
                break
            span = self._span(node)
        old, new = change(self._source, edit, span)
        line = bisect_right(self._starts, edit[0])
        lines = self._lines if self._functions else None
        self.faults.append(Fault(self._file, ".".join(self._scope), line, operator, *edit, old, new, lines))

    def _replace(self, operator: str, node: ast.expr | ast.stmt, text: str, shown: ast.expr | None = None) -> None:
        self._add(operator, (*self._span(node), text), shown or node)

    def _sign(self, operator: str, old: str, new: str, between: tuple[ast.expr, ast.expr], shown: ast.expr) -> None:
        """Replace the operator between two operands. Parentheses and comments may surround it."""
        start, end = self._span(between[0])[1], self._span(between[1])[0]
        region = re.sub(rb"#[^\n]*", lambda match: b" " * len(match[0]), self._source[start:end])
        pattern = old if old[0].isalpha() else re.escape(old)
        if match := re.search(pattern.encode(), region):
            self._add(operator, (start + match.start(), start + match.end(), new), shown)

    # ---- scopes and statements

    @contextmanager
    def _within(self, lines: tuple[int, int]) -> Iterator[None]:
        before, self._lines = self._lines, lines
        yield
        self._lines = before

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom | ast.pattern):
            return
        if not isinstance(node, ast.expr | ast.stmt):
            super().visit(node)
            return
        self._around.append(node)
        if isinstance(node, ast.expr):
            super().visit(node)
        else:
            body = getattr(node, "body", None)
            last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
            with self._within((node.lineno, last)):
                super().visit(node)
        self._around.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in UNSEEN:
            return
        self._scope.append(node.name)
        self._functions += 1
        with self._within((node.body[0].lineno, node.end_lineno or node.lineno)):  # defaults matter where the body runs
            for default in (*node.args.defaults, *node.args.kw_defaults):
                if default is not None:
                    self.visit(default)
        self._visit_all(node.body)
        self._functions -= 1
        self._scope.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.body)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scope.append(node.name)
        self._visit_all(node.body)
        self._scope.pop()

    def _visit_all(self, nodes: Sequence[ast.AST]) -> None:
        for each in nodes:
            self.visit(each)

    def visit_If(self, node: ast.If) -> None:
        if not (
            {"TYPE_CHECKING", "__name__"} & {each.id for each in ast.walk(node.test) if isinstance(each, ast.Name)}
        ):
            self._condition(node.test)
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._condition(test)
        self.generic_visit(node)

    def _condition(self, test: ast.expr) -> None:
        """Negate a condition, unless another operator of this list does so."""
        equality = ast.Eq | ast.NotEq | ast.Is | ast.IsNot | ast.In | ast.NotIn
        same = isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], equality)
        if not same and not isinstance(test, ast.NamedExpr) and not _is_not(test):
            self._replace("negate condition", test, f"not ({self._text(test)})")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not self._message(node.value):
            if not self._text(node.value).startswith("super()"):
                self._replace("drop call", node, "pass")
            self.visit(node.value)
        elif not isinstance(node.value, ast.Call | ast.Constant):
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(each, ast.Name) and each.id == "__all__" for each in node.targets):
            return
        stored = all(isinstance(each, ast.Attribute | ast.Subscript) for each in node.targets)
        if stored and self._scope[-1:] != ["__init__"]:  # a missing attribute fails at once
            self._replace("drop assignment", node, "pass")
        self._visit_all([*node.targets, node.value])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace("drop assignment", node, "pass")
        if type(node.op) in ARITHMETIC and not _is_text(node.value):
            old, new = ARITHMETIC[type(node.op)]
            start, end = self._span(node.target)[1], self._span(node.value)[0]
            at = self._source.index(old.encode(), start, end)
            self._add("arithmetic", (at, at + len(old), new), node)
        self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        if "NotImplementedError" not in self._text(node):
            self._replace("drop raise", node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self._replace("drop break", node, "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._replace("drop continue", node, "pass")

    def visit_Return(self, node: ast.Return) -> None:
        value = node.value
        if value is None:
            return
        if not isinstance(value, ast.Constant):
            self._replace("return None", value, "None")
        if isinstance(value, ast.Call) and value.args and not isinstance(value.args[0], ast.Starred | ast.Constant):
            self._replace("return argument", value, self._text(value.args[0]))
        self.visit(value)

    def visit_match_case(self, node: ast.match_case) -> None:
        if node.guard is not None:
            self._condition(node.guard)
            self.visit(node.guard)
        self._visit_all(node.body)

    # ---- expressions

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, op, right in zip((node.left, *node.comparators), node.ops, node.comparators, strict=False):
            old, new = COMPARISONS[type(op)]
            self._sign("comparison", old, new, (left, right), node)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        sides = (node.left, node.right)
        path = isinstance(node.op, ast.Div) and any(PATHS.search(self._text(each)) for each in sides)
        if type(node.op) in ARITHMETIC and not path and not any(map(_is_text, sides)):
            self._sign("arithmetic", *ARITHMETIC[type(node.op)], sides, node)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._sign("and/or", old, new, (left, right), node)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if _is_not(node):
            self._replace("drop not", node, f"({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace("boolean", node, str(not node.value))
        elif isinstance(node.value, int) and node.value <= LARGEST:
            self._replace("constant + 1", node, str(node.value + 1))
            if node.value > 0:
                self._replace("constant - 1", node, str(node.value - 1))

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound, sign in ((node.lower, "+"), (node.upper, "-")):
            if bound is not None and not isinstance(bound, ast.Constant | ast.UnaryOp):
                self._replace("slice", bound, f"({self._text(bound)}) {sign} 1")
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in NAMES and isinstance(node.ctx, ast.Load):
            self._replace("name", node, NAMES[node.id])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in NAMES and isinstance(node.ctx, ast.Load):
            end = self._span(node)[1]
            self._add("name", (end - len(node.attr), end, NAMES[node.attr]), node)
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        if self._message(node):
            return
        first = node.args[:2]
        plain = all(isinstance(each, ast.Name | ast.Attribute | ast.Subscript) for each in first)
        if len(first) == 2 and plain and self._text(node.func) not in TYPE_TESTS:
            one, two = map(self._text, first)
            if one != two:
                between = self._source[self._span(first[0])[1] : self._span(first[1])[0]].decode()
                edit = (self._span(first[0])[0], self._span(first[1])[1], f"{two}{between}{one}")
                self._add("swap arguments", edit, node)
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in QUIET:
            self.visit(node.value)

    def _message(self, node: ast.Call) -> bool:
        return bool(MESSAGE.search(self._text(node.func)))


def _is_not(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _is_text(node: ast.expr) -> bool:
    """Return True for an operand of a concatenation or repetition."""
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    text = isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    return text or isinstance(node, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp)
