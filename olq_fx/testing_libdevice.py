"""CUDA's mathematical functions in Triton's own, for the interpreter, which has no libdevice.

Each is as exact as float32 allows where Triton has the function; what it has not is said by others of its functions.
"""

import triton
import triton.language as tl


@triton.jit
def exp(x):
    """e^x."""
    return tl.exp(x)


@triton.jit
def log(x):
    """The natural logarithm."""
    return tl.log(x)


@triton.jit
def sqrt(x):
    """The square root."""
    return tl.sqrt_rn(x)


@triton.jit
def rsqrt(x):
    """1 / sqrt(x)."""
    return tl.div_rn(1.0, tl.sqrt_rn(x))


@triton.jit
def erf(x):
    """The error function."""
    return tl.erf(x)


@triton.jit
def abs(x):
    """The size of a number."""
    return tl.abs(x)


@triton.jit
def tanh(x):
    """The hyperbolic tangent, by the exponential function of a number that is not positive: it does not overflow."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0.0, -size, size)


@triton.jit
def pow(x, y):
    """x^y of positive x."""
    return tl.exp(y * tl.log(x))


@triton.jit
def nearbyint(x):
    """To the nearest integer, ties to the even one: what adding and taking away 2^23 rounds to."""
    size = tl.abs(x)
    rounded = (size + 8388608.0) - 8388608.0
    found = tl.where(size < 8388608.0, rounded, size)
    return tl.where(x < 0.0, -found, tl.where(x == 0.0, x, found))
