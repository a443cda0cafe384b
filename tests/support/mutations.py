"""Mutations of Triton-language functions: small faults, generated from their syntax, that tests should notice.

Five operators: `comparison` (another relation, a condition turned round), `constant` (a number a little or much off, a
switch turned), `rounding` (a division by way of a reciprocal, no rounding, another one), `mask` (the cases of a `where`
exchanged or fixed, a bit operation or a limit replaced), `index` (a shift, an axis, an order, a sign replaced).
"""

import ast
import copy
import dataclasses
from collections.abc import Iterator

RELATIONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, type[ast.operator]]] = {
    ast.BitAnd: ("mask", ast.BitOr),
    ast.BitOr: ("mask", ast.BitAnd),
    ast.LShift: ("index", ast.RShift),
    ast.RShift: ("index", ast.LShift),
    ast.Add: ("index", ast.Sub),
    ast.Sub: ("index", ast.Add),
    ast.Mult: ("index", ast.Add),
    ast.FloorDiv: ("index", ast.Mult),
}


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One changed place.

    Attributes:
        function: where it stands; "" for a constant of the module.
        operator: its kind.
        line: of the original.
        before: the expression as it was.
        after: as it is.
        source: of the whole module, changed.
    """

    function: str
    operator: str
    line: int
    before: str
    after: str
    source: str = dataclasses.field(repr=False)

    @property
    def key(self) -> tuple[str, str, str]:
        """What it is, wherever its line may be."""
        return self.function, self.before, self.after


def mutations(source: str) -> list[Mutation]:
    """All mutations of a module's functions and of its constants, in the order of its lines."""
    tree = ast.parse(source)
    found: list[Mutation] = []
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            for inner in statement.body[1 if ast.get_docstring(statement) else 0 :]:
                found += _of(tree, inner, statement.name)
        elif isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
            found += _of(tree, statement, "")
    return found


def _of(tree: ast.Module, top: ast.stmt, function: str) -> Iterator[Mutation]:
    for node in list(ast.walk(top)):
        for operator, changed in _changes(node):
            before = _text(node)
            original = copy.copy(node.__dict__)
            kind = node.__class__
            node.__class__, node.__dict__ = changed.__class__, changed.__dict__ | _places(original)
            after, whole = _text(node), ast.unparse(ast.fix_missing_locations(tree))
            node.__class__, node.__dict__ = kind, original
            yield Mutation(function, operator, node.lineno, _shown(top, node, before), after, whole)


def _text(node: ast.AST) -> str:
    return f"if {ast.unparse(node.test)}" if isinstance(node, ast.If) else ast.unparse(node)


def _places(attributes: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in attributes.items() if name.endswith(("lineno", "col_offset"))}


def _shown(top: ast.stmt, node: ast.AST, text: str) -> str:
    """The expression; a number or a name together with what it stands in, since it says little by itself."""
    if not isinstance(node, ast.Constant | ast.Name):
        return text
    around = [other for other in ast.walk(top) if isinstance(other, ast.expr | ast.stmt) and other is not node]
    holders = [other for other in around if node in ast.iter_child_nodes(other) or _in_keyword(other, node)]
    return f"{text} in {ast.unparse(holders[0])}" if holders else text


def _in_keyword(holder: ast.AST, node: ast.AST) -> bool:
    return isinstance(holder, ast.Call) and any(keyword.value is node for keyword in holder.keywords)


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Each operator that applies to a node, with what it makes of it."""
    if isinstance(node, ast.Compare):
        for relation in RELATIONS[type(node.ops[0])]:
            yield "comparison", ast.Compare(node.left, [relation()], node.comparators)
    elif isinstance(node, ast.If | ast.IfExp) and isinstance(node.test, ast.Name):
        yield "comparison", type(node)(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.Constant):
        yield from (("constant", ast.Constant(value)) for value in _other_numbers(node.value))
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        operator, other = ARITHMETIC[type(node.op)]
        yield operator, ast.BinOp(node.left, other(), node.right)
    elif isinstance(node, ast.UnaryOp):
        yield "index", node.operand
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
        yield "index", ast.Assign([ast.Tuple(node.targets[0].elts[::-1], ast.Store())], node.value)
    elif isinstance(node, ast.Call):
        yield from _changed_calls(node)


def _other_numbers(value: object) -> list[int | float | bool]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1]
    if isinstance(value, float):
        return [value * 2, value / 2] if value else [1.0]
    return []


def _changed_calls(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    name, args = ast.unparse(node.func), node.args
    if name == "tl.where":
        yield "mask", ast.Call(node.func, [args[0], args[2], args[1]], [])
        yield "mask", args[1]
        yield "mask", args[2]
    elif name in ("tl.maximum", "tl.minimum", "tl.max"):
        other = {"tl.maximum": "minimum", "tl.minimum": "maximum", "tl.max": "min"}[name]
        yield "mask", ast.Call(ast.Attribute(ast.Name("tl"), other), args, node.keywords)
        if len(args) == 2:
            yield "mask", args[0]
    elif name == "tl.div_rn":
        yield "rounding", ast.BinOp(args[0], ast.Mult(), ast.BinOp(ast.Constant(1.0), ast.Div(), args[1]))
    elif name == "rounded":
        yield "rounding", ast.Call(ast.Attribute(ast.Name("tl"), "floor"), args, [])
        yield "rounding", args[0]
    elif name == "tl.abs":
        yield "mask", args[0]
    elif name == "tl.join":
        yield "index", ast.Call(node.func, args[::-1], [])
