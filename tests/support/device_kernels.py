"""Kernels that apply one device function of `olq_fx.kernels.device` or `device_scales` to given numbers."""

import triton
import triton.language as tl

from olq_fx.kernels.device import (
    LARGEST,
    decode,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    e4m3_scale,
    e8m0,
    encode,
    encode_e2m1,
    encode_e4m3,
    exponent_above,
    finite_size_bits,
    float32_scale,
    from_bits,
    group_amax,
    is_finite,
    mxfp4_exponent,
    nvfp4_reciprocal,
    over_power_of_two,
    pack,
    power_of_two,
    power_of_two_scale,
    quotient,
    round_e2m1,
    rounded,
    size_bits,
    sum_of_squares,
    unpack,
)
from olq_fx.kernels.device_scales import mx_scale, nvfp4_scale, plain_scale


@triton.jit
def elementwise_kernel(
    x, y, out, N: tl.constexpr, NAME: tl.constexpr, KEY: tl.constexpr, RULE: tl.constexpr, NATIVE: tl.constexpr
):
    """N numbers `x` (and `y`, or None). KEY: an element, a rule or a largest code, whatever the function takes."""
    at = tl.arange(0, N)
    value = tl.load(x + at)
    other = value if y is None else tl.load(y + at)
    tl.store(out + at, _elementwise(value, other, NAME, KEY, RULE, NATIVE))


@triton.jit
def _elementwise(  # noqa: C901 (one case a function)
    value, other, NAME: tl.constexpr, KEY: tl.constexpr, RULE: tl.constexpr, NATIVE: tl.constexpr
):
    if NAME == "LARGEST":
        return tl.zeros(value.shape, dtype=tl.float32) + LARGEST
    elif NAME == "size_bits":
        return size_bits(value)
    elif NAME == "from_bits":
        return from_bits(value)
    elif NAME == "finite_size_bits":
        return finite_size_bits(value)
    elif NAME == "is_finite":
        return is_finite(value).to(tl.int32)
    elif NAME == "rounded":
        return rounded(value)
    elif NAME == "float32_scale":
        return float32_scale(value, KEY)
    elif NAME == "power_of_two_scale":
        return power_of_two_scale(value, KEY)
    elif NAME == "exponent_above":
        return exponent_above(value, KEY)
    elif NAME == "mxfp4_exponent":
        return mxfp4_exponent(value, KEY)
    elif NAME == "e8m0":
        return e8m0(value, other)
    elif NAME == "power_of_two":
        return power_of_two(value)
    elif NAME == "decode_e8m0":
        return decode_e8m0(value)
    elif NAME == "e4m3_scale":
        return e4m3_scale(value, other, NATIVE)
    elif NAME == "nvfp4_reciprocal":
        return nvfp4_reciprocal(value)
    elif NAME == "encode":
        return encode(value, KEY, NATIVE)
    elif NAME == "encode_e4m3":
        return encode_e4m3(value, NATIVE)
    elif NAME == "encode_e2m1":
        return encode_e2m1(value)
    elif NAME == "round_e2m1":
        return round_e2m1(value)
    elif NAME == "decode":
        return decode(value, KEY, NATIVE)
    elif NAME == "decode_e4m3":
        return decode_e4m3(value, NATIVE)
    elif NAME == "decode_e2m1":
        return decode_e2m1(value)
    else:
        tl.static_assert(NAME == "plain_scale")
        return plain_scale(value, KEY, RULE)


@triton.jit
def groups_kernel(
    x, y, out, R: tl.constexpr, S: tl.constexpr, WIDTH: tl.constexpr, LOG: tl.constexpr, NAME: tl.constexpr,
    KEY: tl.constexpr, RULE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """(R, S) numbers `x` and (R,) numbers `y`, or None; (R, WIDTH) results, or (R,) where WIDTH is 0."""
    rows = tl.arange(0, R)
    groups = tl.load(x + rows[:, None] * S + tl.arange(0, S)[None, :])
    other = rows if y is None else tl.load(y + rows)
    result = _of_groups(groups, other, LOG, NAME, KEY, RULE, NATIVE)
    if WIDTH:
        tl.store(out + rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], result)
    else:
        tl.store(out + rows, result)


@triton.jit
def _of_groups(
    groups, other, LOG: tl.constexpr, NAME: tl.constexpr, KEY: tl.constexpr, RULE: tl.constexpr, NATIVE: tl.constexpr
):
    if NAME == "group_amax":
        return group_amax(groups)
    elif NAME == "over_power_of_two":
        return over_power_of_two(groups, other)
    elif NAME == "pack":
        return pack(groups)
    elif NAME == "unpack":
        return unpack(groups)
    elif NAME == "sum_of_squares":
        return sum_of_squares(groups, LOG)
    elif NAME == "quotient":
        return quotient(groups, other)
    elif NAME == "mx_scale":
        return mx_scale(groups, group_amax(groups), KEY, RULE, LOG)
    else:
        tl.static_assert(NAME == "nvfp4_scale")
        return nvfp4_scale(groups, group_amax(groups), other, RULE, LOG, NATIVE)
