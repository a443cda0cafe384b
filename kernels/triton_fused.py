"""Norms and activations by the Triton kernels of `triton_producers`, plain or quantized in the same kernel.

Codes and scales have the bits of the pair: `normalize` or `activate` here, then `triton_quantize.quantize`. The
definition of both is `producers` with `reference.quantize`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from olq_fx import numerics
from olq_fx.errors import ConfigurationError
from olq_fx.formats import Format, get_format
from olq_fx.kernels import producers, triton_producers
from olq_fx.kernels.producers import LONGEST_ROW, Activation, Norm
from olq_fx.kernels.triton_calls import Call, as_bytes, run
from olq_fx.kernels.triton_quantize import Tile, by_row, coarse_columns, constants_of, tile_of

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_ELEMENTS_OF_A_WARP = 1024
_PLAIN = Tile(4, 1024)
_PART = Tile(1, 2048, 4)
"""Of a longer row of an activation: wider parts spill on some GPU with some of triton 3.6, 3.7 and 3.8."""

_UNUSED = {"ELEMENT": "", "SCALE": "", "RULE": "", "GROUP_K": 1, "LOG": 0, "NATIVE": False}


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Where the values of a producer go: as they are, quantized, or both.

    Attributes:
        values: (R, K), contiguous, of the dtype that they are rounded to; or None.
        parts: as `numerics.part_specs` lists them; or empty. The scales of blocks are written by their strides.
        format: of the parts.
        rule: one of its scale rules.
        native: whether the GPU casts to float8 (compute capability 8.9 and later).
    """

    values: Tensor | None = None
    parts: Sequence[Tensor] = ()
    format: Format | None = None
    rule: str = ""
    native: bool = True

    @property
    def sink(self) -> str:
        """What the last kernel does with the values: see `triton_producers`."""
        if self.format is None:
            return "none"
        return "rows" if by_row(self.format) else "tiles"

    @property
    def of_tensor(self) -> bool:
        """Whether a statistic of the whole tensor is taken first, by a kernel of its own."""
        return self.format is not None and self.format.group == (None, None)

    def constants(self, tile: Tile) -> dict[str, Any]:
        """Those of the kernel that writes it."""
        if self.format is None:
            return {**_UNUSED, "SINK": self.sink, "COARSE": 0, "BLOCK_M": tile.block_m, "BLOCK_K": tile.block_k}
        written = constants_of(self.format, self.rule, self.native, tile)
        return {**written, "SINK": self.sink, "COARSE": coarse_columns(self.format)}

    def tensors(self, statistic: Tensor | None) -> tuple[Tensor | None, ...]:
        """Values, codes, scale, coarse and statistic, as the kernels take them."""
        codes, scale, coarse = (*map(as_bytes, self.parts), None, None, None)[:3]
        return self.values, codes, scale, coarse, statistic

    @property
    def scale_strides(self) -> tuple[int, int]:
        """Row and column stride of the scales."""
        return (self.parts[1].stride(0), self.parts[1].stride(1)) if self.parts else (0, 0)


def normalize(
    norm: Norm,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`producers.normalize`, without quantization."""
    producers.check((x, residual), x.shape)
    if x.numel() == 0:
        return producers.normalize(norm, x, weight, bias, residual, dtype)
    stream = _stream(x, residual)
    values = torch.empty(x.shape, dtype=dtype or stream.dtype, device=x.device)
    new = None if residual is None else stream
    run(normalize_calls(norm, x, Target(values), weight, bias, residual, new, values.dtype))
    return values, stream


def normalize_quantize(
    norm: Norm,
    x: Tensor,
    format: str,
    rule: str,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    native: bool = True,
) -> tuple[list[Tensor], Tensor]:
    """The parts of a norm's values, and the new residual stream (`x` where there is no residual).

    Args:
        norm: which.
        x: (R, K) of bf16, fp16 or float32, in any layout.
        format: of the parts, an activation format.
        rule: one of its scale rules.
        weight: (K,) or None.
        bias: (K,) or None.
        residual: (R, K) or None.
        dtype: what the values are rounded to before they are quantized; that of the residual stream if it is None.
        native: whether the GPU casts to float8.
    """
    producers.check((x, residual), x.shape)
    if x.numel() == 0:
        values, stream = producers.normalize(norm, x, weight, bias, residual, dtype)
        return list(numerics.quantize(values, get_format(format), rule)), stream
    stream, target = _stream(x, residual), _target(x, x.shape, format, rule, native)
    new = None if residual is None else stream
    run(normalize_calls(norm, x, target, weight, bias, residual, new, dtype or stream.dtype))
    return list(target.parts), stream


def normalize_calls(
    norm: Norm,
    x: Tensor,
    target: Target,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    new_residual: Tensor | None,
    dtype: torch.dtype,
) -> list[Call]:
    """The kernels that fill `target`, and `new_residual` where there is a residual (which it may be itself).

    Args:
        norm: which.
        x: (R, K), not empty.
        target: what is written.
        weight: (K,) or None.
        bias: (K,) or None.
        residual: (R, K) or None.
        new_residual: (R, K) of the promoted dtype of `x` and `residual`; None without a residual.
        dtype: what the values are rounded to.
    """
    if not target.of_tensor:
        return [_norm_call(norm, x, target, None, weight, bias, residual, new_residual, dtype)]
    statistic = torch.zeros(1, dtype=torch.int32, device=x.device)
    first = _norm_call(norm, x, Target(), statistic, weight, bias, residual, new_residual, dtype)
    stream = x if new_residual is None else new_residual
    return [first, _norm_call(norm, stream, target, statistic, weight, bias, None, None, dtype)]


def _norm_call(
    norm: Norm,
    x: Tensor,
    target: Target,
    statistic: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    new_residual: Tensor | None,
    dtype: torch.dtype,
) -> Call:
    rows, k = x.shape
    tile = _norm_tile(k, target)
    weight, bias = (None if vector is None else vector.contiguous() for vector in (weight, bias))
    stream = (x if new_residual is None else new_residual).dtype
    constants = target.constants(tile) | {
        "LAYER": norm.layer,
        "STREAM": _NAMES[stream],
        "NORMED": _NAMES[stream] if norm.rounds_twice else "fp32",
        "DTYPE": _NAMES[dtype],
        "LOG_ROW": tile.block_k.bit_length() - 1,
    }
    if statistic is not None and not target.parts:
        constants["SINK"] = "amax"
    strides = (*x.stride(), *_strides(residual), *_strides(new_residual), *target.scale_strides)
    args = (x, residual, new_residual, weight, bias, *target.tensors(statistic), *strides, rows, k, norm.eps)
    kernel = triton_producers.norm_rows if k <= tile.block_k else triton_producers.norm_long_rows
    return Call(kernel, tile.grid(rows, k)[:1], args, constants, tile.num_warps)


def activate(activation: Activation, inputs: Sequence[Tensor]) -> Tensor:
    """`producers.activate`, without quantization."""
    gate, _ = producers.operands(activation, inputs)
    if gate.numel() == 0:
        return producers.activate(activation, inputs)
    values = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    run(activate_calls(activation, inputs, Target(values)))
    return values


def activate_quantize(
    activation: Activation, inputs: Sequence[Tensor], format: str, rule: str, native: bool = True
) -> list[Tensor]:
    """The parts of an activation's values.

    Args:
        activation: which.
        inputs: (gate,) or (gate, up), each (R, K), or (merged,), (R, 2 K), of bf16, fp16 or float32, in any layout.
        format: of the parts, an activation format.
        rule: one of its scale rules.
        native: whether the GPU casts to float8.
    """
    gate, _ = producers.operands(activation, inputs)
    if gate.numel() == 0:
        return list(numerics.quantize(producers.activate(activation, inputs), get_format(format), rule))
    target = _target(gate, gate.shape, format, rule, native)
    run(activate_calls(activation, inputs, target))
    return list(target.parts)


def activate_calls(activation: Activation, inputs: Sequence[Tensor], target: Target) -> list[Call]:
    """The kernels that fill `target` from what `activate` takes, which is not empty."""
    if not target.of_tensor:
        return [_activation_call(activation, inputs, target, None)]
    statistic = torch.zeros(1, dtype=torch.int32, device=inputs[0].device)
    first = _activation_call(activation, inputs, Target(), statistic)
    return [first, _activation_call(activation, inputs, target, statistic)]


def _activation_call(
    activation: Activation, inputs: Sequence[Tensor], target: Target, statistic: Tensor | None
) -> Call:
    gate, up = producers.operands(activation, inputs)
    (rows, k), dtype = gate.shape, gate.dtype
    interleaved = activation.merged == "interleaved"
    if interleaved:
        gate, up = inputs[0], None
    by_rows = target.sink == "rows"
    if by_rows:
        tile = _row_tile(k, target) if k <= LONGEST_ROW else _PART
    else:
        tile = _PLAIN if target.format is None else tile_of(target.format)
    constants = target.constants(tile) | {"KIND": activation.kind, "INTERLEAVED": interleaved, "DTYPE": _NAMES[dtype]}
    if statistic is not None and not target.parts:
        constants["SINK"] = "amax"
    args = (gate, up, *target.tensors(statistic), *gate.stride(), *_strides(up), *target.scale_strides, rows, k)
    if by_rows:
        constants["ONCE"] = k <= tile.block_k
        return Call(triton_producers.activation_rows, tile.grid(rows, k)[:1], args, constants, tile.num_warps)
    return Call(triton_producers.activation_tiles, tile.grid(rows, k), args, constants, tile.num_warps)


def _row_tile(k: int, target: Target) -> Tile:
    """A tile of whole rows, or of one part of a longer row: 32 elements a thread."""
    coarse = 0 if target.format is None else coarse_columns(target.format)
    width = min(max(producers.row_width(k), 128, coarse), LONGEST_ROW)
    height = max(1, _ELEMENTS_OF_A_WARP // width)
    return Tile(height, width, height * width // _ELEMENTS_OF_A_WARP)


def _norm_tile(k: int, target: Target) -> Tile:
    """That of `_row_tile`; of longer rows with 16 elements a thread.

    With 32 some are left in local memory, on some GPU, by triton 3.6 (nvfp4, mxfp4) or 3.8 (scales by row or tensor).
    """
    tile = _row_tile(k, target)
    return dataclasses.replace(tile, num_warps=2 * tile.num_warps) if k > tile.block_k else tile


def _strides(tensor: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if tensor is None else tensor.stride()


def _stream(x: Tensor, residual: Tensor | None) -> Tensor:
    """Where the new residual stream goes; `x` itself where there is none."""
    if residual is None:
        return x
    return torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)


def _target(x: Tensor, shape: torch.Size, format: str, rule: str, native: bool) -> Target:
    found = get_format(format)
    if not found.activation:
        raise ConfigurationError(f"{found.name} is no activation format")
    specs = numerics.part_specs(found, *shape)
    parts = [torch.empty(spec.shape, dtype=spec.dtype, device=x.device) for spec in specs]
    return Target(None, parts, found, rule, native)
