"""Brings every linear layer of a planned weight into one form: `canonical.linear` of matrices.

    %t : "f32[32, 16]" = %weight.t()
    %y : "f32[s0, 7, 32]" = %x @ %t                                  # F.linear, addmm, einsum, mm, ... alike
->
    %flat : "f32[7*s0, 16]" = %x.flatten(0, -2)
    %z : "f32[7*s0, 32]" = canonical.linear(%flat, %weight, None)
    %y : "f32[s0, 7, 32]" = %z.reshape(s0, 7, 32)

Under autocast the input and the bias are cast first, as autocast would. Weights that are in no plan are not touched,
and neither are uses that are no linear layer: those are refused, with the reason.
"""

import dataclasses
from typing import Any, ClassVar

from torch.fx import GraphModule, Node

from olq_fx.passes import canonical
from olq_fx.passes.base import Context, PassResult
from olq_fx.passes.find_uses import WeightUses, uses_of_inputs
from olq_fx.passes.fxtools import Emitter, placeholders, replace, tensor_of
from olq_fx.passes.linear_forms import LinearUse


@dataclasses.dataclass(frozen=True, slots=True)
class Canonicalize:
    """Rewrites the linear uses of the planned weights."""

    context: Context
    name: ClassVar[str] = "canonicalize"

    def __call__(self, gm: GraphModule) -> PassResult:
        """Rewrite all uses, in rounds: what a use reads may be the result of another one, which is then a new node."""
        changed = 0
        while found := [use for uses in self._uses(gm) for use in uses.linear]:
            gone: set[Node] = set()
            for use in found:
                if gone.isdisjoint((use.node, use.x, use.bias)):
                    _rewrite(use)
                    gone.add(use.node)
            changed += len(gone)
        rejects = tuple(reject for uses in self._uses(gm) for reject in uses.others)
        return PassResult(changed, rejects)

    def _uses(self, gm: GraphModule) -> tuple[WeightUses, ...]:
        inputs = placeholders(gm)
        return uses_of_inputs(inputs[w.placeholder] for w in self.context.weights if w.placeholder in inputs)


def _rewrite(use: LinearUse) -> None:
    emit = Emitter(use.node)
    before = tensor_of(use.node)
    assert before is not None
    x = _permuted(emit, use.x, use.x_order)
    x, bias = _cast(emit, x, before.dtype), _cast(emit, use.bias, before.dtype)
    sizes = [emit.size(x, dim) for dim in range(len(use.x_order) - 1)]
    matrix = use.matrix
    y = emit.call(
        canonical.linear,
        _flattened(emit, x),
        matrix.weight,
        bias,
        transposed=matrix.transposed,
        start=matrix.start,
        stop=matrix.stop,
    )
    if len(sizes) != 1 or len(use.n_shape) != 1:
        y = emit.method("reshape", y, *sizes, *use.n_shape)
    y = _permuted(emit, y, use.out_order)
    after = tensor_of(y)
    assert after is not None
    assert (after.shape, after.dtype) == (before.shape, before.dtype), (use.node, after, before)
    if before.is_contiguous() and not after.is_contiguous():
        y = emit.method("contiguous", y)
    replace(use.node, y)


def _flattened(emit: Emitter, x: Node) -> Node:
    """(M, K) of (..., K)."""
    tensor = tensor_of(x)
    assert tensor is not None
    if tensor.dim() == 2:
        return x
    return emit.method("unsqueeze", x, 0) if tensor.dim() == 1 else emit.method("flatten", x, 0, -2)


def _permuted(emit: Emitter, x: Node, order: tuple[int, ...]) -> Node:
    return x if order == tuple(range(len(order))) else emit.method("permute", x, *order)


def _cast(emit: Emitter, x: Any, dtype: Any) -> Any:
    """The operand in the dtype of the result, which differs under autocast only."""
    tensor = tensor_of(x)
    return x if tensor is None or tensor.dtype == dtype else emit.method("to", x, dtype)
