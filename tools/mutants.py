"""Mutants of a Python file: the same text with one small fault, of the kinds that slip into numeric code."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Mutant", "mutants_of"]

COMPARISONS = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
ARITHMETIC = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd},
}
EXTREMES = ("min", "amin", "minimum", "clamp_min", "clamp_min_", "argmin", "cummin", "nanmin")
OTHER_EXTREME = {low: low.replace("min", "max") for low in EXTREMES}
OTHER_EXTREME |= {high: low for low, high in OTHER_EXTREME.items()}
UNTOUCHED = {"__repr__", "__str__"}


@dataclass(frozen=True)
class Mutant:
    """A file with one fault.

    Attributes:
        operator: kind of the fault.
        line: where it is, from 1.
        before: the expression or statement as it was.
        after: what stands there now.
        source: text of the whole file.
    """

    operator: str
    line: int
    before: str
    after: str
    source: str


def mutants_of(source: str) -> list[Mutant]:
    """All mutants of a file, in the order of its text; each of them can be compiled.

    Nothing is changed in texts, docstrings, annotations, imports, what is raised, ``__repr__`` and ``__str__``.

    Args:
        source: text of the file.

    Raises:
        SyntaxError: for a text that is no Python.
    """
    found = []
    for node, operator, after in _faults(ast.parse(source)):
        before = ast.get_source_segment(source, node) or ""
        if ast.dump(ast.parse(after).body[0]) != ast.dump(ast.parse(ast.unparse(node)).body[0]):  # f(a, a) swapped
            found.append(Mutant(operator, node.lineno, before, after, _replaced(source, node, after)))
    return sorted(found, key=lambda mutant: mutant.line)


def _replaced(source: str, node: ast.expr | ast.stmt, after: str) -> str:
    """The text with another one in a node's place; the tree counts columns in bytes."""
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: (node.end_lineno or node.lineno) - 1])) + (node.end_col_offset or 0)
    whole = b"".join(lines)
    return (whole[:start] + after.encode() + whole[end:]).decode()


def _faults(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    """The node to replace, the kind of the fault, and the text that takes its place."""
    if _is_left_alone(node):
        return
    if isinstance(node, ast.expr):
        for operator, after in _of_expression(node):
            # a call with other arguments is still a call; anything else may bind less tightly than what was there
            yield node, operator, ast.unparse(after) if isinstance(after, ast.Call) else f"({ast.unparse(after)})"
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield node, "statement", "pass"
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield node.test, "negation", f"(not ({ast.unparse(node.test)}))"
    for name, value in ast.iter_fields(node):
        if name not in {"annotation", "returns", "decorator_list", "type_params"}:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _faults(child)


def _is_left_alone(node: ast.AST) -> bool:
    # the columns of what stands inside an f-string are not those of the file before Python 3.12
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return True
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in UNTOUCHED


def _of_expression(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Compare(ops=[operation]):
            yield "comparison", ast.Compare(node.left, [COMPARISONS[type(operation)]()], node.comparators)
        case ast.BinOp() if type(node.op) in ARITHMETIC:
            yield "arithmetic", ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
        case ast.BoolOp():
            yield "boolean", ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not() | ast.Invert()):
            yield "negation", node.operand
        case ast.Constant(value=bool()):
            yield "constant", ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield "constant", ast.Constant(node.value + 1)
            yield "constant", ast.Constant(node.value - 1)
        case ast.Call():
            yield from _of_call(node)


def _of_call(node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name == "detach" and isinstance(node.func, ast.Attribute):
        yield "detach", node.func.value
    if name == "where" and len(node.args) == 3:
        yield from (("branch", branch) for branch in node.args[1:])
    if name in OTHER_EXTREME:
        other = OTHER_EXTREME[name]
        func = ast.Attribute(node.func.value, other) if isinstance(node.func, ast.Attribute) else ast.Name(other)
        yield "extreme", ast.Call(func, node.args, node.keywords)
    if len(node.args) > 1 and not any(isinstance(value, ast.Starred) for value in node.args[:2]):
        first, second, *rest = node.args
        yield "arguments", ast.Call(node.func, [second, first, *rest], node.keywords)
    for place, keyword in enumerate(node.keywords):
        if keyword.arg == "dim" and isinstance(keyword.value, ast.Constant | ast.UnaryOp):
            after = ast.BinOp(keyword.value, ast.Sub(), ast.Constant(1))
            others = [*node.keywords[:place], ast.keyword("dim", after), *node.keywords[place + 1 :]]
            yield "dim", ast.Call(node.func, node.args, others)
