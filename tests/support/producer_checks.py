"""Every function of `device_producers` beside its definition, with the same bits.

`exp` and `erf` are those of the interpreter, which takes them from numpy and from `math`: so the definitions do here.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from device_checks import first_that_notices
from device_numbers import any_float, group_values, sizes
from torch import Tensor
from torch.nn import functional

from olq_fx.kernels import producers
from olq_fx.kernels.producers import ACTIVATIONS
from olq_fx.testing import assert_same_bits

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BLOCK_M, BLOCK_K = 8, 32
R, K = 5, 27
"""A tensor that fills no tile."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One function with one setting.

    Attributes:
        function: its name.
        setting: what tells it from others of the function.
        kernel: of `producer_kernels`.
        inputs: the kernel's first arguments, before its result.
        rest: those after its result, made of the inputs.
        expected: the result, of the inputs.
        signed_zero: whether the sign of a zero counts.
    """

    function: str
    setting: str
    kernel: str
    inputs: Callable[[], tuple[Tensor | None, ...]]
    rest: Callable[..., Sequence[Any]]
    expected: Callable[..., Tensor]
    signed_zero: bool = True

    @functools.cached_property
    def numbers(self) -> tuple[Tensor | None, ...]:
        return self.inputs()

    @functools.cached_property
    def wanted(self) -> Tensor:
        return self.expected(*self.numbers)


def rounded(x: Tensor, dtype: str) -> Tensor:
    return x.to(DTYPES[dtype]).float()


def activated(x: Tensor, kind: str) -> Tensor:
    """In float32 and in the order of the kernels' operations."""
    with np.errstate(all="ignore"):
        values, one = x.numpy(), np.float32(1)
        if kind == "silu":
            found = values / (one + np.exp(-values))
        elif kind == "gelu":
            erf = np.vectorize(math.erf, otypes=[np.float32])
            found = values * np.float32(0.5) * (one + erf(values * np.float32(math.sqrt(0.5))))
        elif kind == "gelu_tanh":
            cube = np.float32(0.044715) * (values * values * values)
            inner = np.float32(math.sqrt(2 / math.pi)) * (values + cube)
            found = values / (one + np.exp(np.float32(-2) * inner))
        else:
            found = np.where(values < 0, np.float32(0), values) ** 2
    return torch.from_numpy(found)


def _whole(x: Tensor) -> Tensor:
    return functional.pad(x, (0, BLOCK_K - x.shape[1], 0, BLOCK_M - x.shape[0]))


def _drawn(*shape: int, dtype: str = "fp32", seed: int = 0) -> Tensor:
    found = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3
    return found.to(DTYPES[dtype])


def _strides(*tensors: Tensor | None) -> list[int]:
    return [stride for tensor in tensors for stride in ((0, 0) if tensor is None else tensor.stride())]


def _elementwise(function: str, key: str, inputs: Callable[[], Any], expected: Callable[..., Tensor]) -> Check:
    def rest(x: Tensor, y: Tensor | None) -> list[Any]:
        return [len(x), function, key]

    return Check(function, key, "elementwise_kernel", inputs, rest, expected)


def _on_numbers() -> list[Check]:
    def variances() -> tuple[Tensor, Tensor]:
        values = sizes()[0]
        return values, torch.tensor([0.0, 1e-6, 1e-5, 0.25])[torch.arange(len(values)) % 4]

    def root(variance: Tensor, eps: Tensor) -> Tensor:
        return 1.0 / torch.sqrt((variance + eps).double()).float()

    found = [_elementwise("rounded_to", name, any_float, lambda x, _, name=name: rounded(x, name)) for name in DTYPES]
    for kind in ACTIVATIONS:
        for function in ("activated", kind):
            found.append(_elementwise(function, kind, any_float, lambda x, _, kind=kind: activated(x, kind)))
    return [*found, _elementwise("reciprocal_root", "", variances, root)]


def _means() -> list[Check]:
    def of(k: int, size: int) -> Check:
        def inputs() -> tuple[Tensor]:
            values = group_values(size).nan_to_num(1.0, 2.0, -2.0)
            values[:, k:] = 0.0
            return (values,)

        def rest(x: Tensor) -> list[int]:
            return [k, len(x), size, size.bit_length() - 1]

        def expected(x: Tensor) -> Tensor:
            return producers._row_mean(x[:, :k])[:, 0]

        return Check("row_mean", f"{k} of {size}", "mean_kernel", inputs, rest, expected, signed_zero=False)

    return [of(1, 1), of(2, 2), of(11, 16), of(27, 32)]


def _streams() -> list[Check]:
    def of(x: str, residual: str | None) -> Check:
        stream = "fp32" if residual is None else x if x == residual else "fp32"

        def inputs() -> tuple[Tensor | None, ...]:
            other = None if residual is None else _drawn(R, 2 * K, dtype=residual, seed=1)[:, ::2]
            return _drawn(K, R, dtype=x).T, other

        def rest(*given: Tensor | None) -> list[Any]:
            return [*_strides(*given), R, K, stream, BLOCK_M, BLOCK_K]

        def expected(first: Tensor, second: Tensor | None) -> Tensor:
            found = first.float() if second is None else rounded(first.float() + second.float(), stream)
            return _whole(found)

        return Check("hidden_tile", f"{x} + {residual}", "hidden_kernel", inputs, rest, expected)

    return [of("bf16", None), of("bf16", "bf16"), of("fp16", "fp16"), of("bf16", "fp32")]


def _norms() -> list[Check]:
    def centered(layer: bool) -> Check:
        def inputs() -> tuple[Tensor, Tensor]:
            return _whole(_drawn(R, K)), _drawn(BLOCK_M, seed=1)

        def expected(x: Tensor, mean: Tensor) -> Tensor:
            return _whole((x - mean[:, None])[:R, :K]) if layer else x

        def rest(*_: Tensor) -> list[Any]:
            return [R, K, layer, BLOCK_M, BLOCK_K]

        return Check("centered", str(layer), "centered_kernel", inputs, rest, expected)

    def normed(weight: str | None, bias: str | None, first: str, dtype: str) -> Check:
        def inputs() -> tuple[Tensor | None, ...]:
            root = _drawn(BLOCK_M, seed=1)
            root[2], root[-1] = torch.nan, torch.inf
            scale = None if weight is None else _drawn(K, dtype=weight, seed=2)
            return _whole(_drawn(R, K)), root, scale, None if bias is None else _drawn(K, dtype=bias, seed=3)

        def expected(x: Tensor, root: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
            value = rounded(x[:R, :K] * root[:R, None], first)
            value = value if scale is None else value * scale.float()
            return _whole(rounded(value if shift is None else value + shift.float(), dtype))

        def rest(*_: Tensor | None) -> list[Any]:
            return [R, K, first, dtype, BLOCK_M, BLOCK_K]

        setting = f"{weight}, {bias}, {first}, {dtype}"
        return Check("normed", setting, "normed_kernel", inputs, rest, expected)

    settings = (("bf16", "fp32", "fp32", "bf16"), ("fp32", None, "bf16", "fp16"), (None, "bf16", "fp32", "fp32"))
    return [centered(True), centered(False), *(normed(*setting) for setting in settings)]


def _activations() -> list[Check]:
    def of(kind: str, form: str, dtype: str, first: int) -> Check:
        def inputs() -> tuple[Tensor | None, ...]:
            gate, up = _drawn(K, R, dtype=dtype).T, _drawn(R, 2 * K, dtype=dtype, seed=1)[:, ::2]
            if form == "interleaved":
                return torch.stack((gate, up), 2).reshape(R, 2 * K), None
            return gate, up if form == "gated" else None

        def rest(*given: Tensor | None) -> list[Any]:
            return [*_strides(*given), R, K, first, kind, form == "interleaved", dtype, BLOCK_M, 16]

        def expected(gate: Tensor, up: Tensor | None) -> Tensor:
            if form == "interleaved":
                gate, up = gate[:, ::2], gate[:, 1::2]
            value = rounded(activated(gate.float().contiguous(), kind), dtype)
            value = value if up is None else rounded(value * up.float(), dtype)
            return _whole(value)[:, first : first + 16].contiguous()

        setting = f"{kind}, {form}, {dtype}, {first}"
        return Check("activation_tile", setting, "activation_kernel", inputs, rest, expected)

    forms = ("alone", "gated", "interleaved")
    return [of(kind, form, dtype, 16) for kind in ("silu", "relu_squared") for form in forms for dtype in DTYPES] + [
        of("silu", form, "bf16", 0) for form in forms
    ]


CHECKS = {
    f"{check.function}-{check.setting}": check
    for check in (*_on_numbers(), *_means(), *_streams(), *_norms(), *_activations())
}


def run_check(check: Check, kernels: ModuleType) -> None:
    """Hold a function, as the module `producer_kernels` (or a copy of it) applies it, to its definition.

    Raises:
        AssertionError: they differ.
    """
    found = torch.empty_like(check.wanted)
    getattr(kernels, check.kernel)[(1,)](*check.numbers, found, *check.rest(*check.numbers))
    zero = -0.0 if check.signed_zero else 0.0
    assert_same_bits(found + zero, check.wanted + zero, any_nan=True)


def kills(folder: str, number: int, first: Sequence[str]) -> str:
    """The first check that notices what was changed in copies of the functions, or ""; as in `device_checks`."""
    checks = [(name, check.function, functools.partial(run_check, check)) for name, check in CHECKS.items()]
    return first_that_notices(checks, folder, number, first)


def run_named(name: str) -> None:
    """`run_check` of the library's own functions; in the process of an interpreter."""
    import producer_kernels

    run_check(CHECKS[name], producer_kernels)
