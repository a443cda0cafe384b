"""The many ways of multiplying with the matrices of experts, each read as one contraction of named axes.

grouped_mm(x, w, offs)         mk, ekn -> mn          rows m of x belong to experts by their place
bmm, matmul, baddbmm, einsum   ...mk, ...kn -> ...mn  the batch axes of the weight run along experts
of one expert                  what `linear_forms` knows

product_of(node, operand) -> Contraction, a reason, or None if the node is nothing of this kind
orientation(contraction, view) -> whether the stack is stored as (E, K, N), or a reason
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from olq_fx import torch_private
from olq_fx.passes.fxtools import arguments, tensor_of
from olq_fx.passes.linear_forms import Contraction, Label, contraction_of
from olq_fx.passes.stack_views import EXPERTS
from olq_fx.passes.weight_views import NEITHER, WeightView

_E, _K, _N, _M = "e", "k", "n", "m"

_GROUPED_BY_NAME = frozenset(("transformers.grouped_mm_fallback", "transformers.grouped_mm_fallback.default"))
"""Operators of others with the arguments (input, weight, offs), known by name: their library is never imported."""


@dataclasses.dataclass(frozen=True, slots=True)
class GroupedContraction(Contraction):
    """A product of each row of an input with the matrix of the expert that it belongs to.

    Attributes:
        offsets: a node of shape (E,): behind the last row of each expert.
    """

    offsets: Node | None = None


def product_of(node: Node, operand: Node) -> Contraction | str | None:
    """Read a call that has a view of a stack among its operands.

    Args:
        node: the call.
        operand: the view, of any number of dimensions.

    Returns:
        The contraction; why it is refused; None if it is no product at all.
    """
    if node.op not in ("call_function", "call_method"):
        return None
    if node.target in torch_private.GROUPED_PRODUCTS:
        return _grouped(node, operand)
    if str(node.target) in _GROUPED_BY_NAME:
        return _grouped_by_others(node, operand)
    if node.target is torch.einsum:
        return _einsum(node, operand)
    if _rank(operand) > 2 and node.target in _BATCHED:
        return _BATCHED[node.target](node, operand)
    return contraction_of(node, operand)


def orientation(contraction: Contraction, view: WeightView) -> bool | str:
    """Whether a stack is stored as (E, K, N), not as (E, N, K), by a product with a view of it; or why it is none."""
    x = tensor_of(contraction.x)
    if x is None or not x.is_floating_point():
        return "its input is no floating tensor"
    roles = _roles(contraction, view)
    if isinstance(roles, str):
        return roles
    reduced, kept = roles
    along, across = view.dims[reduced].axis, {view.dims[dim].axis for dim in kept} - {NEITHER, EXPERTS}
    if along == NEITHER:
        along = 3 - min(across) if across else _axis_of_one(view)
    if along in across:
        return "it is cut along its reduction axis"
    if view.dims[reduced].size != view.stored[along] or view.start[along] or view.dims[reduced].step not in (0, 1):
        return "it is used through a slice along its reduction axis"
    extent = x.shape[contraction.x_labels.index(contraction.weight_labels[reduced])]
    if not torch_private.known_equal(extent, view.stored[along]):
        return "its input is broadcast along the reduction axis"
    return along == 1


def _roles(contraction: Contraction, view: WeightView) -> tuple[int, tuple[int, ...]] | str:
    """(the dimension of a view that a product sums over, those that it keeps as output features); or a reason."""
    x, labels, out = set(contraction.x_labels), contraction.weight_labels, set(contraction.out_labels)
    reduced = [dim for dim, label in enumerate(labels) if label in x and label not in out]
    kept = tuple(dim for dim, label in enumerate(labels) if label not in x and label in out)
    shared = [dim for dim, label in enumerate(labels) if label in x and label in out]
    if any(view.dims[dim].axis == EXPERTS for dim in reduced):
        return "its product sums over the experts"
    if len(reduced) != 1 or len({*labels}) != len(labels) or len(x) != len(contraction.x_labels):
        return "its product sums over no axis, or over several"
    if any(view.dims[dim].axis not in (EXPERTS, NEITHER) for dim in shared):
        return "its product keeps an axis of both operands"
    # The rows of an expert in a grouped product lie among those of the result.
    grouped = labels.index(_E) if isinstance(contraction, GroupedContraction) else None
    if grouped is not None and view.dims[grouped].axis not in (EXPERTS, NEITHER):
        return "its groups are no experts"
    if any(label not in x | out and dim != grouped for dim, label in enumerate(labels)) or x - out - {*labels}:
        return "its product drops an axis of an operand"
    return reduced[0], kept


def _axis_of_one(view: WeightView) -> int:
    """The axis that a dimension of size 1 runs along if it sees all of that axis, where nothing else tells."""
    return 2 if view.stored[2] == 1 else 1


def _rank(node: object) -> int:
    tensor = tensor_of(node)
    return -1 if tensor is None else tensor.dim()


# Grouped products


def _grouped(node: Node, operand: Node) -> Contraction | str | None:
    for first, second in (("mat_a", "mat_b"), ("input", "mat2"), ("self", "mat2")):
        bound = arguments(node, first, second, "offs", "bias", "out_dtype")
        if bound is not None and {first, second} <= set(bound):
            product = _rows_of_experts(bound[first], bound[second], bound.get("offs"), operand)
            return product if isinstance(product, str) else dataclasses.replace(product, bias=bound.get("bias"))
    return "its product has arguments that are not understood"


def _grouped_by_others(node: Node, operand: Node) -> Contraction | str | None:
    bound = arguments(node, "input", "weight", "offs")
    if bound is None or len(bound) != 3:
        return "its product has arguments that are not understood"
    return _rows_of_experts(bound["input"], bound["weight"], bound["offs"], operand)


def _rows_of_experts(x: Any, weight: Any, offsets: Any, operand: Node) -> Contraction | str:
    if weight is not operand or not isinstance(x, Node) or x is operand:
        return "it is the input or the offsets of a grouped product"
    if offsets is None:
        return _batched(x, weight, operand)
    if _rank(x) != 2 or _rank(weight) != 3 or not isinstance(offsets, Node):
        return "its grouped product is not of rows with a stack of matrices"
    return GroupedContraction(x, weight, (_M, _K), (_E, _K, _N), (_M, _N), offsets=offsets)


# Products with a batch of matrices


def _matmul(node: Node, operand: Node) -> Contraction | str | None:
    found = next((bound for other in ("other", "mat2") if (bound := arguments(node, "input", other))), None)
    if found is None or len(found) != 2:
        return "its product has arguments that are not understood"
    return _batched(found["input"], next(each for name, each in found.items() if name != "input"), operand)


def _rmatmul(node: Node, operand: Node) -> Contraction | str | None:
    return _batched(node.args[1], node.args[0], operand)


def _baddbmm(node: Node, operand: Node) -> Contraction | str | None:
    bound = arguments(node, "input", "batch1", "batch2", "beta", "alpha")
    if bound is None or not {"input", "batch1", "batch2"} <= set(bound):
        return "its product has arguments that are not understood"
    if bound.get("beta", 1) != 1 or bound.get("alpha", 1) != 1:
        return "its product is scaled (alpha or beta of baddbmm)"
    if bound["input"] is operand:
        return "it is added to a product"
    product = _batched(bound["batch1"], bound["batch2"], operand)
    return product if isinstance(product, str) else dataclasses.replace(product, bias=bound["input"])


_BATCHED: dict[Any, Callable[[Node, Node], Contraction | str | None]] = {
    **dict.fromkeys((torch.matmul, operator.matmul, torch.bmm, "matmul", "__matmul__", "bmm"), _matmul),
    **dict.fromkeys((torch.ops.aten.matmul.default, torch.ops.aten.bmm.default), _matmul),
    **dict.fromkeys((torch.baddbmm, torch.ops.aten.baddbmm.default, "baddbmm"), _baddbmm),
    "__rmatmul__": _rmatmul,
}


def _batched(a: Any, b: Any, operand: Node) -> Contraction | str:
    """`a @ b` with a batch of matrices that a weight has; axes of the batch are numbered from the last to the first."""
    if not isinstance(a, Node) or not isinstance(b, Node):
        return "its product is with something that is no tensor"
    if a is b:
        return "it is multiplied with itself"
    first, second = _batch(a), _batch(b)
    rows: tuple[Label, ...] = (_M,) if _rank(a) > 1 else ()
    columns: tuple[Label, ...] = (_N,) if _rank(b) > 1 else ()
    labels: dict[Node, tuple[Label, ...]] = {a: (*first, *rows, _K), b: (*second, _K, *columns)}
    out = (*(first if len(first) > len(second) else second), *rows, *columns)
    x, weight = (a, b) if b is operand else (b, a)
    return Contraction(x, weight, labels[x], labels[weight], out)


def _batch(node: Node) -> tuple[Label, ...]:
    return tuple(range(2 - _rank(node), 0))


# Einsum


def _einsum(node: Node, operand: Node) -> Contraction | str | None:
    equation, operands = node.args[0], list[Any](node.args[1:])
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or node.kwargs:
        return "its einsum has other than two operands"
    a, b = operands
    if not isinstance(a, Node) or not isinstance(b, Node):
        return "its product is with something that is no tensor"
    if a is b:
        return "it is multiplied with itself"
    read = read_stack_equation(equation, (_rank(a), _rank(b)))
    if isinstance(read, str):
        return read
    first, second, out = read
    return Contraction(a, b, first, second, out) if b is operand else Contraction(b, a, second, first, out)


def read_stack_equation(
    equation: str, ranks: tuple[int, int]
) -> tuple[tuple[Label, ...], tuple[Label, ...], tuple[Label, ...]] | str:
    """The axes of both operands and of the result of an einsum; why it is not understood.

    Args:
        equation: such as "ebd,edf->ebf", with or without ellipses, or a result.
        ranks: numbers of the operands' dimensions.

    >>> read_stack_equation("...md,...df->...mf", (3, 3))
    ((-1, 'm', 'd'), (-1, 'd', 'f'), (-1, 'm', 'f'))
    """
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    unnamed = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True)]
    first, second = (_axes(term, count) for term, count in zip(terms, unnamed, strict=True))
    if (
        len(first) != ranks[0]
        or len(second) != ranks[1]
        or any(len(set(each)) != len(each) for each in (first, second))
    ):
        return "its einsum repeats an axis"
    if arrow:
        return first, second, _axes(output, max(unnamed))
    # Without a result: the ellipsis, then the letters that stand once, in alphabetical order.
    once = sorted(str(axis) for axis in {*first} ^ {*second} if isinstance(axis, str))
    return first, second, (*range(-max(unnamed), 0), *once)


def _axes(term: str, unnamed: int) -> tuple[Label, ...]:
    """The axes of one term; those of an ellipsis are numbered from the last to the first."""
    before, dots, after = term.partition("...")
    return (*before, *(range(-unnamed, 0) if dots else ()), *after)
