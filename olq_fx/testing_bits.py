"""Comparison by bits, with a message that shows where, what and which bits differ first."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from olq_fx.weights import QuantizedWeight

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: Tensor) -> Tensor:
    """The bytes of `tensor`, of any dtype and layout, as integers of the same width and shape.

    A complex tensor gains a last axis of two (real and imaginary part).
    """
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.contiguous().view(_INTEGER_OF_SIZE[plain.element_size()])


def assert_same_bits(actual: Any, expected: Any, *, limit: int = 8, name: str = "value", any_nan: bool = False) -> None:
    """Assert that two tensors, or nests of them, are equal in type, dtype, shape and every bit.

    Unlike `torch.equal` this tells 0.0 from -0.0, compares NaN by its payload, and takes every dtype (float8 included).

    Args:
        actual: a tensor of any dtype, a converted weight (compared part by part), None, a number, or a sequence or
            mapping of such values.
        expected: what it should be, nested alike.
        limit: how many mismatches the message shows.
        name: what the message calls the value.
        any_nan: whether every NaN equals every other one, as between devices.

    Raises:
        AssertionError: with the first mismatches, each with its coordinate, both values and both bit patterns.
    """
    if isinstance(expected, Tensor):
        _assert_same_tensor(actual, expected, limit, name, any_nan)
    elif isinstance(expected, Mapping):
        _require(isinstance(actual, Mapping), f"{name}: expected a mapping, got {type(actual).__name__}")
        _require(list(actual) == list(expected), f"{name}: keys {list(actual)}, expected {list(expected)}")
        for key, value in expected.items():
            assert_same_bits(actual[key], value, limit=limit, name=f"{name}[{key!r}]", any_nan=any_nan)
    elif isinstance(expected, Sequence) and not isinstance(expected, (str, bytes)):
        _require(
            isinstance(actual, Sequence) and len(actual) == len(expected),
            f"{name}: expected {len(expected)} items, got {_describe(actual)}",
        )
        for index, value in enumerate(expected):
            assert_same_bits(actual[index], value, limit=limit, name=f"{name}[{index}]", any_nan=any_nan)
    else:
        _require(
            type(actual) is type(expected) and actual == expected, f"{name}: got {actual!r}, expected {expected!r}"
        )


def _assert_same_tensor(actual: Any, expected: Tensor, limit: int, name: str, any_nan: bool) -> None:
    _require(isinstance(actual, Tensor), f"{name}: expected a tensor, got {_describe(actual)}")
    converted = isinstance(expected, QuantizedWeight)
    _require(
        isinstance(actual, QuantizedWeight) == converted,
        f"{name}: {type(actual).__name__}, expected {type(expected).__name__}",
    )
    _require(actual.dtype == expected.dtype, f"{name}: dtype {actual.dtype}, expected {expected.dtype}")
    _require(actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if isinstance(expected, QuantizedWeight):
        _require(actual.spec == expected.spec, f"{name}: {actual.spec}, expected {expected.spec}")
        assert_same_bits(actual.parts, expected.parts, limit=limit, name=f"{name}.parts", any_nan=any_nan)
        return
    unequal = bits_of(actual) != bits_of(expected)
    if any_nan and expected.is_floating_point():
        unequal &= ~(actual.to(torch.float32).isnan() & expected.to(torch.float32).isnan())
    different = unequal.nonzero()
    if len(different):
        raise AssertionError(_mismatches(actual, expected, different, limit, name))


def _mismatches(actual: Tensor, expected: Tensor, different: Tensor, limit: int, name: str) -> str:
    """The message: how many of how many, then one line for each of the first `limit` mismatches."""
    lines = [
        f"{name}: {len(different)} of {expected.numel()} elements differ, {expected.dtype} {tuple(expected.shape)}"
    ]
    for position in different[:limit].tolist():
        at = tuple(position)
        # A complex element has one coordinate more in its bits (real or imaginary) than in its values.
        here = at[: expected.ndim]
        lines.append(f"  at {here}: {_shown(actual, at)}, expected {_shown(expected, at)}")
    if len(different) > limit:
        lines.append(f"  and {len(different) - limit} more")
    return "\n".join(lines)


def _shown(tensor: Tensor, at: tuple[int, ...]) -> str:
    element = tensor.detach()[at[: tensor.ndim]].cpu()
    width = (element.real if element.is_complex() else element).element_size()
    pattern = int(bits_of(tensor)[at]) & ((1 << 8 * width) - 1)
    value = element.item() if element.is_complex() or not element.is_floating_point() else element.double().item()
    return f"{value!r} [0x{pattern:0{2 * width}x}]"


def _describe(value: Any) -> str:
    return f"{type(value).__name__} of length {len(value)}" if isinstance(value, Sequence) else type(value).__name__


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
