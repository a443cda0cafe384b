"""Functions of torch that are caught above autograd and autocast.

- Linear functions of inputs with more than two dimensions: torch would take them apart in ways that depend on strides,
  some with the bias rounded apart. Flattened first, each is one product of matrices with its bias.
- einsum, which torch turns into permutations of its operands.
- `copy_` and `.data =`, which change a weight that is pending or held by a module.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from olq_fx import torch_private
from olq_fx import weights_expert_functions as experts
from olq_fx.errors import OlqFxError, UnsupportedError
from olq_fx.weights_arrival import arrive, fill
from olq_fx.weights_products import along_k
from olq_fx.weights_stack import QuantizedStack
from olq_fx.weights_tensor import OWN_ATTRIBUTES, QuantizedWeight, overrides, root_of

_PLAIN = (Tensor, nn.Parameter)


@overrides(functional.linear)
def _linear(func: Any, input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    if is_plain(input, weight, bias):
        return _flattened(input, lambda flat: along_k(flat, weight, bias))
    if type(input) in _PLAIN and isinstance(weight, QuantizedWeight):
        _check_input(input, weight)
    if input.dim() in (0, 2) or not _is_matrix(weight) or not _same_dtype(input, bias):
        result: Tensor = func(input, weight, bias)
        return result
    return _flattened(input, lambda flat: func(flat, weight, bias))


def is_plain(input: Tensor, weight: Any, bias: Tensor | None) -> bool:
    """Whether a linear layer is the eager case: its operator, which has a gradient, can be called without detours."""
    return (
        type(input) in _PLAIN
        and not input.is_nested
        and input.layout is torch.strided
        and (bias is None or (type(bias) in _PLAIN and bias.dtype == input.dtype))
        and _is_matrix(weight)
        and not weight.spec.transposed
        and weight.pending is None
        and type(weight.codes) is Tensor
        and input.dtype == weight.dtype
        and input.dim() > 0
        and input.shape[-1] == weight.shape[-1]
        and torch_private.runs_at_once()
        and not input.is_meta
        and not torch.is_autocast_enabled(input.device.type)
    )


def _check_input(input: Tensor, weight: QuantizedWeight) -> None:
    """Refuse tensors that are no dense rows, and a call without data of a weight that has some, before either fails.

    Raises:
        UnsupportedError: `input` is nested or sparse.
        RuntimeError: it is on meta, as torch says of plain tensors.
    """
    if input.is_nested or input.layout is not torch.strided:
        kind = "nested" if input.is_nested else str(input.layout).removeprefix("torch.")
        raise UnsupportedError(
            f"a product of {weight.label}, which is quantized, with a {kind} tensor is not defined; pass a dense one "
            "(of nested ones those with layout=torch.jagged work)"
        )
    if input.is_meta and weight.pending is None:
        raise RuntimeError(f"the input is on the device meta and {weight.label} on {weight.device}")


def _same_dtype(input: Tensor, bias: Tensor | None) -> bool:
    """Whether input and bias meet in one dtype; if not, torch refuses or accepts them depending on the strides."""
    if bias is None or bias.dtype == input.dtype:
        return True
    return torch.is_autocast_enabled(input.device.type) and torch.float64 not in (input.dtype, bias.dtype)


@overrides(torch.matmul, Tensor.matmul, Tensor.__matmul__)
def _matmul(func: Any, input: Tensor, other: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if (_is_stack(input) or _is_stack(other)) and not (args or kwargs):
        return experts.matmul(input, other)
    if _is_matrix(other) and input.dim() > 2 and not (args or kwargs):
        return _flattened(input, lambda flat: torch.mm(flat, other))
    if _is_matrix(input) and other.dim() > 2 and not (args or kwargs):
        return _flattened(other.mT, lambda flat: torch.mm(flat, input.t())).mT
    result: Tensor = func(input, other, *args, **kwargs)
    return result


@overrides(Tensor.__rmatmul__)
def _rmatmul(func: Any, other: Tensor, input: Tensor) -> Any:
    return _matmul(torch.matmul, input, other)


def _is_matrix(tensor: Tensor) -> bool:
    return isinstance(tensor, QuantizedWeight) and tensor.dim() == 2


def _is_stack(tensor: Tensor) -> bool:
    return isinstance(tensor, QuantizedStack) and tensor.dim() > 2


def _flattened(x: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function of (M, K) to (..., K)."""
    if x.dim() == 2:
        return product(x)
    y: Tensor = product(x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2))
    return y.squeeze(0) if x.dim() == 1 else y.view(*x.shape[:-1], y.shape[-1])


@overrides(torch.functional.einsum)
def _einsum(func: Any, equation: str, *operands: Any) -> Any:
    """An einsum that is a linear layer of one input, as one."""
    tensors = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else list(operands)
    found = [i for i, tensor in enumerate(tensors) if isinstance(tensor, QuantizedWeight)]
    axes = None
    if isinstance(equation, str) and len(tensors) == 2 and len(found) == 1:
        if _is_stack(tensors[found[0]]):
            return _einsum_of_experts(equation, tensors[found[0]], tensors[1 - found[0]], found[0])
        axes = linear_axes(equation, found[0], tensors[1 - found[0]].dim())
    if axes is None:
        raise UnsupportedError(
            f"einsum {equation!r} is not a linear layer of one input, so {tensors[found[0]].label} cannot be used in it"
        )
    weight, x = tensors[found[0]], tensors[1 - found[0]]
    y = _linear(functional.linear, x.movedim(axes.reduced, -1), weight if axes.rows_first else weight.t())
    return y.permute(axes.order)


def _einsum_of_experts(equation: str, weight: Any, x: Tensor, position: int) -> Tensor:
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    of_weight, of_x = _spell_out(terms[position], weight.dim()), _spell_out(terms[1 - position], x.dim())
    once = [axis for axis in (*of_weight, *of_x) if [*of_weight, *of_x].count(axis) == 1]
    digits = [axis for axis in of_x if not axis.isalpha()]
    wanted = _spell_out(output, len(output.replace("...", "")) + len(digits)) if arrow else sorted(once)
    axes = experts.expert_axes(of_weight, of_x, wanted)
    if axes is None or len(of_weight) != weight.dim() or len(of_x) != x.dim():
        raise UnsupportedError(
            f"einsum {equation!r} is not a product of one input with the matrices of experts, so {weight.label} cannot "
            "be used in it"
        )
    return experts.einsum(axes, of_x, wanted, x, weight)


@dataclasses.dataclass(frozen=True, slots=True)
class EinsumAxes:
    """How an einsum is a linear layer.

    Attributes:
        reduced: the input's axis that is summed over.
        rows_first: whether the weight reads (N, K), not (K, N).
        order: the permutation from (the input's other axes, N) to the output.
    """

    reduced: int
    rows_first: bool
    order: tuple[int, ...]


def linear_axes(equation: str, position: int, rank: int) -> EinsumAxes | None:
    """Read an einsum of two operands as a linear layer; None if it is none.

    Args:
        equation: such as "bi,oi->bo", with or without an ellipsis in the input, or an output.
        position: which operand is the weight, 0 or 1.
        rank: number of the input's dimensions.

    >>> linear_axes("bi,oi->bo", 1, 2)
    EinsumAxes(reduced=1, rows_first=True, order=(0, 1))
    """
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != 2 or len(terms[position]) != 2 or "." in terms[position]:
        return None
    weight, x = terms[position], _spell_out(terms[1 - position], rank)
    reduced = set(weight) & set(x)
    others = [axis for axis in x if axis not in reduced]
    if len(reduced) != 1 or len(set(weight)) != 2 or len(x) != rank or len(set(x)) != rank:
        return None
    (k,) = reduced
    (n,) = set(weight) - reduced
    implied = [axis for axis in x if not axis.isalpha()] + sorted(axis for axis in [*others, n] if axis.isalpha())
    wanted = _spell_out(output, rank) if arrow else implied
    if sorted(wanted) != sorted([*others, n]):
        return None
    return EinsumAxes(x.index(k), weight[1] == k, tuple([*others, n].index(axis) for axis in wanted))


def _spell_out(term: str, rank: int) -> list[str]:
    """The axes of one term, an ellipsis replaced by as many digits as the input has axes without letter."""
    before, dots, after = term.partition("...")
    unnamed = [str(i) for i in range(rank - len(before) - len(after))] if dots else []
    return [*before, *unnamed, *after]


@overrides(Tensor.copy_)
def _copy_(func: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Give values to a pending weight; any other copy is one of storage."""
    if isinstance(target, QuantizedWeight) and target.pending is not None:
        root = root_of(target)
        if source.shape == target.shape or root.pending is None:
            fill(target, source)
        else:
            arrive(root, torch.empty_strided(root.shape, root.stride(), device="meta"), source)
        return target
    result: Tensor = func(target, source, non_blocking)
    return result


@overrides(Tensor.data.__set__)  # type: ignore[attr-defined]
def _set_data(func: Any, weight: QuantizedWeight, value: Tensor) -> None:
    """`weight.data = value`: the parts of another converted weight, or new values, which are converted."""
    if value.shape != weight.shape:
        raise UnsupportedError(f"{weight.label} has shape {tuple(weight.shape)}, not {tuple(value.shape)}")
    if isinstance(value, QuantizedWeight):
        func(weight, value)
        for name in (OWN_ATTRIBUTES - {"path", "was_trainable"}) & value.__dict__.keys():
            setattr(weight, name, getattr(value, name))
        if value.pending is None:
            weight.__dict__.pop("arrival", None)
        return
    with torch.no_grad():
        _copy_(Tensor.copy_, weight, value)


@overrides(
    Tensor.to,
    Tensor.type,
    Tensor.half,
    Tensor.bfloat16,
    Tensor.float,
    Tensor.double,
    Tensor.cpu,
    Tensor.cuda,
    torch.empty_like,
)
def _converted(func: Any, weight: QuantizedWeight, *args: Any, **kwargs: Any) -> Any:
    """A weight with another dtype or device; for `Module.to` and the like, such that they assign it in place."""
    result = func(weight, *args, **kwargs)
    converts = isinstance(result, QuantizedWeight) and torch_private.converts_a_module()
    if converts and isinstance(weight, nn.Parameter) and torch_private.takes_data_of(weight, result):
        result = result.like()
        result.__class__ = result.unflattened
    return result


@overrides(Tensor.share_memory_)
def _share_memory_(func: Any, weight: QuantizedWeight) -> QuantizedWeight:
    """The parts are what processes share; the tensor around them has no memory."""
    parts: tuple[Any, ...] = weight.parts
    for part in parts:
        part.share_memory_()
    return weight


@overrides(Tensor.is_shared)
def _is_shared(func: Any, weight: QuantizedWeight) -> bool:
    parts: tuple[Any, ...] = weight.parts
    return all(part.is_shared() for part in parts)


@overrides(Tensor.__dlpack__, torch.Tensor.__dlpack_device__)
def _dlpack(func: Any, weight: QuantizedWeight, *args: Any, **kwargs: Any) -> Any:
    """Refused: torch would hand out an address that is none."""
    raise UnsupportedError(f"{weight.label} is quantized and has no memory of its own; export weight.dequantize()")


@overrides(Tensor.storage)
def _storage(func: Any, weight: QuantizedWeight, *args: Any, **kwargs: Any) -> Any:
    """Refused: safetensors asks for it, and would write what is at an address that is none."""
    raise OlqFxError(
        f"{weight.label} is quantized and has no storage of its own: save the state dict of its module, which has the "
        "parts"
    )


@overrides(torch.isclose, torch.allclose, torch.quantile, Tensor.isclose, Tensor.allclose, Tensor.quantile)
def _read(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Statistics and comparisons that torch makes of arithmetic or views: of the values."""
    return func(*(x.dequantize() if isinstance(x, QuantizedWeight) else x for x in args), **kwargs)


@overrides(functional.multi_head_attention_forward)
def _attention(func: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Attention multiplies inside torch, where nothing here is asked: contiguous inputs are flattened there too."""
    packed = {id(x): x.contiguous() for x in (query, key, value)}
    return func(packed[id(query)], packed[id(key)], packed[id(value)], *args, **kwargs)
