"""Draws of what stands before a quantized layer, and the bounds within which two devices may differ there."""

import dataclasses

import torch
from hypothesis import strategies as st
from torch import Tensor

from olq_fx.formats import FORMATS, block_formats, get_format
from olq_fx.kernels.producers import ACTIVATIONS, Activation, Norm
from olq_fx.testing import FLOAT_DTYPES, tensors

FORMAT_NAMES = [
    *(name for name, found in FORMATS.items() if found.activation),
    block_formats(128, 32)[1],
    block_formats(128, 64)[1],
]
PAIRS = [(name, rule) for name in FORMAT_NAMES for rule in get_format(name).rules]


@dataclasses.dataclass(frozen=True)
class NormCase:
    """The arguments of `normalize`."""

    norm: Norm
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    dtype: torch.dtype | None

    @property
    def operands(self) -> tuple[Tensor | None, ...]:
        return self.weight, self.bias, self.residual


@st.composite
def norm_cases(draw: st.DrawFn, columns: tuple[int, int] = (1, 600)) -> NormCase:
    """Norms over rows of every kind, with and without weight, bias, residual."""
    rows, k = draw(st.integers(0, 9)), draw(st.integers(*columns))

    def drawn(rows: int, nonfinite: bool = False) -> Tensor:
        return draw(tensors(rows=(rows, rows), columns=(k, k), nonfinite=nonfinite))

    norm = Norm(draw(st.sampled_from([1e-6, 1e-5, 0.0])), layer=draw(st.booleans()), rounds_twice=draw(st.booleans()))
    weight, bias = (drawn(1)[0].contiguous() if draw(st.booleans()) else None for _ in range(2))
    residual = drawn(rows) if draw(st.booleans()) else None
    return NormCase(norm, drawn(rows, draw(st.booleans())), weight, bias, residual, draw(st.none() | _DTYPES))


_DTYPES = st.sampled_from(FLOAT_DTYPES)


@st.composite
def activation_cases(draw: st.DrawFn, columns: tuple[int, int] = (1, 600)) -> tuple[Activation, tuple[Tensor, ...]]:
    """Activations of one tensor, of two, and of a merged one."""
    rows, k, dtype = draw(st.integers(0, 9)), draw(st.integers(*columns)), draw(_DTYPES)
    merged = draw(st.sampled_from([None, "paired", "interleaved"]))
    count, width = (1, 2 * k) if merged else (draw(st.integers(1, 2)), k)
    shape = {"rows": (rows, rows), "columns": (width, width), "dtypes": [dtype]}
    inputs = tuple(draw(tensors(**shape, nonfinite=draw(st.booleans()))) for _ in range(count))
    return Activation(draw(st.sampled_from(ACTIVATIONS)), merged), inputs


def step(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The spacing of `dtype` at finite values, in float64."""
    about = torch.finfo(dtype)
    size = value.double().abs().clamp(min=about.smallest_normal)
    return about.eps * torch.exp2((torch.frexp(size).exponent - 1).double())


def cancelled(x: Tensor, kind: str) -> Tensor:
    """How far two evaluations of an activation may be apart where PyTorch's formula cancels, in float64."""
    return x.double().abs() * (2.0**-22 if kind.startswith("gelu") else 0.0)


def norm_slack(case: NormCase) -> Tensor:
    """How far two float32 evaluations of a norm may be apart before they are rounded, in float64.

    With the error of a sum of K terms, g = K 2^-24 relative to the sum of sizes, a mean and so a distance d from it is
    wrong by at most e = g max|x|. With r = 1 / sqrt(var + eps), (mean of |d|) r <= 1, so r is wrong by at most
    r (r e + g) and d r w + b by at most r |w| e (1 + |d| r) + g (|d r w| + |b|); both evaluations may be.
    """
    stream = (case.x if case.residual is None else case.x + case.residual).double()
    k = stream.shape[1]
    g = (k + 8) * 2.0**-24
    distance = stream - stream.mean(1, keepdim=True) if case.norm.layer else stream
    root = 1 / (distance.square().mean(1, keepdim=True) + case.norm.eps).sqrt()
    weight = torch.ones(k, dtype=torch.float64) if case.weight is None else case.weight.double().abs()
    bias = torch.zeros(k, dtype=torch.float64) if case.bias is None else case.bias.double().abs()
    error = g * stream.abs().amax(1, keepdim=True) if case.norm.layer else 0.0
    scaled = distance.abs() * root
    return 2 * (root * weight * error * (1 + scaled) + g * (scaled * weight + bias))
