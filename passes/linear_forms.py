"""The many ways of writing a linear layer, each read as one contraction of named axes.

    F.linear(x, w, b)        ...k, nk -> ...n  + b
    torch.addmm(b, x, w)     mk, kn -> mn  + b            (transformers' Conv1D)
    x @ w, mm, bmm           ...k, kn -> ...n             (bmm and batched matmul: one weight for the whole batch)
    w @ x, mv, addmv         nk, ...km -> ...nm
    einsum, tensordot, inner any axes, one of them summed over

    contraction_of(node, operand, rank) -> Contraction, a reason, or None if the node is nothing of this kind
    resolve(contraction, view) -> LinearUse or a reason

A function that reads a call and refuses it says why: what is refused is a weight left alone, and the user is told.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional

from olq_fx.passes.fxtools import arguments, tensor_of
from olq_fx.passes.weight_views import NEITHER, Matrix, WeightView, as_matrix

Label = str | int
"""The name of an axis: a letter of an einsum, or a number for one without a letter."""

_K, _N, _M = "k", "n", "m"


@dataclasses.dataclass(frozen=True, slots=True)
class Contraction:
    """A product of an input and a weight.

    Attributes:
        x: the input.
        weight: the operand that is a view of a weight.
        x_labels, weight_labels, out_labels: the axes of the input, of the weight and of the result. Axes of the weight
            that are None are the batch axes of a broadcast weight.
        bias: a node of shape (N,) to be added, or None.
    """

    x: Node
    weight: Node
    x_labels: tuple[Label, ...]
    weight_labels: tuple[Label | None, ...]
    out_labels: tuple[Label, ...]
    bias: Node | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class LinearUse:
    """A use of a weight as a linear layer.

    Attributes:
        node: the call.
        x: its input, of any number of dimensions.
        matrix: the weight.
        bias: a node of shape (N,), or None.
        x_order: the permutation of the input that puts the reduction axis last.
        n_shape: the extents by which output features appear in the result (usually one).
        out_order: the permutation from (the input's other axes, output features) to the result.
    """

    node: Node
    x: Node
    matrix: Matrix
    bias: Node | None
    x_order: tuple[int, ...]
    n_shape: tuple[int, ...]
    out_order: tuple[int, ...]


def contraction_of(node: Node, operand: Node) -> Contraction | str | None:
    """Read a call that has a view of a weight among its operands.

    Args:
        node: the call.
        operand: the view of the weight.

    Returns:
        The contraction; why it is refused; None if it is no product at all.
    """
    if node.op not in ("call_function", "call_method"):
        return None
    reader = _READERS.get(node.target)
    return None if reader is None else reader(node, operand)


def resolve(node: Node, contraction: Contraction, view: WeightView) -> LinearUse | str:
    """Match a contraction with how its weight is stored.

    Returns:
        The use, or why it is none of a linear layer.
    """
    x, out = tensor_of(contraction.x), tensor_of(node)
    if x is None or out is None or not x.is_floating_point():
        return "its input is no floating tensor"
    labels = contraction.weight_labels
    reduced = [label for label in contraction.x_labels if label in labels]
    kept = [label for label in labels if label is not None and label not in reduced]
    others = [label for label in contraction.x_labels if label not in reduced]
    if len(reduced) != 1 or len(set(contraction.x_labels)) != x.dim() or len(set(labels) - {None}) != len(kept) + 1:
        return "its product sums over no axis, or over several"
    if sorted(map(str, contraction.out_labels)) != sorted(map(str, [*others, *kept])):
        return "its product keeps an axis of both operands, or drops one"
    matrix = as_matrix(view, labels.index(reduced[0]), tuple(labels.index(label) for label in kept))
    if isinstance(matrix, str):
        return matrix
    position = contraction.x_labels.index(reduced[0])
    if x.shape[position] != matrix.columns:
        return "its input is broadcast along the reduction axis"
    refused = _bias_refused(contraction.bias, matrix)
    if refused:
        return refused
    sizes: dict[Label, Any] = dict(zip(contraction.x_labels, x.shape, strict=True))
    sizes |= {label: view.dims[labels.index(label)].size for label in kept}
    batch = [view.dims[index].axis for index, label in enumerate(labels) if label is None]
    if set(batch) - {NEITHER} or tuple(out.shape) != tuple(sizes[label] for label in contraction.out_labels):
        return "its product is of a batch of matrices, or broadcast"
    n_shape = tuple(sizes[label] for label in kept)
    x_order = (*(i for i, label in enumerate(contraction.x_labels) if label not in reduced), position)
    out_order = tuple([*others, *kept].index(label) for label in contraction.out_labels)
    return LinearUse(node, contraction.x, matrix, contraction.bias, x_order, n_shape, out_order)


def _bias_refused(bias: Node | None, matrix: Matrix) -> str:
    if bias is None:
        return ""
    tensor = tensor_of(bias)
    if tensor is None or tuple(tensor.shape) != (matrix.stop - matrix.start,):
        return "what is added to its product is no bias of shape (N,)"
    return ""


# Readers: one for each way of writing a product.

_Reader = Callable[[Node, Node], Contraction | str | None]
_READERS: dict[Any, _Reader] = {}


def _reads(*targets: Any) -> Callable[[_Reader], _Reader]:
    def register(reader: _Reader) -> _Reader:
        _READERS.update(dict.fromkeys(targets, reader))
        return reader

    return register


def _rank(node: object) -> int:
    tensor = tensor_of(node)
    return -1 if tensor is None else tensor.dim()


def _unnamed(count: int) -> tuple[int, ...]:
    return tuple(range(count))


def _pair(a: Any, b: Any, operand: Node) -> bool | str:
    """Whether the weight is the second operand; why the two are no input and weight."""
    if not isinstance(a, Node) or not isinstance(b, Node):
        return "its product is with something that is no tensor"
    if a is b:
        return "it is multiplied with itself"
    return b is operand


def _ordered(a: Any, b: Any, second: bool) -> tuple[Node, Node]:
    """(input, weight) of two operands, of which `_pair` has said which is which."""
    return (a, b) if second else (b, a)


@_reads(functional.linear, torch.ops.aten.linear.default)
def _linear(node: Node, operand: Node) -> Contraction | str | None:
    bound = arguments(node, "input", "weight", "bias")
    if bound is None:
        return "its linear layer has arguments that are not understood"
    x, weight, bias = bound.get("input"), bound.get("weight"), bound.get("bias")
    if weight is not operand or not isinstance(x, Node) or x is weight:
        return "it is the input or the bias of a linear layer"
    leading = _unnamed(_rank(x) - 1)
    if _rank(weight) == 1:
        return Contraction(x, weight, (*leading, _K), (_K,), leading, bias)
    return Contraction(x, weight, (*leading, _K), (_N, _K), (*leading, _N), bias)


@_reads(
    torch.matmul,
    operator.matmul,
    operator.imatmul,
    torch.mm,
    torch.bmm,
    torch.mv,
    torch.ops.aten.matmul.default,
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.mv.default,
    "matmul",
    "__matmul__",
    "mm",
    "bmm",
    "mv",
)
def _matmul(node: Node, operand: Node) -> Contraction | str | None:
    if len(node.args) != 2 or node.kwargs:
        bound = arguments(node, "input", "other") or arguments(node, "input", "mat2") or arguments(node, "input", "vec")
        if bound is None or len(bound) != 2:
            return "its product has arguments that are not understood"
        first, second = bound.values()
        return _product(first, second, operand)
    return _product(node.args[0], node.args[1], operand)


@_reads("__rmatmul__")
def _rmatmul(node: Node, operand: Node) -> Contraction | str | None:
    return _product(node.args[1], node.args[0], operand)


@_reads(torch.addmm, torch.addmv, torch.ops.aten.addmm.default, "addmm", "addmv")
def _addmm(node: Node, operand: Node) -> Contraction | str | None:
    matrix = "mat" if "addmv" in str(node.target) else "mat1"
    vector = "vec" if "addmv" in str(node.target) else "mat2"
    bound = arguments(node, "input", matrix, vector) or arguments(node, "input", matrix, vector, "beta", "alpha")
    if bound is None:
        return "its product has arguments that are not understood"
    if bound.get("beta", 1) != 1 or bound.get("alpha", 1) != 1:
        return "its product is scaled (alpha or beta of addmm)"
    if bound["input"] is operand:
        return "it is added to a product"
    contraction = _product(bound[matrix], bound[vector], operand)
    if not isinstance(contraction, Contraction):
        return contraction
    # Of `w @ x` each row has its own output feature, which a bias of shape (N,) does not run along.
    if contraction.out_labels[-1:] not in ((_N,), ()) or not isinstance(bound["input"], Node):
        return "what is added to its product is no bias of shape (N,)"
    return dataclasses.replace(contraction, bias=bound["input"])


def _product(a: Any, b: Any, operand: Node) -> Contraction | str | None:
    second = _pair(a, b, operand)
    if isinstance(second, str):
        return second
    return _times_right(a, b) if second else _times_left(a, b)


def _times_right(x: Node, weight: Node) -> Contraction | str:
    """`x @ w`."""
    leading = _unnamed(_rank(x) - 1)
    if _rank(weight) == 1:
        return Contraction(x, weight, (*leading, _K), (_K,), leading)
    batch: tuple[None, ...] = (None,) * (_rank(weight) - 2)
    if len(batch) > len(leading) - 1 and batch:
        return "its product has more batch axes than its input"
    return Contraction(x, weight, (*leading, _K), (*batch, _K, _N), (*leading, _N))


def _times_left(weight: Node, x: Node) -> Contraction | str:
    """`w @ x`."""
    batch: tuple[None, ...] = (None,) * (_rank(weight) - 2)
    rows: tuple[Label, ...] = (_N,) if _rank(weight) > 1 else ()
    labels: tuple[Label | None, ...] = (*batch, *rows, _K)
    if _rank(x) == 1:
        return (
            "its product has more batch axes than its input" if batch else Contraction(x, weight, (_K,), labels, rows)
        )
    leading = _unnamed(_rank(x) - 2)
    if len(batch) > len(leading):
        return "its product has more batch axes than its input"
    return Contraction(x, weight, (*leading, _K, _M), labels, (*leading, *rows, _M))


@_reads(torch.inner, "inner")
def _inner(node: Node, operand: Node) -> Contraction | str | None:
    if len(node.args) != 2 or node.kwargs:
        return "its product has arguments that are not understood"
    second = _pair(*node.args, operand)
    if isinstance(second, str):
        return second
    x, weight = _ordered(*node.args, second)
    leading = _unnamed(_rank(x) - 1)
    kept: tuple[Label, ...] = tuple(f"n{i}" for i in range(_rank(weight) - 1))
    out = (*leading, *kept) if second else (*kept, *leading)
    return Contraction(x, weight, (*leading, _K), (*kept, _K), out)


@_reads(torch.tensordot)
def _tensordot(node: Node, operand: Node) -> Contraction | str | None:
    bound = arguments(node, "a", "b", "dims")
    if bound is None or "b" not in bound:
        return "its product has arguments that are not understood"
    second = _pair(bound["a"], bound["b"], operand)
    axes = _summed_axes(bound.get("dims", 2), _rank(bound["a"]))
    if isinstance(second, str) or axes is None:
        return second if isinstance(second, str) else "its product sums over no axis, or over several"
    labels: list[list[Label]] = []
    for name, axis in zip(("a", "b"), axes, strict=True):
        rank = _rank(bound[name])
        labels.append([_K if i == axis % rank else f"{name}{i}" for i in range(rank)])
    out = tuple(label for label in (*labels[0], *labels[1]) if label != _K)
    x, weight = (0, 1) if second else (1, 0)
    operands = (bound["a"], bound["b"])
    return Contraction(operands[x], operands[weight], tuple(labels[x]), tuple(labels[weight]), out)


def _summed_axes(dims: Any, rank: int) -> tuple[int, int] | None:
    """The one axis of each operand of tensordot that is summed over."""
    if dims == 1:
        return rank - 1, 0
    if isinstance(dims, (list, tuple)) and len(dims) == 2:
        first, second = ([axis] if isinstance(axis, int) else list(axis) for axis in dims)
        if len(first) == len(second) == 1:
            return first[0], second[0]
    return None


@_reads(torch.einsum)
def _einsum(node: Node, operand: Node) -> Contraction | str | None:
    equation, operands = node.args[0], list[Any](node.args[1:])
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or node.kwargs:
        return "its einsum has other than two operands"
    a, b = operands
    second = _pair(a, b, operand)
    if isinstance(second, str):
        return second
    position = 1 if second else 0
    x, weight = _ordered(a, b, second)
    read = read_equation(equation, position, _rank(x))
    return read if isinstance(read, str) else Contraction(x, weight, *read)


def read_equation(
    equation: str, position: int, rank: int
) -> tuple[tuple[Label, ...], tuple[Label, ...], tuple[Label, ...]] | str:
    """The axes of input, weight and result of an einsum of two operands; why it is not understood.

    Args:
        equation: such as "bi,oi->bo", with or without an ellipsis in the input, or a result.
        position: which operand is the weight, 0 or 1.
        rank: number of the input's dimensions.

    >>> read_equation("...i,oi->...o", 1, 3)
    ((0, 1, 'i'), ('o', 'i'), (0, 1, 'o'))
    """
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if "..." in terms[position]:
        return "its einsum has an ellipsis in the weight"
    x = _axes(terms[1 - position], rank)
    weight: tuple[Label, ...] = tuple(terms[position])
    if len(set(x)) != rank or len(x) != rank or len(set(weight)) != len(weight):
        return "its einsum repeats an axis"
    if arrow:
        return (
            x,
            weight,
            _axes(output, rank - len(terms[1 - position].replace("...", "")) + len(output.replace("...", ""))),
        )
    # Without a result: the ellipsis, then the letters that stand once, in alphabetical order.
    once = sorted(str(axis) for axis in set(x) ^ set(weight) if isinstance(axis, str))
    return x, weight, (*(axis for axis in x if isinstance(axis, int)), *once)


def _axes(term: str, rank: int) -> tuple[Label, ...]:
    """The axes of one term, an ellipsis replaced by as many numbers as the operand has axes without a letter."""
    before, dots, after = term.partition("...")
    unnamed: Sequence[Label] = range(rank - len(before) - len(after)) if dots else ()
    return (*before, *unnamed, *after)
