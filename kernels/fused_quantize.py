"""`fused_quantize`: what the passes make of a quantization and all that leads up to it, as one call.

    fused_quantize(body, products, tensors, format, rule, zeros=()) -> [*parts, *kept, *zeroed]

`body` names a function (`remember`): of the results of `products`, (M, N) each, and of `tensors`, to the (M, K) that is
quantized to `format` by `rule`, and after it what others read too (`kept`), each (M, K). Of `zeros` each is a number of
columns of an int32 tensor (M, columns) that the kernel sets to 0 beside its work, for a later kernel to raise (without
products only). A compiler for GPUs makes one kernel of it (`template_lowering`); what is defined here says what that
computes.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from olq_fx import numerics, torch_private
from olq_fx.formats import get_format
from olq_fx.kernels import reference

Plain = tuple[Sequence[Tensor], str, Sequence[Tensor], str, int, torch.dtype, Tensor | None, int, int, str]
"""A `Product` as the arguments of a graph's node can hold it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """Some columns of a quantized linear layer.

    Attributes:
        x: the parts of its input (M, K), or a list of one tensor; with a rule values and maxima, see `on_load`.
        activation_format: of them, "" for one in original precision.
        weight: the parts of the weight (N, K).
        weight_format: of them.
        k: K.
        dtype: of the result.
        bias: (N,) or None.
        first, columns: which of its columns are wanted.
        rule: of scales, where values are quantized as they are loaded; else "".
    """

    x: Any
    activation_format: str
    weight: Any
    weight_format: str
    k: int
    dtype: torch.dtype
    bias: Any
    first: int
    columns: int
    rule: str = ""

    @property
    def plain(self) -> Plain:
        """As the arguments of a graph's node can hold it."""
        found: Any = tuple(getattr(self, field.name) for field in dataclasses.fields(self))
        plain: Plain = found
        return plain

    @property
    def computed(self) -> Tensor:
        """(M, columns), of tensors."""
        args = (self.x, self.activation_format, self.weight, self.weight_format, self.k, self.dtype, self.bias, None)
        if self.rule:
            whole = torch.ops.olq_fx.linear_on_load.default(*args, self.rule)
        else:
            whole = torch.ops.olq_fx.quantized_linear.default(*args)
        # The operator itself: Python's brackets ask for the device, which need not be there while code is made for it.
        found: Tensor = torch.ops.aten.slice.Tensor(whole, 1, self.first, self.first + self.columns)
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """Something that is computed of every element.

    Attributes:
        graph: on scalars, with one result: see `Body.inputs` for what it takes.
        reduction: which is taken of it along its row: `mean`, `sum`, `amax` or `moments` (variance and mean); "" for
            what is quantized or kept.
        dtype: that the reduction has; of others float32.
    """

    graph: Callable[..., Any]
    reduction: str
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True, slots=True)
class Body:
    """What is computed before a quantization.

    Attributes:
        function: of products and tensors to the matrix that is quantized, and what is kept.
        stages: the same, element by element: its reductions in order, then what is quantized, then what is kept.
        inputs: what each stage takes, by name: `y0` (a product), `m` and `n` (row and column), `m_8` (the row divided
            by 8), `r0` (what a stage was reduced to), `r0_mean` (its mean, where its variance is r0), `t0` (a tensor).
        columns: of the matrix.
        kept: dtypes of what is kept.
        tall: the number of a tensor that has all rows; -1 where products have them.
        dtype: of the matrix.
    """

    function: Callable[..., Any]
    stages: tuple[Stage, ...]
    inputs: tuple[str, ...]
    columns: int
    kept: tuple[torch.dtype, ...]
    tall: int
    dtype: torch.dtype


_BODIES: dict[str, Body] = {}
"""Bodies by name. The name is made of what is in the graph: equal layers share one, in every process the same."""


def remember(name: str, body: Body) -> str:
    """Let the operator be called with a body by its name."""
    _BODIES.setdefault(name, body)
    return name


def body_of(name: str) -> Body:
    """The body of that name."""
    return _BODIES[name]


class FusedQuantize(torch_private.HigherOrderOperator):
    """The operator; see the head of this file."""

    def __init__(self) -> None:
        """Register it."""
        super().__init__("olq_fx_fused_quantize", cacheable=True)  # type: ignore[no-untyped-call]

    def __call__(
        self,
        body: str,
        products: Sequence[Plain],
        tensors: Sequence[Tensor],
        format: str,
        rule: str,
        zeros: Sequence[int] = (),
    ) -> Any:
        """The parts, what is kept, and zeros."""
        return super().__call__(body, products, tensors, format, rule, zeros)  # type: ignore[no-untyped-call]


def _computed(
    body: str,
    products: Sequence[Plain],
    tensors: Sequence[Tensor],
    format: str,
    rule: str,
    zeros: Sequence[int] = (),
) -> Any:
    whole, *kept = _values(body, products, tensors)
    return [*reference.quantize(whole, format, rule), *kept, *_zeroed(whole, zeros)]


def _values(body: str, products: Sequence[Plain], tensors: Sequence[Tensor]) -> Any:
    return body_of(body).function(*(Product(*each).computed for each in products), *tensors)


def _zeroed(like: Tensor, zeros: Sequence[int]) -> list[Tensor]:
    return [like.new_zeros((like.shape[0], columns), dtype=torch.int32) for columns in zeros]


def _shapes(
    body: str,
    products: Sequence[Plain],
    tensors: Sequence[Tensor],
    format: str,
    rule: str,
    zeros: Sequence[int] = (),
) -> Any:
    whole, *kept = _values(body, products, tensors)
    specs = numerics.part_specs(get_format(format), *whole.shape)
    parts = [whole.new_empty(spec.shape, dtype=spec.dtype) for spec in specs]
    return [*parts, *kept, *_zeroed(whole, zeros)]


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 values after a cast to `dtype` and back: a word of stages, which compilers keep."""
    return x.to(dtype).to(torch.float32)


_LIBRARY: Any = torch.library.Library("olq_fx", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("rounded(Tensor x, ScalarType dtype) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("rounded", _rounded, "CompositeExplicitAutograd")

fused_quantize = FusedQuantize()
torch_private.implement_higher_order(fused_quantize, _computed, _shapes)


def prepare() -> None:
    """Tell Inductor how the operator is lowered, where Triton is there to compile it."""
    if importlib.util.find_spec("triton") is not None:
        from olq_fx.kernels import on_load_lowering, template_lowering

        template_lowering.register()
        on_load_lowering.register()
