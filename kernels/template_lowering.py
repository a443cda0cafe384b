"""Inductor's lowering of `fused_quantize`: one Triton template for all of it.

Where the body has products, a program computes a tile of each, applies the body to them in registers, and quantizes
groups that lie in the tile. Else a program owns rows: it takes the body's reductions over them, one after the other.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from olq_fx import numerics, torch_templates
from olq_fx.formats import Format, get_format
from olq_fx.kernels.blocking import Blocking
from olq_fx.kernels.fused_quantize import Body, Plain, Product, body_of, fused_quantize
from olq_fx.kernels.template_operands import buffers as _buffers
from olq_fx.kernels.template_operands import operand as _operand
from olq_fx.kernels.template_operands import side as _side
from olq_fx.kernels.template_operands import tiles as _tiles
from olq_fx.kernels.template_sources import (
    PRODUCT_IMPORTS,
    ROW_IMPORTS,
    ProductText,
    product_source,
    row_source,
)
from olq_fx.kernels.triton_linear_chain import Chain, chain_blocking
from olq_fx.kernels.triton_product import Operand, constants_of, instruction_of
from olq_fx.kernels.triton_quantize import by_row, coarse_columns

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_FLOAT8 = 89
_ROW_ELEMENTS = 2048
_WARP_ELEMENTS = 512


@dataclasses.dataclass(frozen=True, slots=True)
class _Target:
    """What is written.

    Attributes:
        body: the stages.
        tensors: of the body, in memory.
        format: of the parts.
        rule: of their scales.
        shape: (M, K) of what is quantized.
        device: of all.
    """

    body: Body
    tensors: Sequence[Any]
    format: Format
    rule: str
    shape: tuple[Any, int]
    device: torch.device

    @property
    def capability(self) -> int:
        """Of the GPU, asked anew: one process may make code for several."""
        major, minor = torch.cuda.get_device_capability(self.device)
        return 10 * major + minor

    @property
    def constants(self) -> dict[str, Any]:
        """Of the format, as the sources want them; GROUP_K is 1 where a group is a row."""
        columns = self.format.group[1]
        return {
            "ELEMENT": self.format.element,
            "SCALE": self.format.scale,
            "RULE": self.rule,
            "GROUP_K": columns or 1,
            "LOG": (columns or 1).bit_length() - 1,
            "COARSE": coarse_columns(self.format),
            "NATIVE": self.capability >= _FLOAT8,
            "BY_ROW": by_row(self.format),
            "HAS_COARSE": self.format.coarse is not None,
        }

    def launched(self, kernel: "_Kernel", tiles: Sequence[Blocking], inputs: Sequence[Any]) -> list[Any]:
        """The results of a kernel that reads `inputs` besides the body's tensors, in the best of these tiles."""
        rows, columns = self.shape
        codes, *scales = numerics.part_specs(self.format, 1, columns)
        outputs = [torch_templates.new_buffer((rows, spec.shape[1]), spec.dtype, self.device) for spec in scales] + [
            torch_templates.new_buffer(self.shape, dtype, self.device) for dtype in self.body.kept
        ]
        template = torch_templates.make_template(kernel.name, kernel.source, kernel.grid, kernel.imports)
        choices = [
            torch_templates.Choice(
                template,
                {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k},
                tile.num_warps,
                tile.num_stages,
            )
            for tile in tiles
        ]
        like = torch_templates.layout((rows, codes.shape[1]), codes.dtype, self.device)
        scalars = [
            torch_templates.scalar(each, torch.float32 if each[0] in "yr" else torch.int64, self.device)
            for each in self.body.inputs
            if each[0] != "t"
        ]
        bodies = [torch_templates.scalar_body(stage.graph, [*scalars, *self.tensors]) for stage in self.body.stages]
        made = torch_templates.launch(kernel.name, choices, inputs, outputs, like, self.shape, bodies, self.tensors)
        return [made, *outputs]


@dataclasses.dataclass(frozen=True, slots=True)
class _Kernel:
    """A template: its text, what stands before it, and the grid for (M, K)."""

    name: str
    source: str
    imports: str
    grid: Callable[..., tuple[int, int, int]]


def register() -> None:
    """Tell Inductor."""
    torch_templates.register_lowering(fused_quantize, lower)
    torch_templates.register_call(torch.ops.olq_fx.quantize.default)
    torch_templates.register_rounding(torch.ops.olq_fx.rounded.default)


def lower(body: str, products: Sequence[Plain], tensors: Sequence[Any], format: str, rule: str) -> list[Any]:
    """The parts and what is kept, as buffers of Inductor."""
    known, found = body_of(body), [Product(*each) for each in products]
    realized = [torch_templates.realized(tensor) for tensor in tensors]
    tall = found[0].x[0] if found else realized[known.tall]
    shape = tall.get_size()[0], known.columns
    target = _Target(known, realized, get_format(format), rule, shape, tall.get_device())
    return _with_products(target, found) if found else _with_rows(target)


def _inputs(target: _Target) -> list[str]:
    return [name for name in target.body.inputs if name[0] != "t"]


# Products


def _tile_grid(rows: int, columns: int, meta: Any, *, cdiv: Callable[[int, int], int]) -> tuple[int, int, int]:
    return cdiv(rows, meta["BLOCK_M"]) * cdiv(columns, meta["BLOCK_N"]), 1, 1


def _with_products(target: _Target, products: Sequence[Product]) -> list[Any]:
    shared, width = products[0], target.shape[1]
    a = _operand(shared.x, shared.activation_format)
    weights = [_operand(each.weight, each.weight_format) for each in products]
    instruction = instruction_of(a, weights[0], shared.k, target.capability)
    blocking = _blocking(target, a, weights, shared.k)
    constants = {
        **constants_of(a, weights[0], instruction, blocking, shared.k),
        **target.constants,
        "K": shared.k,
        "DTYPE": _NAMES[shared.dtype],
    }
    side, inputs = _side("A", a), _buffers(shared.x, shared.activation_format)
    texts = []
    for i, (each, operand) in enumerate(zip(products, weights, strict=True)):
        bias = "" if each.bias is None else f"BIAS{i}"
        uniform = operand.outer == "k" and operand.group % blocking.block_n == 0 and each.first % operand.group == 0
        texts.append(ProductText(_side(f"B{i}", operand), bias, each.first, operand.codes.shape[0], uniform))
        inputs += _buffers(each.weight, each.weight_format)
        inputs += [torch_templates.contiguous(each.bias)] if bias else []
    source = product_source(side, texts, constants, _inputs(target), len(target.body.kept), width)
    kernel = _Kernel("olq_fx_linear_quantize", source, PRODUCT_IMPORTS, _tile_grid)
    return target.launched(kernel, _tiles(blocking), inputs)


def _blocking(target: _Target, a: Operand, weights: Sequence[Operand], k: int) -> Blocking:
    rows, width = torch_templates.hint(target.shape[0]), target.shape[1]
    chain = Chain("silu", "paired") if len(weights) > 1 else Chain()
    columns = width * len(weights)
    instruction = instruction_of(a, weights[0], k, target.capability)
    return chain_blocking(rows, columns, k, a, weights[0], instruction, target.format, chain, target.capability)


# Rows


def _row_grid(rows: int, columns: int, meta: Any, *, cdiv: Callable[[int, int], int]) -> tuple[int, int, int]:
    return cdiv(rows, meta["BLOCK_M"]), 1, 1


def _with_rows(target: _Target) -> list[Any]:
    width = target.shape[1]
    # Groups of the widest kind lie within a tile.
    log = (max(128, width, coarse_columns(target.format)) - 1).bit_length()
    stages = [(stage.reduction, _NAMES[stage.dtype]) for stage in target.body.stages if stage.reduction]
    constants = {**target.constants, "LOG_ROW": log}
    source = row_source(stages, constants, _inputs(target), len(target.body.kept), width)
    block_m = max(1, _ROW_ELEMENTS >> log)
    warps = min(32, max(1, (block_m << log) // _WARP_ELEMENTS))
    kernel = _Kernel("olq_fx_rows_quantize", source, ROW_IMPORTS, _row_grid)
    return target.launched(kernel, [Blocking(block_m, 1 << log, 1, num_warps=warps, num_stages=1)], [])
