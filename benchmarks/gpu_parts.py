"""What is timed on a GPU, part by part: each function lists comparisons that are made when their turn comes."""

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gpu_data as data
import torch
from gpu_products import grouped_part, products_part
from gpu_timing import Comparison, Target
from torch import Tensor

from olq_fx import numerics
from olq_fx.cost_model import input_reads
from olq_fx.formats import FORMATS, Format
from olq_fx.gpu_timing import Entry, Run
from olq_fx.kernels import reference
from olq_fx.testing import assert_same_bits

SHAPE = (8192, 8192)
"""Rows and columns of what is quantized."""

_COPY_SHARE, _FUSED = 0.85, 1 / 1.03
"""Targets: the share of the bandwidth of a copy; a fused producer may take 3 % more time than without quantization."""


def quantize_part() -> Iterator[Callable[[], Comparison]]:
    """Every format in its default rules, and the inverse, against a copy of as many bytes."""
    for format in FORMATS.values():
        for rule in dict.fromkeys([format.activation_rule, format.weight_rule]):
            yield functools.partial(quantize_comparison, format, rule)
        yield functools.partial(dequantize_comparison, format)


def quantize_comparison(format: Format, rule: str) -> Comparison:
    from olq_fx.kernels.triton_quantize import quantize_calls

    native = data.capability() >= 89

    def make(number: int) -> Run:
        return data.launching(
            quantize_calls(data.random(*SHAPE, seed=number), data.empty_parts(format, *SHAPE), format, rule, native)
        )

    def check() -> None:
        x, parts = data.random(256, 1024), data.empty_parts(format, 256, 1024)
        data.launching(quantize_calls(x, parts, format, rule, native))()
        assert_same_bits([part.cpu() for part in parts], list(reference.quantize(x.cpu(), format.name, rule)))

    size = input_reads(format) * 2 * SHAPE[0] * SHAPE[1] + numerics.quantized_bytes(format, *SHAPE)
    ours = Entry("olq_fx", make, size, size)
    title = f"quantize {format.name} {rule} {SHAPE[0]} x {SHAPE[1]} bf16"
    return Comparison(title, (ours, data.copy_entry(size)), "GB/s", (Target(_COPY_SHARE, data.COPY),), check)


def dequantize_comparison(format: Format) -> Comparison:
    from olq_fx.kernels.triton_quantize import dequantize_calls

    native = data.capability() >= 89

    def make(number: int) -> Run:
        x = data.random(*SHAPE, seed=number)
        parts = data.quantized(x, format.name)
        return data.launching(dequantize_calls(parts, format, torch.empty_like(x), native))

    size = 2 * SHAPE[0] * SHAPE[1] + numerics.quantized_bytes(format, *SHAPE)
    title = f"dequantize {format.name} {SHAPE[0]} x {SHAPE[1]} to bf16"
    return Comparison(title, (Entry("olq_fx", make, size, size), data.copy_entry(size)), "GB/s")


def fused_part() -> Iterator[Callable[[], Comparison]]:
    """Producers that quantize what they compute, against the same producer without and with a second kernel."""
    for format in FORMATS.values():
        if format.activation:
            yield functools.partial(fused_comparison, format, "rms_norm")
            yield functools.partial(fused_comparison, format, "silu_times")


def fused_comparison(format: Format, producer: str) -> Comparison:
    """Rates count what the producer alone would move, for all entries alike."""
    fused = importlib.import_module("olq_fx.kernels.triton_fused")
    producers = importlib.import_module("olq_fx.kernels.producers")
    rule, native, (rows, k) = format.activation_rule, data.capability() >= 89, SHAPE
    inputs = 1 if producer == "rms_norm" else 2

    def alone(values: Sequence[Tensor], target: Any) -> list[Any]:
        if producer == "rms_norm":
            x = values[0]
            calls = fused.normalize_calls(producers.Norm(), x, target, data.random(k), None, None, None, x.dtype)
        else:
            calls = fused.activate_calls(producers.Activation("silu"), values, target)
        return list(calls)

    def operands(number: int) -> list[Tensor]:
        return [data.random(rows, k, seed=number + one) for one in range(inputs)]

    def plain(number: int) -> Run:
        values = operands(number)
        return data.launching(alone(values, fused.Target(torch.empty_like(values[0]))))

    def quantizing(number: int) -> Run:
        target = fused.Target(None, data.empty_parts(format, rows, k), format, rule, native)
        return data.launching(alone(operands(number), target))

    def pair(number: int) -> Run:
        from olq_fx.kernels.triton_quantize import quantize_calls

        values = operands(number)
        out = torch.empty_like(values[0])
        second = quantize_calls(out, data.empty_parts(format, rows, k), format, rule, native)
        return data.launching([*alone(values, fused.Target(out)), *second])

    size = 2 * (inputs + 1) * rows * k
    peers = (Entry(f"{producer} alone", plain, size, size), Entry("two kernels", pair, size, size))
    entries = (Entry("olq_fx", quantizing, size, size), *peers)
    title = f"{producer} and quantize {format.name} {rows} x {k}"
    return Comparison(title, entries, "GB/s", (Target(_FUSED, peers[0].name),))


PARTS: dict[str, Callable[[], Iterator[Callable[[], Comparison]]]] = {
    "quantize": quantize_part,
    "products": products_part,
    "grouped": grouped_part,
    "fused": fused_part,
}
"""Every part that times, by its name."""

NOTES: dict[str, tuple[str, ...]] = {
    "fused": (
        "products with a chain and quantized output are not timed: the target of 3 % is one of producers that quantize",
    ),
}
"""What a part leaves out, by its name."""
