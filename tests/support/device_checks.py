"""Every device function beside the function of the reference that it must equal, on the numbers of device_numbers.py.

`run_check` runs in the process of an `Interpreter`: for test_device.py with the library's own functions, for
test_mutations.py with changed ones.
"""

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from device_numbers import (
    any_float,
    as_bits,
    blocks_and_units,
    every_byte,
    every_int32,
    exponents_and_sizes,
    grouped,
    groups_and_divisors,
    groups_and_exponents,
    groups_of,
    nibbles,
    nvfp4_scale,
    quotients,
    sizes,
    sizes_and_units,
    small,
    written_exponents,
)
from torch import Tensor

from olq_fx import elements, numerics, scales
from olq_fx.formats import FORMATS
from olq_fx.testing import assert_same_bits


@dataclasses.dataclass(frozen=True)
class Check:
    """One device function with one setting.

    Attributes:
        function: its name.
        inputs: gives the numbers: (N,) and (N,) or None; for groups (R, S) and (R,) or None.
        expected: of these, what the reference gives.
        key: an element, rule or largest code.
        rule: a scale rule.
        groups: whether it takes groups.
        native: both settings of NATIVE are tried.
        signed_zero: whether the sign of a zero counts.
    """

    function: str
    inputs: Callable[[], tuple[Tensor, Tensor | None]]
    expected: Callable[..., Tensor]
    key: str | float = ""
    rule: str = ""
    groups: bool = False
    native: bool = False
    signed_zero: bool = True

    @property
    def name(self) -> str:
        return "-".join(str(part) for part in (self.function, self.key, self.rule) if part != "")

    @functools.cached_property
    def numbers(self) -> tuple[Tensor, Tensor | None]:
        return self.inputs()

    @functools.cached_property
    def wanted(self) -> Tensor:
        x, y = self.numbers
        return self.expected(x) if y is None else self.expected(x, y)


def _over_power_of_two(groups: Tensor, written: Tensor) -> Tensor:
    return numerics._quotient(groups, scales.power_of_two(written)[:, None])


def _mx_scale(name: str, rule: str) -> Callable[[Tensor], Tensor]:
    return lambda groups: numerics._e8m0(*grouped(groups), FORMATS[name], rule).flatten()


def _bytes(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: function(*args).view(torch.uint8)


def _codes(element: str) -> Callable[[Tensor], Tensor]:
    return _bytes(lambda x: elements.encode(x, element))


def _decoded(element: str) -> Callable[[Tensor], Tensor]:
    return lambda codes: elements.decode(codes.view(elements.CODE_DTYPE[element]), element)


def _on_sizes() -> list[Check]:
    found = [
        Check("float32_scale", sizes, functools.partial(scales.float32_scale, largest=largest), largest)
        for largest in (448.0, 127.0, 6.0, 2688.0)
    ]
    for largest in (448.0, 127.0):
        above = functools.partial(scales.exponent_above, largest=largest)
        power = functools.partial(scales.power_of_two_scale, largest=largest)
        found += [Check("exponent_above", sizes, above, largest), Check("power_of_two_scale", sizes, power, largest)]
    for rule in FORMATS["mxfp4"].rules:
        found.append(Check("mxfp4_exponent", sizes, functools.partial(scales.mxfp4_exponent, rule=rule), rule))
    for element, format in (("e4m3", "fp8_per_block_dynamic"), ("int8", "int8_per_token")):
        for rule in ("amax", "power_of_two"):
            plain = functools.partial(numerics._float32_scale, format=FORMATS[format], rule=rule)
            found.append(Check("plain_scale", sizes, plain, element, rule))
    return [
        *found,
        Check("is_finite", sizes, lambda amax: scales.finite(amax).to(torch.int32)),
        Check("nvfp4_reciprocal", sizes, scales.nvfp4_reciprocal),
        Check("e8m0", exponents_and_sizes, scales.e8m0),
        Check("e4m3_scale", sizes_and_units, _bytes(scales.e4m3_scale), native=True),
    ]


def _on_values_and_codes() -> list[Check]:
    return [
        Check("LARGEST", nibbles, lambda x: torch.full(x.shape, torch.finfo(torch.float32).max)),
        Check("size_bits", any_float, lambda x: as_bits(x.abs())),
        Check("finite_size_bits", any_float, lambda x: as_bits(numerics._finite(x.abs()))),
        Check("from_bits", every_int32, lambda bits: bits.view(torch.float32)),
        Check("rounded", small, torch.round, signed_zero=False),
        *(Check("encode", quotients, _codes(element), element, native=True) for element in ("e4m3", "e2m1", "int8")),
        Check("encode_e4m3", quotients, _codes("e4m3"), native=True),
        Check("encode_e2m1", quotients, elements.encode_e2m1),
        Check("round_e2m1", quotients, elements.round_e2m1, signed_zero=False),
        Check("power_of_two", written_exponents, scales.power_of_two),
        Check("decode_e8m0", every_byte, scales.decode_e8m0),
        *(Check("decode", every_byte, _decoded(element), element, native=True) for element in ("e4m3", "int8")),
        Check("decode", nibbles, elements.decode_e2m1, "e2m1"),
        Check("decode_e4m3", every_byte, _decoded("e4m3"), native=True),
        Check("decode_e2m1", nibbles, elements.decode_e2m1),
    ]


def _on_groups() -> list[Check]:
    codes = torch.cartesian_prod(*[torch.arange(16, dtype=torch.uint8)] * 2).reshape(2, 256)
    packed = torch.arange(256, dtype=torch.uint8).reshape(2, 128)
    found = [
        Check("sum_of_squares", groups_of(size), lambda x: numerics._sum_of_squares(x[:, None, None]).flatten(), size)
        for size in (1, 2, 16, 32)
    ]
    found += [
        Check("mx_scale", groups_of(32), _mx_scale("mxfp4", rule), "e2m1", rule) for rule in FORMATS["mxfp4"].rules
    ]
    found += [
        Check("nvfp4_scale", blocks_and_units, nvfp4_scale(rule), "", rule, native=True)
        for rule in FORMATS["nvfp4"].rules
    ]
    found += [
        Check("group_amax", groups_of(32), lambda x: grouped(x)[1].flatten()),
        Check("over_power_of_two", groups_and_exponents, _over_power_of_two),
        Check("quotient", groups_and_divisors, lambda x, y: numerics._quotient(x, y[:, None])),
        Check("mx_scale", groups_of(32), _mx_scale("mxfp8", "ceil"), "e4m3", "ceil"),
        Check("pack", lambda: (codes, None), elements.pack),
        Check("unpack", lambda: (packed, None), lambda x: elements.unpack(x, 2 * x.shape[1])),
    ]
    return [dataclasses.replace(check, groups=True) for check in found]


CHECKS = {
    (check.name, native): check
    for check in (*_on_sizes(), *_on_values_and_codes(), *_on_groups())
    for native in ((True, False) if check.native else (True,))
}
"""By name and setting of NATIVE."""


def run_check(check: Check, native: bool, kernels: ModuleType) -> None:
    """Hold a device function, as the module `device_kernels` (or a copy of it) applies it, to the reference.

    Raises:
        AssertionError: they differ.
    """
    x, y = check.numbers
    found = torch.empty_like(check.wanted)
    if check.groups:
        rows, size = x.shape
        width, log = found.shape[1] if found.dim() == 2 else 0, size.bit_length() - 1
        args = (rows, size, width, log, check.function, check.key, check.rule, native)
        kernels.groups_kernel[(1,)](x, y, found, *args)
    else:
        kernels.elementwise_kernel[(1,)](x, y, found, len(x), check.function, check.key, check.rule, native)
    if check.signed_zero or not found.is_floating_point():
        assert_same_bits(found, check.wanted, any_nan=True)
    else:
        assert_same_bits(found + 0.0, check.wanted + 0.0, any_nan=True)


def kills(folder: str, number: int, first: Sequence[str]) -> str:
    """The first check that notices what was changed in copies of the device functions, or "".

    Args:
        folder: it holds `mutant_NUMBER_kernels.py`, a copy of `device_kernels` that imports changed functions.
        number: of the mutant.
        first: functions whose checks run first.
    """
    checks = [
        (name, check.function, functools.partial(run_check, check, native)) for (name, native), check in CHECKS.items()
    ]
    return first_that_notices(checks, folder, number, first)


def first_that_notices(
    checks: Sequence[tuple[str, str, Callable[[ModuleType], None]]], folder: str, number: int, first: Sequence[str]
) -> str:
    """`kills` by these checks, each with its name and that of its function."""
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        kernels = importlib.import_module(f"mutant_{number}_kernels")
    except Exception as error:
        return f"import: {type(error).__name__}"
    for name, _, run in sorted(checks, key=lambda check: check[1] not in first):
        try:
            run(kernels)
        except Exception as error:
            return f"{name}: {type(error).__name__}"
    return ""


def run_named(name: str, native: bool) -> None:
    """`run_check` of the library's own functions; in the process of an interpreter."""
    import device_kernels

    run_check(CHECKS[name, native], native, device_kernels)
