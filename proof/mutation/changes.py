"""The changes that can be made to a file, and how some of them are drawn."""

from __future__ import annotations

import ast
import difflib
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

#: What an operator is called, what it looks like, and what stands in its place.
_SWAPS: dict[type[ast.AST], tuple[str, str, str]] = {
    ast.Lt: ("comparison", "<", "<="),
    ast.LtE: ("comparison", "<=", "<"),
    ast.Gt: ("comparison", ">", ">="),
    ast.GtE: ("comparison", ">=", ">"),
    ast.Eq: ("comparison", "==", "!="),
    ast.NotEq: ("comparison", "!=", "=="),
    ast.Is: ("comparison", "is", "is not"),
    ast.IsNot: ("comparison", r"is\s+not", "is"),
    ast.In: ("comparison", "in", "not in"),
    ast.NotIn: ("comparison", r"not\s+in", "in"),
    ast.And: ("logic", "and", "or"),
    ast.Or: ("logic", "or", "and"),
    ast.Add: ("arithmetic", r"\+", "-"),
    ast.Sub: ("arithmetic", "-", "+"),
    ast.Mult: ("arithmetic", r"\*", "/"),
    ast.Div: ("arithmetic", "/", "*"),
}
#: What can be left out. An `assert` cannot: many exist for mypy alone.
_STATEMENTS = (
    *(ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete),
    *(ast.Return, ast.Raise, ast.Break, ast.Continue),
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_FOR_TYPES = {"TypeVar", "ParamSpec", "NewType", "cast", "getLogger"}

_Edit = tuple[str, int, int, str]
"""The kind of a change, the first byte and the one behind the last, and the new text."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of one file.

    Attributes:
        file: its path in the checkout.
        line: where the change begins.
        kind: `comparison`, `logic`, `arithmetic`, `condition`, `constant` or `statement`.
        start: the first byte that changes.
        before: the text that changes.
        after: the text in its place.
        lines: a test that runs one of them may notice.
        identity: of the file, the text of the statement and the change; it outlives changes elsewhere.
    """

    file: str
    line: int
    kind: str
    start: int
    before: str
    after: str
    lines: frozenset[int]
    identity: str

    def applied(self, data: bytes) -> bytes:
        """Return the changed file; ValueError if it is not the file that was read."""
        before = self.before.encode()
        if not data.startswith(before, self.start):
            raise ValueError(f"{self.file}:{self.line} does not read {self.before!r} any more")
        return data[: self.start] + self.after.encode() + data[self.start + len(before) :]

    def diff(self, data: bytes) -> str:
        """Return the lines that go and the lines that come."""
        old, new = (each.decode().splitlines() for each in (data, self.applied(data)))
        lines = list(difflib.unified_diff(old, new, n=0, lineterm=""))[3:]
        return "\n".join(line for line in lines if line[1:].strip())


def changes_of(tree: Path, scope: Iterable[str]) -> list[Change]:
    """Return all changes of the Python files in some folders of a checkout."""
    paths = [path for folder in scope for path in sorted((tree / folder).rglob("*.py"))]
    return [
        change
        for path in paths
        for change in _File(path.relative_to(tree).as_posix(), path.read_bytes()).changes()
    ]


def drawn(changes: Iterable[Change], count: int, seed: int) -> list[Change]:
    """Draw some changes.

    The rank of a change depends on the seed and its identity alone, so that most of a draw stays the same
    when other code has changed.
    """
    return sorted(changes, key=lambda change: _digest(seed, change.identity))[:count]


def _digest(*facts: object) -> str:
    return hashlib.sha256("\0".join(map(str, facts)).encode()).hexdigest()


class _File:
    """Reads one file. Positions are in bytes, as those of `ast` are."""

    def __init__(self, name: str, data: bytes) -> None:
        self._name, self._data, self._tree = name, data, ast.parse(data)
        self._line_starts = [0]
        for line in data.split(b"\n"):
            self._line_starts.append(self._line_starts[-1] + len(line) + 1)
        self._met = Counter[str]()

    def changes(self) -> Iterator[Change]:
        """Yield every change, from top to bottom."""
        return self._of_body(self._tree.body, None)

    def _of_body(self, body: Sequence[ast.stmt], owner: ast.AST | None) -> Iterator[Change]:
        """Yield the changes of statements; the owner is the innermost function or class around them."""
        for statement in body:
            if _is_left_alone(statement):
                continue
            blocks = list(_blocks(statement))
            header = (
                statement.lineno,
                max(statement.lineno, blocks[0][0].lineno - 1) if blocks else _last(statement),
            )
            make = partial(self._change, statement, header, self._lines(statement, header, owner))
            if isinstance(owner, _FUNCTIONS) and not _only_names(statement, owner):
                yield from map(make, self._left_out(statement))
            for condition in _conditions(statement):
                yield from map(make, self._negated(condition))
            for expression in _expressions(statement):
                yield from map(make, self._of_expression(expression, runs=isinstance(owner, _FUNCTIONS)))
            inside = statement if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)) else owner
            for block in blocks:
                yield from self._of_body(block, inside)

    def _lines(self, statement: ast.stmt, header: tuple[int, int], owner: ast.AST | None) -> frozenset[int]:
        """Return the lines that show a change.

        What runs at import is over before the first test. The functions of its class or module show it.
        """
        if isinstance(owner, _FUNCTIONS):
            return frozenset(range(header[0], header[1] + 1))
        if isinstance(statement, _FUNCTIONS):
            return _lines_of_functions(statement)
        return _lines_of_functions(owner or self._tree) or _lines_of_functions(self._tree)

    def _change(
        self, statement: ast.stmt, header: tuple[int, int], lines: frozenset[int], edit: _Edit
    ) -> Change:
        kind, start, end, after = edit
        before = self._data[start:end].decode()
        text = self._data[self._line_starts[header[0] - 1] : self._line_starts[header[1]]].decode().strip()
        place = start - self._start(statement)
        key = _digest(self._name, text, place, kind, before, after)
        self._met[key] += 1
        line = self._data.count(b"\n", 0, start) + 1
        identity = _digest(key, self._met[key])[:12]
        return Change(self._name, line, kind, start, before, after, lines, identity)

    def _left_out(self, statement: ast.stmt) -> Iterator[_Edit]:
        if isinstance(statement, _STATEMENTS) and not _is_mute(statement):
            start, end = self._start(statement), self._end(statement)
            lines = self._data.count(b"\n", start, end)  # what stands below keeps its line
            yield "statement", start, end, "pass" + "\n" * lines

    def _of_expression(self, node: ast.AST, *, runs: bool, in_error: bool = False) -> Iterator[_Edit]:
        """Yield the changes inside an expression, but not of types and of text for people."""
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Subscript) and not runs):
            return
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in _FOR_TYPES or _is_log(node):
                return
            in_error = in_error or name.endswith(("Error", "Warning", "Exception"))
        if isinstance(node, ast.Constant):
            yield from self._of_constant(node, in_error=in_error)
            return
        yield from self._of_operators(node)
        for condition in _conditions(node):
            yield from self._negated(condition)
        for child in ast.iter_child_nodes(node):
            if not (isinstance(child, ast.keyword) and child.arg == "strict"):  # which only `zip` has
                yield from self._of_expression(child, runs=runs, in_error=in_error)

    def _of_operators(self, node: ast.AST) -> Iterator[_Edit]:
        match node:
            case ast.Compare():
                operands = [node.left, *node.comparators]
                for index, operator in enumerate(node.ops):
                    yield self._swapped(operator, operands[index : index + 2])
            case ast.BoolOp():
                yield self._swapped(node.op, node.values)
            case ast.BinOp() if type(node.op) in _SWAPS and not any(map(_is_text, (node.left, node.right))):
                yield self._swapped(node.op, [node.left, node.right])
            case ast.UnaryOp(op=ast.Not()):
                start, end = self._start(node), self._end(node)
                yield "condition", start, end, self._data[start + len("not") : end].decode().lstrip()

    def _swapped(self, operator: ast.AST, operands: Sequence[ast.expr]) -> _Edit:
        """Return the change of an operator in all the gaps between its operands."""
        kind, old, new = _SWAPS[type(operator)]
        pattern = re.compile(rf"#.*|(?<!\w)({old})(?!\w)" if old[0].isalpha() else f"#.*|({old})")
        start, end = self._end(operands[0]), self._start(operands[-1])
        parts = []
        for left, right in itertools.pairwise(operands):
            gap = self._data[self._end(left) : self._start(right)].decode()
            parts.append(pattern.sub(lambda found: new if found[1] else found[0], gap))
            parts.append(self._data[self._start(right) : self._end(right)].decode())
        return kind, start, end, "".join(parts[:-1])

    def _negated(self, condition: ast.expr) -> Iterator[_Edit]:
        """Yield the opposite of a condition that has no operator of its own."""
        if not isinstance(condition, (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Constant)):
            start, end = self._start(condition), self._end(condition)
            yield "condition", start, end, f"not ({self._data[start:end].decode()})"

    def _of_constant(self, node: ast.Constant, *, in_error: bool) -> Iterator[_Edit]:
        """Yield a near value. Text with a space has none, because it is a sentence or SQL."""
        match node.value:
            case bool(value):
                after = repr(not value)
            case int(value) | float(value):
                after = repr(value + 1)
            case str(value) if not in_error and " " not in value and "\n" not in value:
                after = repr(("y" if value[:1] == "x" else "x") + value[1:])
            case bytes(value):
                after = repr((b"y" if value[:1] == b"x" else b"x") + value[1:])
            case _:
                return
        yield "constant", self._start(node), self._end(node), after

    def _start(self, node: ast.stmt | ast.expr) -> int:
        return self._line_starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.stmt | ast.expr) -> int:
        return self._line_starts[_last(node) - 1] + (node.end_col_offset or 0)


def _last(node: ast.stmt | ast.expr) -> int:
    return node.end_lineno or node.lineno


def _is_left_alone(statement: ast.stmt) -> bool:
    """Tell whether nothing in a statement changes what the library does."""
    match statement:
        case ast.Assign():
            return any(
                isinstance(each, ast.Name) and each.id in {"__all__", "__slots__"}
                for each in statement.targets
            )
        case ast.If():
            return "TYPE_CHECKING" in ast.unparse(statement.test)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return any("overload" in ast.unparse(each) for each in statement.decorator_list)
    return False


def _is_mute(statement: ast.stmt) -> bool:
    """Tell whether a statement is a docstring, `...`, a log, or a type without a value."""
    if isinstance(statement, ast.AnnAssign):
        return statement.value is None
    return isinstance(statement, ast.Expr) and (
        isinstance(statement.value, ast.Constant) or _is_log(statement.value)
    )


def _only_names(statement: ast.stmt, function: ast.AST) -> bool:
    """Tell whether only this statement gives its names a value. Any test notices that it is gone."""
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
        return False
    values = Counter[str]()
    for node in ast.walk(function):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                values[name] += 1
            case ast.AnnAssign(target=ast.Name(id=name), value=None):
                values[name] -= 1
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                values.update(names)
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    stored = [
        node
        for each in targets
        for node in ast.walk(each)
        if isinstance(getattr(node, "ctx", None), ast.Store)
    ]
    return all(
        values[node.id] == 1 if isinstance(node, ast.Name) else isinstance(node, (ast.Tuple, ast.List))
        for node in stored
    )


def _is_log(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and re.match(r"logger\.|logging\.|warnings\.", ast.unparse(node.func)) is not None
    )


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    )


def _blocks(statement: ast.stmt) -> Iterator[Sequence[ast.stmt]]:
    """Yield the bodies of a compound statement."""
    for part in (statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        for field in ("body", "orelse", "finalbody"):
            if block := getattr(part, field, None):
                yield block


def _expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the expressions that a statement has itself, but for types and decorators."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield from [each for each in (*statement.args.defaults, *statement.args.kw_defaults) if each]
        case ast.AnnAssign():
            yield from [each for each in (statement.target, statement.value) if each]
        case ast.ClassDef() | ast.Raise() | ast.Expr(value=ast.Constant()):
            return
        case _:
            yield from (
                each for each in ast.iter_child_nodes(statement) if isinstance(each, (ast.expr, ast.withitem))
            )


def _conditions(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield node.test
    elif isinstance(node, ast.comprehension):
        yield from node.ifs


def _lines_of_functions(tree: ast.AST) -> frozenset[int]:
    """Return the lines inside the functions of a module or a class, or of a function itself."""
    functions = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]
    return frozenset(line for each in functions for line in range(each.body[0].lineno, _last(each) + 1))
