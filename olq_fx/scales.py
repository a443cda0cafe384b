"""The scale rules: from the largest magnitude of a group to its scale, and from stored scales back to float32.

All functions are elementwise over a float32 `amax` >= 0 which is NaN or Inf where the group holds such a value, pure
torch and traceable. Exponents are read from the bits of a float32, never from log2, which is wrong beside powers of
two. The scale of a non-finite group is NaN in each type of scale, and only its: 255 in e8m0, 0x7F in e4m3.
"""

import torch
from torch import Tensor

FLOOR = 2.0**-126
"""The least float32 scale that is written: the smallest normal number, so that no device may flush a scale to zero."""

E4M3_SCALE_MAX = 448.0
NVFP4_RANGE = 6.0 * E4M3_SCALE_MAX
"""The largest magnitude of e2m1 codes times e4m3 block scales, 2688: what nvfp4's global scale maps amax to."""

E8M0_NAN = 255

_MANTISSA_BITS = 23
_NAN_BITS = 0x7FC00000

# Added to the bits of a float32, these carry into its exponent if the mantissa is above 1, at least 1.75, above 1.5.
_CARRY_ANY = (1 << 23) - 1
_MXFP4_CARRY = {"floor": 0, "even": 1 << 21, "ceil": (1 << 22) - 1, "mse": 0}


def finite(amax: Tensor) -> Tensor:
    """Where `amax` (not negative) is a number: false for NaN and for Inf."""
    return amax < float("inf")


def constant(value: float, like: Tensor) -> Tensor:
    """`value` as a float32 tensor without dimensions on the device of `like`: an operand of a true division.

    With a Python number `/` is no division everywhere: `number / tensor` multiplies by a rounded reciprocal, and on
    CUDA `tensor / number` does too.
    """
    return torch.full((), value, dtype=torch.float32, device=like.device)


def divided(value: Tensor, number: float) -> Tensor:
    """`value / number` by true division wherever `value` is less than Inf; `value` itself elsewhere.

    Inductor makes a division by a constant a product with its rounded reciprocal on every device but CPUs, also where
    the constant is a tensor of `constant`. So the divisor is one that depends on the value.
    """
    if value.device.type == "cpu":
        return value / constant(number, value)
    divisor = torch.where(finite(value), constant(number, value), constant(1.0, value))
    return value / divisor


def float32_scale(amax: Tensor, largest: float) -> Tensor:
    """`amax / largest` by true division, at least `FLOOR`; NaN for a non-finite group."""
    return torch.where(finite(amax), divided(amax, largest).clamp(min=FLOOR), float("nan"))


def power_of_two_scale(amax: Tensor, largest: float) -> Tensor:
    """The least power of two >= the float32 quotient `amax / largest`, at least `FLOOR`; NaN if non-finite."""
    return power_of_two(e8m0(exponent_above(amax, largest), amax))


def exponent_above(amax: Tensor, largest: float) -> Tensor:
    """The biased exponent, in int32, of the least power of two >= the float32 quotient `amax / largest`."""
    return _exponent(divided(amax, largest), _CARRY_ANY)


def mxfp4_exponent(amax: Tensor, rule: str) -> Tensor:
    """The biased exponent by mxfp4's rule `floor`, `even` or `ceil`, in int32, not yet limited to what is written.

    With E = floor(log2 amax) - 2: `floor` is E, and `mse` starts from it; `even` is E, and one more if the mantissa of
    amax is at least 1.75 (it would round up to the next power of two); `ceil` is the least e with amax <= 6 x 2^e,
    which is one more if the mantissa is above 1.5.
    """
    return _exponent(amax, _MXFP4_CARRY[rule]) - 2


def _exponent(value: Tensor, carry: int) -> Tensor:
    """The exponent field of `value` >= 0 after `carry` was added to its bits: one more where the mantissa overflows."""
    return (value.view(torch.int32) + carry) >> _MANTISSA_BITS


def e8m0(exponent: Tensor, amax: Tensor) -> Tensor:
    """What is written for a biased exponent: at least 1, and 255 for a non-finite group only; still in int32.

    No finite amax gives an exponent above 253, so only NaN and Inf have to be set apart.
    """
    return torch.where(finite(amax), exponent.clamp(min=1), E8M0_NAN)


def power_of_two(written: Tensor) -> Tensor:
    """The float32 value of an int32 that `e8m0` gave: 2^(written - 127), NaN for 255."""
    return torch.where(written == E8M0_NAN, _NAN_BITS, written << _MANTISSA_BITS).view(torch.float32)


def decode_e8m0(byte: Tensor) -> Tensor:
    """The float32 value 2^(byte - 127) of any e8m0 byte: 2^-127 (subnormal) for byte 0, NaN for byte 255."""
    return torch.where(byte == 0, 2.0**-127, power_of_two(byte.to(torch.int32)))


def e4m3_scale(amax: Tensor, unit: Tensor) -> Tensor:
    """The e4m3 scale of an nvfp4 block, `amax / unit` rounded; no floor: 0 (also by underflow) is a block of zeros."""
    quotient = (amax / unit).clamp(max=E4M3_SCALE_MAX)
    return torch.where(finite(amax), quotient, float("nan")).to(torch.float8_e4m3fn)


def nvfp4_reciprocal(amax: Tensor) -> Tensor:
    """What an nvfp4 weight keeps of its global scale g: G = fl(2688 / amax), or 1 if it is zero or that overflows.

    This is how compressed-tensors stores it, and g = fl(1 / G) everywhere. So the floor of scales does not apply
    here: with amax just above where G overflows (below 2^-114), g is subnormal, but never below 2^-128.
    """
    reciprocal = constant(NVFP4_RANGE, amax) / amax
    return torch.where(finite(reciprocal), reciprocal, 1.0)
