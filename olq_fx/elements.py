"""The element types: how one real number becomes a code of 4 or 8 bits, and back.

All functions are elementwise, pure torch and traceable. They take float32 quotients (a value over its scale) without
NaN: who calls them has already replaced the values of non-finite groups. Rounding is to nearest, ties to even, and
what is out of range saturates: values are clamped *before* a cast, because the casts of different devices and
versions differ there.
"""

from types import MappingProxyType

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional

from olq_fx.formats import Element

ELEMENT_MAX: MappingProxyType[Element, float] = MappingProxyType({"e4m3": 448.0, "e2m1": 6.0, "int8": 127.0})
"""The largest value of each element type; int8 is symmetric, -128 is never written."""

CODE_DTYPE: MappingProxyType[Element, torch.dtype] = MappingProxyType(
    {"e4m3": torch.float8_e4m3fn, "e2m1": torch.uint8, "int8": torch.int8}
)
"""The dtype in which codes are stored; a uint8 holds two e2m1 codes."""

_E2M1_SIGN = 8
_E2M1_LARGEST = 7


def encode(quotient: Tensor, element: Element) -> Tensor:
    """Round a float32 quotient to the nearest code of `element`; one code an entry (e2m1 is not packed yet).

    e4m3 keeps the sign of zero, as the hardware's cast does; int8 has none; e2m1 is written without negative zero.
    """
    if element == "e2m1":
        return encode_e2m1(quotient)
    limit = ELEMENT_MAX[element]
    clamped = quotient.clamp(-limit, limit)
    return (clamped.round() if element == "int8" else clamped).to(CODE_DTYPE[element])


def decode(codes: Tensor, element: Element) -> Tensor:
    """The float32 value of each code (of e2m1: of each unpacked code)."""
    return decode_e2m1(codes) if element == "e2m1" else codes.to(torch.float32)


def encode_e2m1(quotient: Tensor) -> Tensor:
    """The 4-bit code of the nearest e2m1 value, in a uint8 each: sign, two bits of exponent, one of mantissa.

    Codes advance by one each step; steps are .5 below 2, 1 below 4 and 2 above. So rounding the number of steps to even
    is rounding the code to even, and the thresholds are .25 .75 1.25 1.75 2.5 3.5 5.
    """
    size = quotient.abs()
    # Each width of steps counts codes by a line; the least of the three is the right one, and stays it when rounded.
    # Few reads of each value, because a compiler that does not store one computes it anew for each.
    code = torch.minimum((size * 2.0).round(), size.round() + 2.0)
    code = torch.minimum(code, (size * 0.5).round() + 4.0).clamp(max=_E2M1_LARGEST)
    # What rounds to zero, up to the first threshold, gets no sign.
    return (code + torch.where(quotient < -0.25, float(_E2M1_SIGN), 0.0)).to(torch.uint8)


def round_e2m1(quotient: Tensor) -> Tensor:
    """The value of the code that `encode_e2m1` gives, without the code: -6 to 6 in float32."""
    size = quotient.abs().clamp(max=ELEMENT_MAX["e2m1"])
    large = torch.where(size < 4.0, size.round(), (size * 0.5).round() * 2.0)
    return torch.copysign(torch.where(size < 2.0, (size * 2.0).round() * 0.5, large), quotient)


def decode_e2m1(codes: Tensor) -> Tensor:
    """The float32 value of each 4-bit code (the lower four bits of a uint8); a negative zero stays one."""
    magnitude = codes & 7
    exponent, mantissa = magnitude >> 1, magnitude & 1
    # Twice the value is an integer: the mantissa with its hidden bit, shifted; codes 0 and 1 have no hidden bit.
    doubled = torch.where(magnitude < 2, magnitude, (mantissa | 2) << (exponent.clamp(min=1) - 1))
    value = doubled.to(torch.float32) * 0.5
    return torch.where((codes & _E2M1_SIGN) != 0, -value, value)


def pack(codes: Tensor) -> Tensor:
    """(R, K) 4-bit codes to (R, ceil(K/2)) bytes: element 2i in the low nibble; an odd K leaves a high nibble 0."""
    if codes.shape[-1] % 2:
        codes = functional.pad(codes, (0, 1))
    pairs = rearrange(codes, "r (k two) -> r k two", two=2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack(packed: Tensor, k: int) -> Tensor:
    """(R, ceil(K/2)) bytes to (R, K) 4-bit codes, one a uint8."""
    codes = rearrange(torch.stack((packed & 15, packed >> 4), dim=-1), "r k two -> r (k two)")
    return codes if codes.shape[-1] == k else codes[:, :k]
