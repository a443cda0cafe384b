"""The part of the catalogue that stands around products: fused producers, and layers of experts."""

from collections.abc import Iterator

import torch

from olq_fx.formats import FORMATS, Format, get_format
from olq_fx.kernels.experts import Gated, Segments, Stack, part_specs_of_stack
from olq_fx.kernels.producers import LONGEST_ROW, Activation, Norm
from olq_fx.kernels.support import between_refusal
from olq_fx.kernels.triton_calls import Call
from olq_fx.kernels.triton_entries import Entry, entries, has_fp8, instruction_pattern, meta, meta_parts
from olq_fx.kernels.triton_expert_chain import expert_chain_calls
from olq_fx.kernels.triton_experts import gated_calls, grouped_calls
from olq_fx.kernels.triton_fused import Target, activate_calls, normalize_calls
from olq_fx.kernels.triton_sorting import combine_calls, route_calls
from olq_fx.schemes import SCHEMES, Slot

_ROWS = 4096
_EXPERTS, _TOP_K = 64, 8
_HIDDEN, _INNER = 4096, 1536
"""A layer of many small experts."""


def producer_entries(capability: int) -> list[Entry]:
    """Norms and activations quantized to every activation format, and as they are."""
    found: list[Entry] = []
    for format in (*_activation_formats(), None):
        target_name = format.name if format else "bf16"
        names = [format.name] if format else []
        for title, calls in _producers(format, has_fp8(capability)):
            found += _with_statistic(f"{title} to {target_name}", names, calls)
    return found


def _with_statistic(name: str, formats: list[str], calls: list[Call]) -> list[Entry]:
    """Entries of one kernel, which may run for a statistic of the whole tensor first."""
    first = entries(f"{name}, statistic", formats, calls[:-1])
    return [*first, *entries(name, formats, calls[-1:])]


def _producers(format: Format | None, native: bool) -> Iterator[tuple[str, list[Call]]]:
    """One of each kernel: rows that fit into registers, and longer ones."""
    long, x = 2 * LONGEST_ROW, meta(_ROWS, LONGEST_ROW)
    vector = meta(LONGEST_ROW)
    norm = normalize_calls(Norm(), x, _target(format, LONGEST_ROW, native), vector, None, x, x, torch.bfloat16)
    yield "RMSNorm of a residual stream", norm
    vector = meta(long)
    layer = normalize_calls(
        Norm(1e-5, layer=True), meta(_ROWS, long), _target(format, long, native), vector, vector, None, None,
        torch.bfloat16,
    )  # fmt: skip
    yield "LayerNorm of long rows", layer
    paired = meta(_ROWS, 2 * LONGEST_ROW)
    target = _target(format, LONGEST_ROW, native)
    yield "SiLU x up", activate_calls(Activation("silu", "paired"), (paired,), target)
    yield "GELU of long rows", activate_calls(Activation("gelu"), (meta(_ROWS, long),), _target(format, long, native))


def _target(format: Format | None, k: int, native: bool) -> Target:
    if format is None:
        return Target(meta(_ROWS, k))
    return Target(None, meta_parts(format, _ROWS, k), format, format.activation_rule, native)


def grouped_entries(capability: int) -> list[Entry]:
    """Both products of a layer of experts of every scheme, with few and many rows an expert, and what is between."""
    found: list[Entry] = []
    for slot in dict.fromkeys(scheme.moe for scheme in SCHEMES.values()):
        names = [name for name in (slot.activation, slot.weight) if name]
        for tokens in (8, 512, 8192):
            for title, call in _products(slot, tokens, capability):
                name = f"{title} {slot.activation or 'bf16'} x {slot.weight}, {tokens} tokens"
                found += entries(name, names, [call], instruction_pattern(call, capability))
    found += _chain_entries(capability)
    for format in (*_activation_formats(), None):
        m = _ROWS * _TOP_K
        parts = meta_parts(format, m, _INNER) if format else [meta(m, _INNER)]
        where = (meta(m, 2 * _INNER), Gated("silu"), _segments(m), parts)
        name, rule = (format.name, format.activation_rule) if format else ("", "")
        calls = gated_calls(*where, name, rule, has_fp8(capability))
        found += _with_statistic(f"SiLU x up of experts to {name or 'bf16'}", [name] if name else [], calls)
    return found


def _chain_entries(capability: int) -> list[Entry]:
    """The first product with the activation after it, of every scheme whose formats allow it."""
    found: list[Entry] = []
    for slot in dict.fromkeys(scheme.moe for scheme in SCHEMES.values()):
        name = slot.activation or ""
        format = get_format(name) if name else None
        for tokens in (8, 512, 8192) if not between_refusal(name) else ():
            m = tokens * _TOP_K
            x = meta_parts(format, tokens, _HIDDEN) if format else [meta(tokens, _HIDDEN)]
            parts = meta_parts(format, m, _INNER) if format else [meta(m, _INNER)]
            rule = format.activation_rule if format else ""
            stack = _stack(slot.weight, _INNER, _HIDDEN, 2)
            given = (Gated("silu"), parts, name, rule, meta(1), _segments(m))
            call = expert_chain_calls(x, name, stack, _HIDDEN, *given, capability=capability)[-1]
            title = f"SiLU x up of the first product of experts {name or 'bf16'} x {slot.weight}, {tokens} tokens"
            formats = [each for each in (slot.activation, slot.weight) if each]
            found += entries(title, formats, [call], instruction_pattern(call, capability))
    return found


def _products(slot: Slot, tokens: int, capability: int) -> Iterator[tuple[str, Call]]:
    m = tokens * _TOP_K
    format = get_format(slot.activation) if slot.activation else None
    shapes = {"first": (tokens, 2 * _INNER, _HIDDEN), "second": (m, _HIDDEN, _INNER)}
    for order, (rows, n, k) in shapes.items():
        x = meta_parts(format, rows, k) if format else [meta(rows, k)]
        given = (x, slot.activation or "", _stack(slot.weight, n, k), k, meta(m, n), _segments(m))
        yield (
            f"{order} product of experts",
            grouped_calls(
                *given, gather=order == "first", scatter=order == "second", tail=False, capability=capability
            )[-1],
        )


def routing_entries(capability: int) -> list[Entry]:
    """Tokens to experts and back; the table of tiles."""
    found: list[Entry] = []
    for tokens in (32, _ROWS):
        m = tokens * _TOP_K
        ids = meta(tokens, _TOP_K, dtype=torch.int64)
        found += entries(f"route {tokens} tokens", [], route_calls(ids, _segments(m)))
    ids, weights = meta(_ROWS, _TOP_K, dtype=torch.int64), meta(_ROWS, _TOP_K, dtype=torch.float32)
    rows, out = meta(_ROWS * _TOP_K, _HIDDEN), meta(_ROWS, _HIDDEN)
    slot = next(iter(SCHEMES.values())).moe
    given = ([meta(_ROWS, _HIDDEN)], "", _stack(slot.weight, _HIDDEN, _HIDDEN), _HIDDEN)
    table = grouped_calls(*given, meta(_ROWS, _HIDDEN), _segments(_ROWS), tail=True, capability=capability)[:-1]
    return [
        *found,
        *entries("combine", [], combine_calls(rows, ids, weights, _EXPERTS, out)),
        *entries("tiles of segments", [], table),
    ]


def _segments(m: int) -> Segments:
    offsets, order = meta(_EXPERTS + 1, dtype=torch.int32), meta(m, dtype=torch.int32)
    return Segments(offsets, order, _TOP_K)


def _stack(format: str, n: int, k: int, shards: int = 1) -> Stack:
    specs = part_specs_of_stack(get_format(format), _EXPERTS, n, k, shards)
    return Stack([meta(*spec.shape, dtype=spec.dtype) for spec in specs], format, shards=shards)


def _activation_formats() -> list[Format]:
    return [format for format in FORMATS.values() if format.activation]
