"""The numbers that device functions are tried with.

All there are where these are few: every code, every bfloat16 and float16, every e8m0 byte; else those where something
changes: midpoints of codes, thresholds of rules, powers of two, each with its float32 neighbours and both signs, zeros,
subnormals, NaN and Inf. Each function gives (N,) numbers and (N,) others or None; those of groups (R, S) and (R,).
"""

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from olq_fx import numerics, scales

NAN, INF = float("nan"), float("inf")


def as_bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def _around(values: Sequence[float] | Tensor) -> Tensor:
    """Float32 numbers with two neighbours on each side, and the negatives of all."""
    middle = as_bits(torch.as_tensor(values, dtype=torch.float64).abs().to(torch.float32).flatten())
    near = torch.cat([(middle + step).clamp(0, 0x7F800000) for step in (-2, -1, 0, 1, 2)]).view(torch.float32)
    return torch.cat((near, -near))


@functools.cache
def floats() -> Tensor:
    """Every bfloat16 and float16, and what lies around whatever a format or a rule decides by."""
    narrow = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    every = [narrow.view(kind).to(torch.float32) for kind in (torch.bfloat16, torch.float16)]
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    codes = torch.cat([torch.cat((values, (values[1:] + values[:-1]) / 2)) for values in (e4m3, e2m1)])
    integers = torch.arange(0, 300, dtype=torch.float64) / 2
    mantissas = (1.0, 1.25, 1.5, 1.75, 1.984375, 1.3125, 448 / 256, 2688 / 2048, 127 / 64)
    scaled = torch.tensor([math.ldexp(m, e) for m in mantissas for e in range(-149, 128)], dtype=torch.float64)
    decided = torch.tensor(
        [2.0**-114, 448.0, 464.0, 1792.0, 2688.0, 2.0**22, 3.4028234663852886e38], dtype=torch.float64
    )
    special = torch.tensor([0.0, -0.0, NAN, -NAN, INF, -INF])
    found = torch.cat((*every, *map(_around, (codes, integers, scaled, decided)), special))
    return torch.unique(as_bits(found)).view(torch.float32)


def _padded(values: Tensor, other: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """A power of two of numbers: the last one is repeated."""
    size = 1 << (len(values) - 1).bit_length()
    index = torch.arange(size).clamp(max=len(values) - 1)
    return values[index].contiguous(), None if other is None else other[index].contiguous()


def any_float() -> tuple[Tensor, None]:
    return _padded(floats())[0], None


def sizes() -> tuple[Tensor, None]:
    """What a largest size may be: not negative, NaN or Inf."""
    values = floats().abs()
    return _padded(torch.unique(as_bits(values)).view(torch.float32))[0], None


def quotients() -> tuple[Tensor, None]:
    """What is encoded: everything but NaN."""
    return _padded(floats()[~floats().isnan()])[0], None


def small() -> tuple[Tensor, None]:
    """What can be rounded to an integer: |x| < 2^22."""
    return _padded(floats()[floats().abs() < 2.0**22])[0], None


def every_int32() -> tuple[Tensor, None]:
    return as_bits(any_float()[0]), None


def every_byte() -> tuple[Tensor, None]:
    return torch.arange(256, dtype=torch.uint8), None


def nibbles() -> tuple[Tensor, None]:
    return torch.arange(16, dtype=torch.uint8), None


def written_exponents() -> tuple[Tensor, None]:
    return _padded(torch.arange(1, 256, dtype=torch.int32))[0], None


def exponents_and_sizes() -> tuple[Tensor, Tensor | None]:
    exponents = torch.arange(-3, 255, dtype=torch.int32)
    amax = torch.tensor([0.0, 1.0, 3.4028234663852886e38, INF, NAN])
    pairs = torch.cartesian_prod(exponents.double(), torch.arange(len(amax)).double()).long()
    return _padded(pairs[:, 0].to(torch.int32), amax[pairs[:, 1]])


def sizes_and_units() -> tuple[Tensor, Tensor | None]:
    """Each size over a unit near it, so that quotients are within what e4m3 has, and over three fixed units."""
    amax = sizes()[0]
    exponent = torch.randint(-10, 12, amax.shape, generator=_seeded()).float()
    near = (torch.nan_to_num(amax, 1.0, 1.0) * torch.exp2(exponent)).clamp(2.0**-126, 2.0**126)
    fixed = [torch.full_like(amax, unit) for unit in (1.0, 2.0**-126, 0.1)]
    return _padded(amax.repeat(4), torch.cat((near, *fixed)))


def _seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def group_values(size: int, count: int = 1024) -> Tensor:
    """Groups (count, size) of all kinds: ordinary, at thresholds, exact, tiny, zero, extreme, not finite."""
    normal = torch.randn(count, size, generator=_seeded(size))
    spread = torch.exp2(torch.randint(-20, 20, (count, 1), generator=_seeded(1)).float())
    found = normal * spread
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    picked = torch.randint(16, (count // 8, size), generator=_seeded(2))
    eighth = count // 8
    found[:eighth] = codes[picked] * spread[:eighth]
    found[eighth : 2 * eighth] = torch.exp2(torch.randint(-6, 4, (eighth, size), generator=_seeded(3)).float())
    found[2 * eighth : 2 * eighth + 64, 0] = _around([1.5, 1.75, 1.25, 448.0, 6.0, 3.5])[:64].abs().repeat(2)[:64] * 1e2
    found[-1], found[-2], found[-3] = 0.0, -0.0, 2.0**-149
    found[-4], found[-5] = normal[-4] * 2.0**-130, torch.sign(normal[-5]) * 3.4028234663852886e38
    found[-6, 0], found[-7, size // 2], found[-8, size - 1] = NAN, INF, -INF
    found[-9], found[-10] = 1792.0, torch.nextafter(torch.tensor(1792.0), torch.tensor(INF))
    found[-11], found[-12], found[-13] = 12.0, 1344.0, 2688.0
    return found.contiguous()


def groups_of(size: int) -> Callable[[], tuple[Tensor, Tensor | None]]:
    return lambda: (group_values(size), None)


def groups_and_exponents() -> tuple[Tensor, Tensor | None]:
    written = torch.randint(1, 254, (1024,), generator=_seeded(4), dtype=torch.int32)
    written[:256] = torch.arange(256, dtype=torch.int32).clamp(1, 253)
    written[-64:] = 255
    return group_values(32).nan_to_num(1.0, INF, -INF), written


def groups_and_divisors() -> tuple[Tensor, Tensor | None]:
    divisor = torch.rand(1024, generator=_seeded(5)) + 2.0**-126
    divisor[::7], divisor[1::7], divisor[2::7] = 0.0, NAN, 2.0**-126
    return group_values(16), divisor


def blocks_and_units() -> tuple[Tensor, Tensor | None]:
    """Blocks of nvfp4 with global scales: as rows have them, and 1, at which thresholds are whole numbers."""
    groups = group_values(16)
    largest = groups.nan_to_num(0.0, 0.0, 0.0).abs().amax(1)
    near = scales.float32_scale(
        largest * torch.exp2(torch.randint(0, 9, (1024,), generator=_seeded(6)).float()), 2688.0
    )
    near = near.nan_to_num(1.0)
    near[-16:] = 1.0
    near[:128] = 1.0
    # Blocks that 4 and 6 both represent, but for the rounding of quotients, and blocks whose scale for 4 is 448 or not.
    unit = torch.rand(1024, generator=_seeded(7)) + 0.5
    exact = torch.tensor([0.0, 3.0, 6.0, 12.0, -3.0, -6.0, -12.0])[torch.randint(7, (1024, 16), generator=_seeded(8))]
    ties, limits = exact * unit[:, None], torch.rand(1024, 16, generator=_seeded(9)) * unit[:, None] * 1792.0
    limits[:, 0] = 448.0 * (4.0 * unit)
    as_bits(limits)[:512, 0] += torch.randint(-1, 2, (512,), generator=_seeded(10), dtype=torch.int32)
    between, units = _between_four_and_six(1024)
    return torch.cat((groups, ties, limits, between)), torch.cat((near, unit, unit, units))


def _between_four_and_six(count: int) -> tuple[Tensor, Tensor]:
    """(count, 16) blocks and their global scales: pairs that differ in one bit and in whether 4 or 6 is better.

    Rounding alone decides there, so that a quotient which is not rounded correctly shows.
    """
    candidates = 64 * count
    blocks = torch.rand(candidates, 16, generator=_seeded(11)) * 2 - 1
    unit = torch.rand(candidates, generator=_seeded(12)) + 0.5
    blocks[:, 0], blocks[:, 4:] = 1.0, 0.0
    blocks *= (unit * (torch.rand(candidates, generator=_seeded(13)) * 1500 + 20))[:, None]
    low, high = torch.zeros(candidates, dtype=torch.int32), as_bits(blocks[:, 0].contiguous())
    chosen = (_is_four(blocks, unit, low) != _is_four(blocks, unit, high)).nonzero()[: count // 2, 0]
    assert len(chosen) == count // 2, "too few candidates"
    blocks, unit, low, high = blocks[chosen], unit[chosen], low[chosen], high[chosen]
    at_low = _is_four(blocks, unit, low)
    for _ in range(32):
        middle = (low + high) // 2
        same = _is_four(blocks, unit, middle) == at_low
        low, high = torch.where(same, middle, low), torch.where(same, high, middle)
    return torch.cat([_with_second(blocks, bits) for bits in (low, high)]), unit.repeat(2)


def _with_second(blocks: Tensor, bits: Tensor) -> Tensor:
    return torch.cat((blocks[:, :1], bits.view(torch.float32)[:, None], blocks[:, 2:]), 1)


def _is_four(blocks: Tensor, unit: Tensor, bits: Tensor) -> Tensor:
    """Of each block, with these bits as its second number, whether its scale has the maximum at 4."""
    groups = _with_second(blocks, bits)
    return nvfp4_scale("four_over_six")(groups, unit) != nvfp4_scale("amax")(groups, unit)


def grouped(groups: Tensor) -> tuple[Tensor, Tensor]:
    """(R, S) as numerics sees groups, and their largest sizes."""
    seen = groups[:, None, None, :]
    return seen, numerics._group_amax(seen.abs(), (1, groups.shape[1]))


def nvfp4_scale(rule: str) -> Callable[[Tensor, Tensor], Tensor]:
    def scale(groups: Tensor, unit: Tensor) -> Tensor:
        seen, amax = grouped(groups)
        wide = unit[:, None, None, None]
        found = scales.e4m3_scale(amax, wide * 6.0)
        if rule == "four_over_six":
            found = numerics._four_over_six(seen, amax, wide, found)
        return found.flatten().view(torch.uint8)

    return scale
