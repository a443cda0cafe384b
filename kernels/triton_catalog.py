"""Every kernel configuration that ships, as named calls on tensors without values: for tables of machine code.

API:
    catalog(capability) -> tuple[Entry, ...]
    SOURCES                             one function a family of kernels
    entries(name, formats, calls, instruction="") -> list[Entry]     for such a function

A family of kernels joins by a function from a compute capability to its entries and by one line in `SOURCES`. Nothing
is launched and nothing compiled here; shapes are large and multiples of 16, as those of models are.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from olq_fx.formats import FORMATS, Format, block_formats, get_format
from olq_fx.kernels.support import chain_refusal
from olq_fx.kernels.triton_catalog_layers import grouped_entries, producer_entries, routing_entries
from olq_fx.kernels.triton_entries import (
    CAPABILITIES,
    Entry,
    entries,
    has_fp8,
    instruction_pattern,
    meta,
    meta_parts,
)
from olq_fx.kernels.triton_linear_chain import Chain, chain_call
from olq_fx.kernels.triton_product import operand_of, product_calls
from olq_fx.kernels.triton_quantize import dequantize_calls, quantize_calls
from olq_fx.schemes import SCHEMES, Slot

__all__ = ["CAPABILITIES", "SOURCES", "Entry", "catalog", "entries", "meta_parts"]

_ROWS = _COLUMNS = 4096
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MIXED = (Slot("mxfp4", "mxfp8"), Slot("mxfp8", "mxfp4"))
"""Pairs of no scheme that have an instruction of their own on some GPUs."""
_OTHER_BLOCKS = (*block_formats(32, 32), *block_formats(256, 64))
"""The extremes of the blocks that `weight_block_size` may ask for."""


def catalog(capability: int) -> tuple[Entry, ...]:
    """All entries for GPUs of a compute capability (90: sm_90).

    Raises:
        ValueError: two entries have the same name.
    """
    found = tuple(entry for source in SOURCES for entry in source(capability))
    names = [entry.name for entry in found]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"entries of the catalogue with the same name: {', '.join(sorted(twice))}")
    return found


def quantize_entries(capability: int) -> list[Entry]:
    """Quantization of bfloat16 to every format, by every rule; the extremes of other blocks."""
    found: list[Entry] = []
    for format, rule in _formats_and_rules():
        x, native = meta(_ROWS, _COLUMNS), has_fp8(capability)
        calls = quantize_calls(x, meta_parts(format, _ROWS, _COLUMNS), format, rule, native)
        found += entries(f"quantize {format.name} {rule}", [format.name], calls)
    return found


def dequantize_entries(capability: int) -> list[Entry]:
    """The inverse, to bfloat16, for every format."""
    found: list[Entry] = []
    for format in dict.fromkeys(format for format, _ in _formats_and_rules()):
        parts = meta_parts(format, _ROWS, _COLUMNS)
        calls = dequantize_calls(parts, format, meta(_ROWS, _COLUMNS), has_fp8(capability))
        found += entries(f"dequantize {format.name}", [format.name], calls)
    return found


def product_entries(capability: int) -> list[Entry]:
    """The product of every scheme and of mixed pairs with one token, with few and with many.

    Weight-only ones are in every dtype. Of 256 rows there is only what is compiled for other constants than of many.
    """
    found: dict[str, Entry] = {}
    for slot in (*(scheme.linear for scheme in SCHEMES.values()), *_MIXED):
        forms = dict[torch.dtype, Mapping[str, Any]]()
        for m, dtype in itertools.product((1, 16, 64, _ROWS, 256), (_DTYPES[:1] if slot.activation else _DTYPES)):
            a, b = _operands(slot, m, _COLUMNS, dtype)
            out = torch.empty(m, _COLUMNS, dtype=dtype, device="meta")
            calls = product_calls(a, slot.activation or "", b, slot.weight, _COLUMNS, out, capability=capability)
            name = f"product {slot.activation or dtype} x {slot.weight}, M = {m}"
            instruction = instruction_pattern(calls[0], capability)
            if m < _ROWS and forms.get(dtype) == calls[0].constants:
                continue
            forms[dtype] = calls[0].constants
            for entry in entries(name, _names(slot), calls[:1], instruction) + entries(name, _names(slot), calls[1:]):
                found.setdefault(entry.name, entry)
    return list(found.values())


def chain_entries(capability: int) -> list[Entry]:
    """The first half of a gated MLP of every scheme whose activations a tile can quantize."""
    found: list[Entry] = []
    for slot in dict.fromkeys(scheme.linear for scheme in SCHEMES.values()):
        if slot.activation is None or chain_refusal(format := get_format(slot.activation)):
            continue
        for m in (16, _ROWS):
            a, b = _operands(slot, m, 2 * _COLUMNS, torch.bfloat16)
            operands = operand_of(a, slot.activation), operand_of(b, slot.weight)
            parts = meta_parts(format, m, _COLUMNS)
            call = chain_call(
                *(*operands, _COLUMNS, torch.bfloat16, Chain("silu", "paired"), parts, format, format.activation_rule),
                *(None, None, None),
                capability=capability,
            )
            name = f"silu x up of a product {slot.activation} x {slot.weight}, quantized, M = {m}"
            found += entries(name, _names(slot), [call], instruction_pattern(call, capability))
    return found


def _operands(slot: Slot, m: int, n: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """The parts of activations (m, K) and weight (n, K)."""
    activation = [torch.empty(m, _COLUMNS, dtype=dtype, device="meta")]
    if slot.activation:
        activation = meta_parts(get_format(slot.activation), m, _COLUMNS)
    return activation, meta_parts(get_format(slot.weight), n, _COLUMNS)


def _names(slot: Slot) -> list[str]:
    return [name for name in (slot.activation, slot.weight) if name]


SOURCES: tuple[Callable[[int], list[Entry]], ...] = (
    quantize_entries,
    dequantize_entries,
    product_entries,
    chain_entries,
    producer_entries,
    grouped_entries,
    routing_entries,
)
"""The families of kernels."""


def _formats_and_rules() -> Iterator[tuple[Format, str]]:
    for format in (*FORMATS.values(), *map(get_format, _OTHER_BLOCKS)):
        for rule in format.rules:
            yield format, rule
