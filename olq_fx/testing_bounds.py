"""How far a quantized value or product may lie from the exact one, derived from the formats and not tuned.

Everything here is computed in float64 from the stored parts by the definitions of the formats, without the library's
own quantizer and dequantizer, so that it can hold those to account.
"""

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from olq_fx.formats import Format

_LARGEST = {"e4m3": 448.0, "e2m1": 6.0, "int8": 127.0}
_MANTISSA_BITS = {"e4m3": 3, "e2m1": 1}
_LEAST_EXPONENT = {"e4m3": -6, "e2m1": 0}
_FLOAT32_ROUNDING = 2.0**-24
_FLOAT32_LEAST = 2.0**-149


def effective_scale(parts: Sequence[Tensor], fmt: Format, k: int) -> Tensor:
    """What a code of one is worth at each element, in float64.

    Args:
        parts: codes, scale and, in two-level formats, coarse scale, of a quantized (R, K) tensor.
        fmt: its format.
        k: K, which packed codes do not tell.

    Returns:
        (R, K) float64; NaN in a group whose scale says that it held a non-finite value.
    """
    rows = parts[0].shape[0]
    scale = _spread(_scale_values(parts[1], fmt), fmt.group, rows, k)
    if fmt.coarse is None:
        return scale
    coarse = parts[2].double()
    if fmt.name == "nvfp4":
        # Its coarse part is kept as the factor G; the rounded reciprocal g is what values are multiplied by.
        coarse = (1.0 / parts[2]).double()
    return scale * _spread(coarse, fmt.coarse, rows, k)


def _scale_values(scale: Tensor, fmt: Format) -> Tensor:
    if fmt.scale != "e8m0":
        return scale.double()
    return torch.where(scale == 255, math.nan, _power_of_two(scale.to(torch.int64) - 127))


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in float64 by its bits; `torch.ldexp` and `torch.exp2` compute it, and round."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def _spread(grid: Tensor, group: tuple[int | None, int | None], rows: int, k: int) -> Tensor:
    """Repeat each entry of a grid of scales over the elements of its group."""
    high, wide = group[0] or max(rows, 1), group[1] or max(k, 1)
    return grid.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :k]


def element_step(magnitude: Tensor, fmt: Format) -> Tensor:
    """The distance between neighbouring elements of the format at a magnitude in units of the scale, in float64."""
    if fmt.element == "int8":
        return torch.ones_like(magnitude)
    _, exponent = torch.frexp(magnitude.clamp(min=2.0**-60))
    binade = (exponent - 1).clamp(min=_LEAST_EXPONENT[fmt.element])
    return _power_of_two(binade - _MANTISSA_BITS[fmt.element])


def half_step_bound(x: Tensor, parts: Sequence[Tensor], fmt: Format) -> Tensor:
    """How far a dequantized value may be from `x`: half a step, plus the excess over the largest value of its group.

    The few roundings of float32 on the way (of the quotient, the product of two scales and the dequantized value) are
    added. Groups that hold a non-finite value have no bound (infinity).

    Args:
        x: the (R, K) tensor that was quantized.
        parts: what it became.
        fmt: the format.

    Returns:
        (R, K) float64.
    """
    scale = effective_scale(parts, fmt, x.shape[1])
    magnitude = x.double().abs()
    units = torch.where(scale > 0, magnitude / scale, 0.0).clamp(max=_LARGEST[fmt.element])
    half = element_step(units, fmt) * scale / 2
    excess = (magnitude - _LARGEST[fmt.element] * scale).clamp(min=0)
    roundings = 4 * _FLOAT32_ROUNDING * (magnitude + half) + 2 * _FLOAT32_LEAST
    bound = half + excess + roundings
    return torch.where(scale.isfinite() & magnitude.isfinite(), bound, math.inf)


@dataclasses.dataclass(frozen=True, slots=True)
class ProductInterval:
    """Between which values every element of a product may lie; both ends are in the output's dtype.

    Attributes:
        exact: (M, N) float64, the product without any rounding.
        bound: (M, N) float64, the most that float32 accumulation may be off, before the rounding to the output dtype.
        low, high: (M, N) of the output dtype.
    """

    exact: Tensor
    bound: Tensor
    low: Tensor
    high: Tensor


def product_bound(
    x: Tensor,
    w: Tensor,
    k: int | None = None,
    out_dtype: torch.dtype = torch.float32,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> ProductInterval:
    """Where `x @ w.T + bias` may lie when it is accumulated in float32 and rounded once to `out_dtype`.

    |dy| <= 2 K 2^-24 sum |x_k w_k|, the bias counting as one term more of the sum. A residual is added after the
    rounding and the sum rounded again, as the unfused pair does. Rounding is monotonic, so the two ends are rounded and
    nothing is added for it.

    Args:
        x: (M, K), the dequantized activations.
        w: (N, K), the dequantized weight.
        k: how many terms are accumulated, where that is not K (shards of a cut reduction).
        out_dtype: dtype of the product.
        bias: (N,) or None.
        residual: (M, N) or None.
    """
    left, right = x.double(), w.double()
    exact, total = left @ right.T, left.abs() @ right.abs().T
    terms = x.shape[1] if k is None else k
    if bias is not None:
        exact, total, terms = exact + bias.double(), total + bias.double().abs(), terms + 1
    bound = 2 * terms * _FLOAT32_ROUNDING * total + terms * _FLOAT32_LEAST

    def rounded(value: Tensor) -> Tensor:
        once = value.float().to(out_dtype)
        return once if residual is None else (once.float() + residual.float()).to(out_dtype)

    return ProductInterval(exact, bound, rounded(exact - bound), rounded(exact + bound))


def assert_product_close(
    actual: Tensor,
    x: Tensor,
    w: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    limit: int = 8,
) -> None:
    """Assert that `actual` is `x @ w.T + bias` within the derived bound of float32 accumulation, rounded once.

    Args:
        actual: (M, N), of the dtype that the product was rounded to.
        x: (M, K), the *dequantized* activations.
        w: (N, K), the *dequantized* weight.
        bias: (N,) or None.
        residual: (M, N) or None, added after the rounding.
        limit: how many offending elements the message shows.

    Raises:
        AssertionError: an element lies outside; the message gives coordinate, value, allowed interval and exact value.
            Where the exact product is a NaN or an infinity, so must the element be.
    """
    allowed = product_bound(x, w, None, actual.dtype, bias=bias, residual=residual)
    if actual.shape != allowed.exact.shape:
        raise AssertionError(f"shape {tuple(actual.shape)}, expected {tuple(allowed.exact.shape)}")
    value, low, high = actual.detach().double(), allowed.low.double(), allowed.high.double()
    inside = (low <= value) & (value <= high)
    nonfinite = ~allowed.exact.isfinite()
    same = (value == allowed.exact) | (value.isnan() & allowed.exact.isnan())
    outside = (~torch.where(nonfinite, same, inside)).nonzero()
    if len(outside):
        lines = [
            f"{len(outside)} of {actual.numel()} elements of a product over K = {x.shape[1]} are outside the bound"
        ]
        for row, column in outside[:limit].tolist():
            lines.append(
                f"  at ({row}, {column}): {value[row, column].item()!r}, allowed {low[row, column].item()!r} to "
                f"{high[row, column].item()!r}, exact {allowed.exact[row, column].item()!r}"
            )
        raise AssertionError("\n".join(lines))


def sqnr(actual: Tensor, reference: Tensor) -> float:
    """Signal to quantization noise in dB, in float64: 10 log10(sum reference^2 / sum (actual - reference)^2).

    Infinite where the two are equal; minus infinity where the reference is zero and `actual` is not.
    """
    wanted = reference.detach().double()
    noise = float((actual.detach().double() - wanted).square().sum())
    signal = float(wanted.square().sum())
    if noise == 0:
        return math.inf
    return -math.inf if signal == 0 else 10 * math.log10(signal / noise)


def assert_sqnr(actual: Tensor, reference: Tensor, least: float, *, name: str = "value") -> None:
    """Assert that `actual` is finite and at least `least` dB above its noise against `reference`."""
    if actual.shape != reference.shape:
        raise AssertionError(f"{name}: shape {tuple(actual.shape)}, expected {tuple(reference.shape)}")
    if not bool(actual.isfinite().all()):
        raise AssertionError(f"{name}: {int((~actual.isfinite()).sum())} of {actual.numel()} elements are not finite")
    measured = sqnr(actual, reference)
    if not measured >= least:
        raise AssertionError(f"{name}: {measured:.2f} dB, at least {least:.2f} dB expected")
