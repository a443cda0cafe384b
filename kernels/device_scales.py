"""The scales of a tile of groups, by every rule, as functions of Triton's language.

On top of `olq_fx.kernels.device`; the rules themselves are those of `olq_fx.numerics`.
"""

import triton
import triton.language as tl

from olq_fx.kernels.device import (
    E4M3_MAX,
    decode_e4m3,
    e4m3_scale,
    e8m0,
    exponent_above,
    float32_scale,
    mxfp4_exponent,
    over_power_of_two,
    power_of_two_scale,
    quotient,
    round_e2m1,
    sum_of_squares,
)


@triton.jit
def plain_scale(amax, ELEMENT: tl.constexpr, RULE: tl.constexpr):
    """The float32 scale of groups whose largest size is `amax`."""
    LARGEST: tl.constexpr = 448.0 if ELEMENT == "e4m3" else 127.0
    if RULE == "power_of_two":
        return power_of_two_scale(amax, LARGEST)
    else:
        return float32_scale(amax, LARGEST)


@triton.jit
def mx_scale(groups, amax, ELEMENT: tl.constexpr, RULE: tl.constexpr, LOG: tl.constexpr):
    """(R, 2^LOG) values and (R,) sizes to the e8m0 scales, int32 from 1 to 255."""
    if ELEMENT == "e4m3":
        exponent = exponent_above(amax, E4M3_MAX)
    else:
        exponent = mxfp4_exponent(amax, RULE)
        if RULE == "mse":
            exponent = exponent + _one_above_is_better(groups, exponent, amax, LOG)
    return e8m0(exponent, amax)


@triton.jit
def _one_above_is_better(groups, exponent, amax, LOG: tl.constexpr):
    """1 where the next exponent has the smaller sum of squared errors, else 0."""
    scaled = over_power_of_two(groups, e8m0(exponent, amax))
    at_floor = sum_of_squares(scaled - round_e2m1(scaled), LOG)
    one_above = sum_of_squares(scaled - round_e2m1(scaled * 0.5) * 2.0, LOG)
    return (one_above < at_floor).to(tl.int32)


@triton.jit
def nvfp4_scale(groups, amax, unit, RULE: tl.constexpr, LOG: tl.constexpr, NATIVE: tl.constexpr):
    """(R, 2^LOG) values, (R,) sizes and global scales to the e4m3 bytes of the blocks."""
    for_6 = e4m3_scale(amax, unit * 6.0, NATIVE)
    if RULE == "four_over_six":
        for_4 = e4m3_scale(amax, unit * 4.0, NATIVE)
        scaled = tl.div_rn(groups, tl.broadcast_to((unit * 6.0)[:, None], groups.shape))
        smaller = _nvfp4_error(groups, scaled, for_4, unit, LOG, NATIVE) < _nvfp4_error(
            groups, scaled, for_6, unit, LOG, NATIVE
        )
        return tl.where(smaller & (tl.div_rn(amax, unit * 4.0) <= E4M3_MAX), for_4, for_6)
    else:
        return for_6


@triton.jit
def _nvfp4_error(groups, scaled, scale, unit, LOG: tl.constexpr, NATIVE: tl.constexpr):
    """The squared error in units of 6 g, in which the value of a code is code x s / 6."""
    decoded = decode_e4m3(scale, NATIVE)
    values = round_e2m1(quotient(groups, decoded * unit)) * decoded[:, None]
    sixth = tl.div_rn(values, tl.full(values.shape, 6.0, tl.float32))
    return sum_of_squares(scaled - sixth, LOG)
