"""The definition of every format in pure PyTorch: `quantize`, `dequantize`, and the shapes of the parts.

Every kernel is held to these functions bit by bit. Tensors are 2-D, (R, K) with the reduction axis last. Everything
traces (make_fx, Dynamo, Inductor): no branch on data, no write to an input; R may be symbolic or 0, while K, which
belongs to the layer, is taken as the number it is. Group statistics and scales are float32, taken from the original
values; codes are true quotients.

Inside, a tensor is seen as (a, r, b, c): `a x b` groups of `r x c` elements, so that a scale has shape (a, 1, b, 1).

Choices where the formats leave one:
- A group of `mxfp4_dualscale` with a NaN or an Inf is marked as one of nvfp4 is: its e8m0 byte is 255, while the
  coarse scale is taken over the finite values and the other groups keep theirs.
- A product of code and scales beyond the range of float32 dequantizes to the largest float32, not to Inf. (The
  largest inputs round up to 2^128 in some formats.) So finite inputs have finite values, and the half-step bound
  holds for them too.
- Sums of squared errors (`mse`, `four_over_six`) add the halves of the group: the squares of elements i and i + n/2,
  then again with n halved, down to one. This order is part of the format's definition; no multiplication is
  contracted with an addition.
"""

import dataclasses

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn import functional

from olq_fx import elements, scales
from olq_fx.errors import ConfigurationError, ConversionError, nearest
from olq_fx.formats import Format, Group

Parts = tuple[Tensor, ...]
"""(codes, scale), or (codes, scale, coarse) of a two-level format; scales are 2-D grids. See `part_specs`."""

_LARGEST = torch.finfo(torch.float32).max

_SCALE_DTYPE = {"float32": torch.float32, "e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn}


@dataclasses.dataclass(frozen=True, slots=True)
class PartSpec:
    """What one part of a quantized tensor is: `codes`, `scale` or `coarse`, with its shape and dtype."""

    name: str
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """The size of the part's data."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize


def part_specs(format: Format, rows: int, k: int) -> tuple[PartSpec, ...]:
    """The parts of an (rows, k) tensor in `format`, in the order in which `quantize` returns them.

    >>> from olq_fx.formats import FORMATS
    >>> [(p.name, p.shape) for p in part_specs(FORMATS["nvfp4"], 8, 33)]
    [('codes', (8, 17)), ('scale', (8, 3)), ('coarse', (1, 1))]
    """
    columns = _ceil_div(k, 2) if format.packed else k
    parts = [
        PartSpec("codes", (rows, columns), elements.CODE_DTYPE[format.element]),
        PartSpec("scale", _grid(format.group, rows, k), _SCALE_DTYPE[format.scale]),
    ]
    if format.coarse is not None:
        parts.append(PartSpec("coarse", _grid(format.coarse, rows, k), torch.float32))
    return tuple(parts)


def quantized_bytes(format: Format, rows: int, k: int) -> int:
    """How many bytes an (rows, k) tensor takes in `format`: codes and all scales."""
    return sum(part.bytes for part in part_specs(format, rows, k))


def quantize(x: Tensor, format: Format, rule: str) -> Parts:
    """Quantize `x`, group by group.

    Args:
        x: (R, K) of any floating dtype. What is wider than float32 is rounded to float32 first.
        format: how to store it.
        rule: one of `format.rules`, by which the scales are chosen.

    Returns:
        The parts that `part_specs(format, R, K)` lists. A group that holds a NaN or an Inf has a NaN scale and codes
        0. A global scale of a whole tensor is stored as its reciprocal, as compressed-tensors does; all others as
        they are.

    Raises:
        ConversionError: `x` is not a 2-D tensor of a floating dtype.
        ConfigurationError: the format has no such rule.
    """
    if x.dim() != 2 or not x.is_floating_point():
        raise ConversionError(f"{format.name} quantizes a 2-D floating tensor, not {x.dtype} of shape {tuple(x.shape)}")
    if rule not in format.rules:
        raise ConfigurationError(f"{format.name} has no scale rule {rule!r}; {nearest(rule, format.rules)}")
    rows, k = x.shape[0], int(x.shape[1])
    if k == 0:
        # Nothing to take a maximum of: the scales are those of zeros, as many of them as the grids of an empty tensor
        # have.
        parts = quantize(x.new_zeros(rows, 1), format, rule)
        return tuple(part[:, : spec.shape[1]] for part, spec in zip(parts, part_specs(format, rows, 0), strict=True))
    grouped = _split(x.to(torch.float32), format.group)
    sizes = grouped.abs()
    amax = _group_amax(sizes, format.group)
    if format.scale == "float32":
        divisor = _float32_scale(amax, format, rule)
        return _codes(grouped, divisor, format, rows, k), _to_grid(divisor)
    if format.coarse is None:
        return _quantize_mx(grouped, amax, format, rule, rows, k)
    largest = _coarse_amax(_to_grid(_group_amax(_finite(sizes), format.group)), format)
    if format.scale == "e8m0":
        return _quantize_dualscale(grouped, amax, largest, format, rule, rows, k)
    return _quantize_nvfp4(grouped, amax, largest, format, rule, rows, k)


def dequantize(parts: Parts, format: Format, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The (R, k) values that `parts` stand for, computed in float32 and rounded once to `dtype`.

    Every multiplication by a scale is rounded to float32, the group's own scale first. Non-finite groups give NaN.
    """
    codes, scale = parts[0], parts[1]
    values = elements.decode(elements.unpack(codes, k) if format.packed else codes, format.element)
    decoded = scales.decode_e8m0(scale) if format.scale == "e8m0" else scale.to(torch.float32)
    product = _split(values, format.group) * _from_grid(decoded)
    if format.coarse is not None:
        product = product * _from_grid(_spread(_coarse_factor(parts[2], format), format, decoded.shape[1]))
    return _join(product.clamp(-_LARGEST, _LARGEST), format.group, codes.shape[0], k).to(dtype)


def _quantize_mx(grouped: Tensor, amax: Tensor, format: Format, rule: str, rows: int, k: int) -> Parts:
    written = _e8m0(grouped, amax, format, rule).to(torch.uint8)
    return _codes(grouped, _power_of_two(written), format, rows, k), _to_grid(written)


def _quantize_dualscale(
    grouped: Tensor, amax: Tensor, largest: Tensor, format: Format, rule: str, rows: int, k: int
) -> Parts:
    coarse = scales.float32_scale(largest, elements.ELEMENT_MAX[format.element])
    unit = _from_grid(_spread(coarse, format, amax.shape[2]))
    # Division is monotonic, rounding included: the maximum of the quotients is the quotient of the maximum.
    scaled = grouped / unit
    written = _e8m0(scaled, amax / unit, format, rule).to(torch.uint8)
    return _codes(scaled, _power_of_two(written), format, rows, k), _to_grid(written), coarse


def _quantize_nvfp4(
    grouped: Tensor, amax: Tensor, largest: Tensor, format: Format, rule: str, rows: int, k: int
) -> Parts:
    if _stores_reciprocal(format):
        coarse = scales.nvfp4_reciprocal(largest)
    else:
        coarse = scales.float32_scale(largest, scales.NVFP4_RANGE)
    unit = _from_grid(_coarse_factor(coarse, format))
    scale = scales.e4m3_scale(amax, unit * 6.0)
    if rule == "four_over_six":
        scale = _four_over_six(grouped, amax, unit, scale)
    return _codes(grouped, scale.to(torch.float32) * unit, format, rows, k), _to_grid(scale), coarse


def _float32_scale(amax: Tensor, format: Format, rule: str) -> Tensor:
    largest = elements.ELEMENT_MAX[format.element]
    if rule == "power_of_two":
        return scales.power_of_two_scale(amax, largest)
    return scales.float32_scale(amax, largest)


def _e8m0(grouped: Tensor, amax: Tensor, format: Format, rule: str) -> Tensor:
    """The e8m0 scales of the groups, in int32; by `mse` the better of the exponent of `floor` and the one above."""
    if format.element == "e4m3":
        return scales.e8m0(scales.exponent_above(amax, elements.ELEMENT_MAX["e4m3"]), amax)
    exponent = scales.mxfp4_exponent(amax, rule)
    if rule == "mse":
        scaled = grouped / scales.power_of_two(scales.e8m0(exponent, amax))
        at_floor = _sum_of_squares(scaled - elements.round_e2m1(scaled))
        one_above = _sum_of_squares(scaled - elements.round_e2m1(scaled * 0.5) * 2.0)
        exponent = exponent + (one_above < at_floor).to(torch.int32)
    return scales.e8m0(exponent, amax)


def _power_of_two(written: Tensor) -> Tensor:
    """The float32 scale of a stored byte: a compiler that stores that need not store the int32 before it too."""
    return scales.power_of_two(written.to(torch.int32))


def _four_over_six(grouped: Tensor, amax: Tensor, unit: Tensor, scale_for_6: Tensor) -> Tensor:
    """The better e4m3 scale of each block: with its maximum at 6 or at 4, by the squared error of x / (6 g).

    In units of 6 g the value of a code is `code x s / 6`. A block keeps 6 on a tie, and where `amax / (4 g)` exceeds
    448 before it is rounded. (So a block with 448 for 4 may get 6 when its values are quantized again: their quotient
    may round to just above 448.)
    """
    scale_for_4 = scales.e4m3_scale(amax, unit * 4.0)
    scaled = grouped / (unit * 6.0)

    def error(scale: Tensor) -> Tensor:
        decoded = scale.to(torch.float32)
        values = elements.round_e2m1(_quotient(grouped, decoded * unit)) * decoded
        return _sum_of_squares(scaled - scales.divided(values, 6.0))

    better = (error(scale_for_4) < error(scale_for_6)) & (amax / (unit * 4.0) <= scales.E4M3_SCALE_MAX)
    # Chosen as float32: torch has no `where` for float8 on every device.
    return torch.where(better, scale_for_4.to(torch.float32), scale_for_6.to(torch.float32)).to(torch.float8_e4m3fn)


def _sum_of_squares(errors: Tensor) -> Tensor:
    """(a, r, b, c) to (a, r, b, 1), c a power of two, in the order that the head of this file defines."""
    total = errors * errors
    while (width := total.shape[-1]) > 1:
        total = total[..., : width // 2] + total[..., width // 2 :]
    return total


def _codes(grouped: Tensor, divisor: Tensor, format: Format, rows: int, k: int) -> Tensor:
    codes = _join(elements.encode(_quotient(grouped, divisor), format.element), format.group, rows, k)
    return elements.pack(codes) if format.packed else codes


def _quotient(grouped: Tensor, divisor: Tensor) -> Tensor:
    """`grouped / divisor`, and 0 where the divisor is NaN (a non-finite group) or 0 (a block of zeros)."""
    return torch.where(divisor > 0.0, grouped / divisor, 0.0)


def _finite(sizes: Tensor) -> Tensor:
    return torch.where(scales.finite(sizes), sizes, 0.0)


def _group_amax(sizes: Tensor, group: Group) -> Tensor:
    """The maximum of each group of (a, r, b, c), not negative, as (a, 1, b, 1); NaN where the group holds one."""
    by_row = sizes.amax(3, keepdim=True)
    return by_row if group[0] == 1 else _amax_of_rows(by_row, group)


def _amax_of_rows(sizes: Tensor, group: Group) -> Tensor:
    """The maximum over r; 0 for a tensor without rows, hence one row of zeros more where r is the whole axis."""
    if group[0] is None:
        sizes = functional.pad(sizes, (0, 0, 0, 0, 0, 1))
    return sizes.amax(1, keepdim=True)


def _coarse_amax(largest: Tensor, format: Format) -> Tensor:
    """The maximum of each coarse group, from the (R, b) maxima of the groups; the last one of a row may be shorter."""
    rows, columns = _coarse_group(format)
    return _to_grid(_group_amax(_split(largest, (rows, columns)), (rows, columns)))


def _coarse_group(format: Format) -> Group:
    """The coarse group, counted in groups; all groups of two-level formats are of one row."""
    assert format.coarse is not None
    assert format.group[1] is not None
    rows, columns = format.coarse
    return rows, None if columns is None else columns // format.group[1]


def _coarse_factor(coarse: Tensor, format: Format) -> Tensor:
    return scales.constant(1.0, coarse) / coarse if _stores_reciprocal(format) else coarse


def _stores_reciprocal(format: Format) -> bool:
    """A whole tensor's scale above block scales (nvfp4 weights) is kept as compressed-tensors does: G = 1 / g."""
    return format.coarse == (None, None)


def _spread(coarse: Tensor, format: Format, columns: int) -> Tensor:
    """One coarse scale for each of the `columns` groups of a row; one column is left to broadcasting."""
    _, span = _coarse_group(format)
    if span is None:
        return coarse
    spread = repeat(coarse, "r b -> r (b n)", n=span)
    return spread if columns % span == 0 else _cut(spread, coarse.shape[0], columns)


def _split(x: Tensor, group: Group) -> Tensor:
    """(R, K) to (a, r, b, c), padded with zeros up to whole groups where R or K is none."""
    below, right = _padding(x.shape[0], group[0]), _padding(int(x.shape[1]), group[1])
    if not (_is_none(below) and _is_none(right)):
        x = functional.pad(x, (0, right, 0, below))
    rows, columns = group
    lengths = {"a" if rows is None else "r": rows or 1, "b" if columns is None else "c": columns or 1}
    return rearrange(x, "(a r) (b c) -> a r b c", **lengths)


def _join(grouped: Tensor, group: Group, rows: int, k: int) -> Tensor:
    """The inverse of `_split`: (a, r, b, c) to (R, K), without the padding."""
    joined = rearrange(grouped, "a r b c -> (a r) (b c)")
    whole = _is_none(_padding(rows, group[0])) and _is_none(_padding(k, group[1]))
    return joined.contiguous() if whole else _cut(joined, rows, k)


def _cut(padded: Tensor, rows: int, k: int) -> Tensor:
    """The first (rows, k) of a padded tensor, in memory of its own.

    By strides, which Inductor takes from a buffer that is written whole. A slice it would fuse: an index of a scale,
    `column // group`, then meets a number of columns that is no multiple of the group, and the loop split of its C++
    backend leaves the last columns unwritten (pytorch issue 195582, torch 2.11 to 2.14).
    """
    return padded.contiguous().as_strided((rows, k), (padded.shape[1], 1)).contiguous()


def _padding(length: int, size: int | None) -> int:
    """How much is missing to whole groups; none where a group is one long or the whole axis."""
    return 0 if size is None or size == 1 else -length % size


def _is_none(padding: int) -> bool:
    # A symbolic number is no `int`: it pads always, so that a traced graph holds for every length.
    return isinstance(padding, int) and padding == 0


def _to_grid(scale: Tensor) -> Tensor:
    return rearrange(scale, "a 1 b 1 -> a b")


def _from_grid(scale: Tensor) -> Tensor:
    return rearrange(scale, "a b -> a 1 b 1")


def _grid(group: Group, rows: int, k: int) -> tuple[int, int]:
    height = 1 if group[0] is None else _ceil_div(rows, group[0])
    width = 1 if group[1] is None else _ceil_div(k, group[1])
    return height, width


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)
