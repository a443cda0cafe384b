"""Small Triton kernels, right and wrong, for the tests of the testing kit."""

import os

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def cast_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < n)


@triton.jit
def forgetful_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n, other=0.0), mask=at < n - 1)


@triton.jit
def unmasked_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at), mask=at < n)


@triton.jit
def unmasked_atomic_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out + at, tl.load(x + at, mask=at < n, other=0.0))


@triton.jit
def bfloat16_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0)
    tl.store(out + at, value + value, mask=at < n)


@triton.jit
def product_kernel(a, b, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def deep_kernel(a, b, out, K, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(0, K, BLOCK):
        left = tl.load(a + at[:, None] * K + k + at[None, :])
        right = tl.load(b + at[None, :] * K + k + at[:, None])
        total += tl.dot(left, right)
    tl.store(out + at[:, None] * BLOCK + at[None, :], total)


@triton.jit
def descriptor_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at[:, None] * BLOCK + at[None, :], x.load([0, BLOCK]))


def descriptor(x: torch.Tensor) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [16, 16])


def second_tile(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(16, 16, dtype=x.dtype)
    descriptor_kernel[(1,)](descriptor(x), out, BLOCK=16)
    return out


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    cast_kernel[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), BLOCK=64)
    return out


def forgetful(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    forgetful_kernel[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), BLOCK=64)
    return out


def changes_its_input(x: torch.Tensor) -> torch.Tensor:
    return x.zero_()


def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(a.shape, dtype=dtype)
    product_kernel[(1,)](a, b, out, BLOCK=a.shape[0])
    return out


def dies() -> None:
    os._exit(3)


def sleeps() -> None:
    import time

    time.sleep(60)


def raises() -> None:
    raise ValueError("in there")


def process() -> int:
    return os.getpid()


def settings() -> tuple[bool, int]:
    return torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()


def echo(value: object) -> object:
    return value
