"""The numerics as functions of Triton's language: one source for kernels and for templates of Inductor.

Each does on tiles what its namesake in `olq_fx.elements`, `olq_fx.scales` or `olq_fx.numerics` does on tensors, with
the same bits. Tiles of values are float32; a tile of groups has shape (R, S): R groups of S elements each.

Two things are left to who launches a kernel of these: products must not be contracted with sums
(`enable_fp_fusion=False`), and NATIVE says whether the GPU casts to float8 (sm_89 and later).
"""

import triton
import triton.language as tl

FLOOR = tl.constexpr(2.0**-126)
E4M3_MAX = tl.constexpr(448.0)
NVFP4_RANGE = tl.constexpr(2688.0)
LARGEST = tl.constexpr(3.4028234663852886e38)
E8M0_NAN = tl.constexpr(255)

_SIGN = tl.constexpr(-0x80000000)
_SIZE = tl.constexpr(0x7FFFFFFF)
_NAN_BITS = tl.constexpr(0x7FC00000)
_CARRY_ANY = tl.constexpr((1 << 23) - 1)
_CARRY_EVEN = tl.constexpr(1 << 21)
_CARRY_CEIL = tl.constexpr((1 << 22) - 1)
# Added to a float32 of a size below 2^22 and taken away again, it leaves the nearest integer, ties to even.
_ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def size_bits(x):
    """The bits of |x| as int32, whose order is that of the sizes; above them Inf, and above that NaN."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & _SIZE


@triton.jit
def from_bits(bits):
    """The float32 whose bits an int32 has."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def finite_size_bits(x):
    """`size_bits`, and 0 for NaN and Inf."""
    bits = size_bits(x)
    return tl.where(bits < 0x7F800000, bits, 0)


@triton.jit
def group_amax(groups):
    """(R, S) to the largest size of each group, (R,): NaN if it holds one. (`tl.max` of floats drops NaN.)"""
    return from_bits(tl.max(size_bits(groups), axis=1))


@triton.jit
def is_finite(amax):
    """Of a size: whether it is a number."""
    return amax < float("inf")


@triton.jit
def rounded(x):
    """The nearest integer, ties to even, of |x| < 2^22; never a negative zero."""
    return (x + _ROUNDER) - _ROUNDER


@triton.jit
def float32_scale(amax, LARGEST_CODE: tl.constexpr):
    """`scales.float32_scale`."""
    scale = tl.maximum(tl.div_rn(amax, tl.full(amax.shape, LARGEST_CODE, tl.float32)), FLOOR)
    return tl.where(is_finite(amax), scale, float("nan"))


@triton.jit
def power_of_two_scale(amax, LARGEST_CODE: tl.constexpr):
    """`scales.power_of_two_scale`."""
    return power_of_two(e8m0(exponent_above(amax, LARGEST_CODE), amax))


@triton.jit
def exponent_above(amax, LARGEST_CODE: tl.constexpr):
    """`scales.exponent_above`."""
    quotient = tl.div_rn(amax, tl.full(amax.shape, LARGEST_CODE, tl.float32))
    return _exponent(quotient, _CARRY_ANY)


@triton.jit
def mxfp4_exponent(amax, RULE: tl.constexpr):
    """`scales.mxfp4_exponent`; `mse` starts from `floor`."""
    if RULE == "even":
        return _exponent(amax, _CARRY_EVEN) - 2
    elif RULE == "ceil":
        return _exponent(amax, _CARRY_CEIL) - 2
    else:
        return _exponent(amax, 0) - 2


@triton.jit
def _exponent(value, CARRY: tl.constexpr):
    return (value.to(tl.int32, bitcast=True) + CARRY) >> 23


@triton.jit
def e8m0(exponent, amax):
    """`scales.e8m0`: int32."""
    return tl.where(is_finite(amax), tl.maximum(exponent, 1), E8M0_NAN)


@triton.jit
def power_of_two(written):
    """`scales.power_of_two` of an int32 from 1 to 255."""
    return from_bits(tl.where(written == E8M0_NAN, _NAN_BITS, written << 23))


@triton.jit
def over_power_of_two(groups, written):
    """(R, S) over the powers of two that (R,) int32 stand for, by an exact product; 0 where that is 255."""
    inverse = from_bits((254 - written) << 23)
    return tl.where((written == E8M0_NAN)[:, None], 0.0, groups * inverse[:, None])


@triton.jit
def decode_e8m0(byte):
    """`scales.decode_e8m0` of any byte, 0 being 2^-127."""
    wide = byte.to(tl.int32)
    return tl.where(wide == 0, from_bits(tl.full(wide.shape, 0x00400000, tl.int32)), power_of_two(wide))


@triton.jit
def e4m3_scale(amax, unit, NATIVE: tl.constexpr):
    """`scales.e4m3_scale`: the bytes."""
    return tl.where(is_finite(amax), encode_e4m3(tl.div_rn(amax, unit), NATIVE), 0x7F).to(tl.uint8)


@triton.jit
def nvfp4_reciprocal(amax):
    """`scales.nvfp4_reciprocal`."""
    reciprocal = tl.div_rn(tl.full(amax.shape, NVFP4_RANGE, tl.float32), amax)
    return tl.where(is_finite(reciprocal), reciprocal, 1.0)


@triton.jit
def encode(quotient, ELEMENT: tl.constexpr, NATIVE: tl.constexpr):
    """`elements.encode`: one code a byte (int8 as its bits)."""
    if ELEMENT == "e4m3":
        return encode_e4m3(quotient, NATIVE)
    elif ELEMENT == "e2m1":
        return encode_e2m1(quotient)
    else:
        code = rounded(tl.minimum(tl.maximum(quotient, -127.0), 127.0))
        return (code.to(tl.int32) & 0xFF).to(tl.uint8)


@triton.jit
def encode_e4m3(quotient, NATIVE: tl.constexpr):
    """The byte of the nearest float8_e4m3fn, saturating, ties to even, the sign of zero kept; not of NaN."""
    clamped = tl.minimum(tl.maximum(quotient, -E4M3_MAX), E4M3_MAX)
    if NATIVE:
        return clamped.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = clamped.to(tl.int32, bitcast=True)
        size = bits & _SIZE
        # Twenty bits of the mantissa go; the exponent's bias goes from 127 to 7.
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 codes are multiples of 2^-9; the eighth is the first normal one.
        subnormal = rounded(from_bits(size) * 512.0).to(tl.int32)
        code = tl.where(size < 0x3C800000, subnormal, normal)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def encode_e2m1(quotient):
    """`elements.encode_e2m1`: one 4-bit code a byte."""
    size = tl.minimum(tl.abs(quotient), 6.0)
    large = tl.where(size < 4.0, rounded(size) + 2.0, rounded(size * 0.5) + 4.0)
    code = tl.where(size < 2.0, rounded(size * 2.0), large).to(tl.int32)
    return tl.where(quotient < -0.25, code + 8, code).to(tl.uint8)


@triton.jit
def round_e2m1(quotient):
    """`elements.round_e2m1`, but for the sign of zero."""
    size = tl.minimum(tl.abs(quotient), 6.0)
    large = tl.where(size < 4.0, rounded(size), rounded(size * 0.5) * 2.0)
    value = tl.where(size < 2.0, rounded(size * 2.0) * 0.5, large)
    return tl.where(quotient < 0.0, -value, value)


@triton.jit
def decode(codes, ELEMENT: tl.constexpr, NATIVE: tl.constexpr):
    """The float32 value of each code, one a byte."""
    if ELEMENT == "e4m3":
        return decode_e4m3(codes, NATIVE)
    elif ELEMENT == "e2m1":
        return decode_e2m1(codes)
    else:
        return codes.to(tl.int8, bitcast=True).to(tl.float32)


@triton.jit
def decode_e4m3(codes, NATIVE: tl.constexpr):
    """The float32 value of float8_e4m3fn bytes."""
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        wide = codes.to(tl.int32)
        size = wide & 0x7F
        # As float32 bits the exponent is 120 too small, subnormals included: a product with 2^120 is exact.
        value = tl.where(size == 0x7F, float("nan"), from_bits(size << 20) * 1.329227995784916e36)
        return _with_sign(value, wide << 24)


@triton.jit
def decode_e2m1(codes):
    """The float32 value of 4-bit codes, one a byte."""
    wide = codes.to(tl.int32)
    # As float32 bits the exponent is 126 too small, the subnormal code included: a product with 2^126 is exact.
    return from_bits(((wide & 8) << 28) | ((wide & 7) << 22)) * 8.507059173023462e37


@triton.jit
def _with_sign(value, bits):
    """`value` >= 0 with the highest bit of `bits` as its sign. (Triton's `-x` is 0 - x, which loses that of zero.)"""
    return from_bits(value.to(tl.int32, bitcast=True) | (bits & _SIGN))


@triton.jit
def pack(codes):
    """(R, C) 4-bit codes to (R, C / 2) bytes: element 2i in the low nibble."""
    low, high = tl.split(tl.reshape(codes, (codes.shape[0], codes.shape[1] // 2, 2)))
    return low | (high << 4)


@triton.jit
def unpack(packed):
    """(R, C) bytes to (R, 2 C) 4-bit codes, one a byte."""
    return tl.reshape(tl.join(packed & 15, packed >> 4), (packed.shape[0], packed.shape[1] * 2))


@triton.jit
def sum_of_squares(errors, LOG: tl.constexpr):
    """(R, 2^LOG) to (R,), in the order that `olq_fx.numerics` defines: halves are added until one is left."""
    total = errors * errors
    for _ in tl.static_range(LOG):
        total = _halved(total)
    return tl.reshape(total, (total.shape[0],))


@triton.jit
def _halved(x):
    halves = tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1))
    first, second = tl.split(halves)
    return first + second


@triton.jit
def quotient(groups, divisor):
    """(R, S) over (R,): 0 where the divisor is NaN (a non-finite group) or 0 (a block of zeros)."""
    wide = tl.broadcast_to(divisor[:, None], groups.shape)
    return tl.where(wide > 0.0, tl.div_rn(groups, wide), 0.0)
